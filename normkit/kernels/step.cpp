// The training step of a norm with batch statistics as one function of autograd, without Python in either direction:
// `Standardize` (autograd.py) with the kernels in C++ (cpu/) or Triton (triton/).

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "training_step.h"
#include "triton/launches.h"

using at::Tensor;
using std::int64_t;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;
using Kernel = void (*)(const TrainingStep&, int);  // of cpu/kernels.cpp

namespace {

// Lists of tensors, in the order of step.py.
enum Buffer { RUNNING, STEP, SKIPPED, SKIPPED_GRAD, WINDOW, WINDOW_GRAD, SMOOTH_GRAD, AVERAGES, LAG, WARMUP_END, END };
enum Decision { BATCH, VALUE, COUNT, NEXT_STEP, OUTPUT_SCALE, OUTPUT_SHIFT, SAVED_GRAD, SAVED_GAMMA, DECISIONS };

// Lists of numbers, in the order of step.py.
Options options_of(at::IntArrayRef numbers, at::ArrayRef<double> factors) {
    TORCH_CHECK(numbers.size() == 12 && factors.size() == 6, "step.py and step.cpp differ in their lists of numbers");
    return {
        .forward = Forward(numbers[0]), .backward = Backward(numbers[1]), .known_in_advance = bool(numbers[2]),
        .warmup = numbers[3], .until_r = numbers[4], .until_d = numbers[5], .unbiased = bool(numbers[6]),
        .exact_early = bool(numbers[7]), .clamp = bool(numbers[8]), .center = int(numbers[9]), .groups = numbers[10],
        .real = bool(numbers[11]), .eps = float(factors[0]), .rate = float(factors[1]), .rate_grad = float(factors[2]),
        .bound_r = float(factors[3]), .bound_d = float(factors[4]), .floor = float(factors[5]),
    };
}

// What kernels read or write of tensors, which may be missing.
struct Addresses {
    at::Device device;
    bool in_cpp;  // the kernels, whose parameters are float32; plans of launches know the types of theirs

    template <class T = float>
    T* operator()(const Tensor& tensor, const char* name) const {
        constexpr at::ScalarType kind = c10::CppTypeToScalarType<T>::value;
        if (!tensor.defined()) return nullptr;
        TORCH_CHECK(tensor.scalar_type() == kind && tensor.is_contiguous() && tensor.device() == device, name, " is ",
                    tensor.scalar_type(), " on ", tensor.device(), "; it must be ", kind, ", contiguous, on ", device);
        return static_cast<T*>(tensor.data_ptr());
    }
    const float* parameter(const Tensor& tensor, const char* name) const {
        if (!tensor.defined() || in_cpp) return operator()(tensor, name);
        TORCH_CHECK(tensor.device() == device, name, " is on ", tensor.device(), "; it must be on ", device);
        return static_cast<const float*>(tensor.data_ptr());
    }
    int64_t* counter(const Tensor& tensor, const char* name) const { return operator()<int64_t>(tensor, name); }
};

State addresses_of_state(const Addresses& address, const variable_list& state) {
    const auto slots = [](const Tensor& window) { return window.defined() ? window.size(0) : 0; };
    return {
        .running = address(state[RUNNING], "running"), .step = address.counter(state[STEP], "step"),
        .skipped = address.counter(state[SKIPPED], "skipped"),
        .skipped_grad = address.counter(state[SKIPPED_GRAD], "skipped_grad"),
        .window = address(state[WINDOW], "window"), .window_grad = address(state[WINDOW_GRAD], "window_grad"),
        .slots = slots(state[WINDOW]), .slots_grad = slots(state[WINDOW_GRAD]),
        .smooth_grad = address(state[SMOOTH_GRAD], "smooth_grad"), .averages = address(state[AVERAGES], "averages"),
        .lag = address(state[LAG], "lag"), .warmup_end = address.counter(state[WARMUP_END], "warmup_end"),
        .end = address.counter(state[END], "warmup_end"),
    };
}

Decisions addresses_of_decisions(const Addresses& address, const variable_list& made) {
    return {
        .batch = address(made[BATCH], "batch"), .value = address(made[VALUE], "value"),
        .count = address(made[COUNT], "count"), .step = address.counter(made[NEXT_STEP], "step"),
        .output_scale = address(made[OUTPUT_SCALE], "output_scale"),
        .output_shift = address(made[OUTPUT_SHIFT], "output_shift"),
        .saved_grad = address(made[SAVED_GRAD], "saved_grad"), .saved_gamma = address(made[SAVED_GAMMA], "saved_gamma"),
    };
}

// Memory for the decisions of a forward pass.
variable_list new_decisions(const Tensor& x, const Options& options) {
    const int64_t channels = x.size(-1);
    const auto floats = x.options().dtype(at::kFloat);
    variable_list made(DECISIONS);
    for (int i : {BATCH, VALUE}) made[i] = at::empty({1 + options.center, channels}, floats);
    made[COUNT] = at::empty({}, floats);
    made[NEXT_STEP] = at::empty({}, x.options().dtype(at::kLong));
    const bool renorm = options.forward == Forward::RENORM;
    if (renorm || options.forward == Forward::ARITHMETIC) made[OUTPUT_SCALE] = at::empty({channels}, floats);
    if (renorm) made[OUTPUT_SHIFT] = at::empty({channels}, floats);
    if (options.forward == Forward::RUNNING)
        for (int i : {SAVED_GRAD, SAVED_GAMMA}) made[i] = at::empty({1, channels}, floats);
    return made;
}

// Record for autograd that kernels wrote to these buffers.
void mark_written(const variable_list& state, std::initializer_list<Buffer> buffers) {
    for (Buffer i : buffers)
        if (state[i].defined()) state[i].unsafeGetTensorImpl()->bump_version();
}

// What has no gradient. Buffers are not saved as variables: other steps write to them before the backward pass.
struct Given : torch::CustomClassHolder {
    Options options;
    bool has_bias;
    Tensor mask;
    variable_list state;
    std::vector<int64_t> kernels;  // addresses of both passes in C++, or a plan of launches

    Given(const Options& options, bool has_bias, const Tensor& mask, const variable_list& state,
          at::IntArrayRef kernels)
        : options(options), has_bias(has_bias), mask(mask), state(state), kernels(kernels.vec()) {}

    bool in_cpp() const { return kernels.size() == 2; }
    Addresses addresses(const Tensor& x) const { return {x.device(), in_cpp()}; }
    Tensor plain(const Tensor& input) const {  // contiguous and, as Triton's kernels take for granted, aligned
        const Tensor x = input.resolve_neg().contiguous();
        const bool any_address = in_cpp() || !x.has_storage();
        return any_address || reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0 ? x : x.clone();
    }
    void run(const TrainingStep& step, bool backward, const Tensor& x) const {
        if (in_cpp())
            reinterpret_cast<Kernel>(kernels[backward])(step, at::get_num_threads());
        else
            (backward ? differentiate_on_gpu : train_on_gpu)(step, plan_of(kernels), x.options());
    }
};

TrainingStep common_arguments(const Tensor& x, const Tensor& mask, const Tensor& weight, const Given& given,
                              const variable_list& decisions) {
    const Addresses address = given.addresses(x);
    return {
        .x = x.data_ptr(), .mask = address.operator()<bool>(mask, "mask"), .weight = address.parameter(weight, "weight"),
        .n = x.numel() / x.size(-1), .channels = x.size(-1), .options = given.options,
        .state = addresses_of_state(address, given.state), .decisions = addresses_of_decisions(address, decisions),
    };
}

struct Step : torch::autograd::Function<Step> {
    static Tensor forward(AutogradContext* context, const Tensor& input, const Optional& given_weight,
                          const Optional& given_bias, const c10::intrusive_ptr<Given>& given,
                          variable_list& decisions) {
        const Tensor weight = given_weight.value_or(Tensor()), bias = given_bias.value_or(Tensor());
        const Tensor x = given->plain(input), y = at::empty_like(x);
        const bool decided = !decisions.empty();
        if (!decided) decisions = new_decisions(x, given->options);
        TrainingStep step = common_arguments(x, given->mask, weight, *given, decisions);
        step.bias = given->addresses(x).parameter(bias, "bias");
        step.decided = decided;
        step.y = y.data_ptr();
        given->run(step, false, x);
        if (!decided) mark_written(given->state, {RUNNING, STEP, SKIPPED, WINDOW, AVERAGES, LAG, WARMUP_END});
        variable_list saved = decisions;
        saved[BATCH] = Tensor();  // unused in the backward pass
        saved.insert(saved.end(), {input, weight, given->mask});
        context->save_for_backward(saved);
        context->saved_data["given"] = at::IValue::make_capsule(given);
        return y;
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        TORCH_CHECK(!at::GradMode::is_enabled(),
                    "norms with batch statistics cannot be differentiated twice (create_graph=True) while training; "
                    "put them into evaluation mode, or take a per-token norm");
        const auto given = c10::static_intrusive_pointer_cast<Given>(context->saved_data["given"].toCapsule());
        const variable_list saved = context->get_saved_variables();
        const Tensor x = given->plain(saved[DECISIONS]), weight = saved[DECISIONS + 1], mask = saved[DECISIONS + 2];
        const Tensor dy = given->plain(gradients[0]), dx = at::empty_like(x);
        TORCH_CHECK(dy.has_storage(), "these kernels take no gradients under vmap; take one after the other, or, for a "
                    "norm with the exact gradient, use `with normkit.kernels(\"reference\")`");
        TORCH_CHECK(dy.scalar_type() == x.scalar_type(), "the gradient is ", dy.scalar_type(), ", x ", x.scalar_type());
        const auto kind = weight.defined() ? weight.scalar_type() : at::kFloat;
        const auto gradient = [&](bool wanted) {  // the kernels in C++ compute both
            return wanted || given->in_cpp() ? at::empty({x.size(-1)}, x.options().dtype(kind)) : Tensor();
        };
        const Tensor dweight = gradient(weight.defined()), dbias = gradient(given->has_bias);
        TrainingStep step = common_arguments(x, mask, weight, *given, saved);
        step.options.real &= mask.defined();
        step.dy = dy.data_ptr();
        step.dx = dx.data_ptr();
        step.dweight = const_cast<float*>(given->addresses(x).parameter(dweight, "dweight"));
        step.dbias = const_cast<float*>(given->addresses(x).parameter(dbias, "dbias"));
        given->run(step, true, x);
        mark_written(given->state, {SKIPPED_GRAD, WINDOW_GRAD, SMOOTH_GRAD});
        // of x, weight, bias, given, decisions
        return {dx, weight.defined() ? dweight : weight, given->has_bias ? dbias : Tensor(), Tensor(), Tensor()};
    }
};

variable_list defined(const c10::List<Optional>& tensors) {
    variable_list found;
    for (const Optional& each : tensors) found.push_back(each.value_or(Tensor()));
    return found;
}

std::tuple<Tensor, c10::List<Optional>> step(const Tensor& x, const Optional& weight, const Optional& bias,
                                             const Optional& mask, const c10::List<Optional>& state,
                                             const c10::List<Optional>& decisions, at::IntArrayRef numbers,
                                             at::ArrayRef<double> factors, at::IntArrayRef kernels) {
    variable_list made = defined(decisions);
    const Tensor rows = mask ? mask->contiguous() : Tensor();
    const auto given =
        c10::make_intrusive<Given>(options_of(numbers, factors), bias.has_value(), rows, defined(state), kernels);
    const Tensor y = Step::apply(x, weight, bias, given, made);
    c10::List<Optional> found;
    for (const Tensor& each : made) found.push_back(each.defined() ? Optional(each) : std::nullopt);
    return {y, found};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(normkit, library) {
    library.def(
        "step(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor?[] state, Tensor?[] decisions, "
        "int[] numbers, float[] factors, int[] kernels) -> (Tensor, Tensor?[])");
    library.impl("step", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(step));
}
