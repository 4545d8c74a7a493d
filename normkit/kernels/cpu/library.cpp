// PyTorch's operations of the C++ kernels, `torch.ops.normkit`, and the training step of a norm with batch statistics as
// one function of autograd, without Python in either direction: `Standardize` (reference.py) with the kernels here or in
// Triton (triton/). The first ones compute on a CPU in float32 or bfloat16, without gradients of their own.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../step.h"
#include "../triton/launches.h"
#include "columns.h"
#include "rows.h"
#include "rules.h"

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;

namespace {

// -- operations -------------------------------------------------------------------------------------------------------

// `body(T{})` for the type of numbers in x.
template <class Body>
void by_type(const Tensor& x, Body body) {
    TORCH_CHECK(x.is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16), "x is ",
                x.scalar_type(), " on ", x.device(), "; C++ kernels take float32 and bfloat16 on a CPU");
    x.scalar_type() == at::kFloat ? body(float{}) : body(bf16{});
}

// A vector of float32, one number for each channel of x; undefined if it is not given.
Tensor vector(const Tensor& x, const Optional& given, const char* name) {
    if (!given) return {};
    TORCH_CHECK(given->device() == x.device(), name, " is on ", given->device(), "; it must be on ", x.device());
    const bool fits = given->scalar_type() == at::kFloat && given->dim() == 1 && given->size(0) == x.size(-1);
    if (fits && given->is_contiguous()) return *given;
    return given->detach().to(at::kFloat).expand({x.size(-1)}).contiguous();
}

const float* read(const Tensor& vector) { return vector.defined() ? vector.const_data_ptr<float>() : nullptr; }

Tensor floats(const Tensor& x, at::IntArrayRef shape) { return at::empty(shape, x.options().dtype(at::kFloat)); }

// With statistics [k, channels]: mean and variance, or the mean square alone.
Tensor standardize(const Tensor& input, const Tensor& stat, const Optional& weight, const Optional& bias,
                   int64_t groups, double eps) {
    const Tensor x = input.contiguous(), y = at::empty_like(x);
    const Tensor values = stat.detach().to(at::kFloat).contiguous();
    const Tensor w = vector(x, weight, "weight"), b = vector(x, bias, "bias");
    const bool center = stat.size(0) == 2;
    by_type(x, [&](auto of) {
        write_standardized<decltype(of)>(x.const_data_ptr(), y.mutable_data_ptr(), read(values), center, read(w), read(b),
                                         x.numel() / x.size(-1), x.size(-1), groups, float(eps), at::get_num_threads());
    });
    return y;
}

Tensor row_norm(const Tensor& input, const Optional& weight, const Optional& bias, double eps, bool length,
                bool center) {
    const Tensor x = input.contiguous(), y = at::empty_like(x);
    const Tensor w = vector(x, weight, "weight"), b = vector(x, bias, "bias");
    const RowForward pass{.x = x.const_data_ptr(), .y = y.mutable_data_ptr(), .weight = read(w), .bias = read(b),
                          .n = x.numel() / x.size(-1), .channels = x.size(-1), .eps = float(eps), .length = length,
                          .center = center};
    by_type(x, [&](auto of) { row_forward<decltype(of)>(pass, at::get_num_threads()); });
    return y;
}

// dx, and with `wanted` the sums `[2, C]` of dy and of dy * z.
std::tuple<Tensor, Tensor> row_norm_grad(const Tensor& given_dy, const Tensor& input, const Optional& weight, double eps,
                                         bool length, bool center, bool wanted) {
    const Tensor x = input.contiguous(), dy = given_dy.contiguous(), dx = at::empty_like(x);
    const int64_t channels = x.size(-1);
    const Tensor w = vector(x, weight, "weight"), sums = wanted ? floats(x, {2, channels}) : Tensor();
    const RowBackward pass{.dy = dy.const_data_ptr(), .x = x.const_data_ptr(), .dx = dx.mutable_data_ptr(),
                           .weight = read(w), .sums = wanted ? sums.mutable_data_ptr<float>() : nullptr,
                           .n = x.numel() / channels, .channels = channels, .eps = float(eps), .length = length,
                           .center = center};
    by_type(x, [&](auto of) { row_backward<decltype(of)>(pass, at::get_num_threads()); });
    return {dx, sums};
}

// -- a training step --------------------------------------------------------------------------------------------------

// Lists of tensors, in the order of native.py.
enum Buffer {
    RUNNING, STEP, SKIPPED, SKIPPED_GRAD, WINDOW, WINDOW_GRAD, SMOOTH_GRAD, FILTERED, END
};

// A tensor of numbers, in the order of native.py: a list of them would be converted in each step.
Options options_of(const Tensor& numbers, bool known, int64_t groups) {
    TORCH_CHECK(numbers.numel() == 11 && numbers.scalar_type() == at::kDouble && numbers.is_cpu(),
                "native.py and library.cpp differ in their numbers");
    const double* of = numbers.const_data_ptr<double>();
    return {
        .forward = Forward(int(of[0])), .backward = Backward(int(of[1])), .known_in_advance = known,
        .warmup = int64_t(of[2]), .unbiased = of[3] != 0, .clamp = of[4] != 0, .center = int(of[5]), .groups = groups,
        .real = of[6] != 0, .eps = float(of[7]), .rate = float(of[8]), .rate_grad = float(of[9]), .floor = float(of[10]),
    };
}

// What kernels read or write of tensors, which may be missing.
struct Addresses {
    at::Device device;
    bool in_cpp;  // plans of launches know the types of their parameters

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
        .smooth_grad = address(state[SMOOTH_GRAD], "smooth_grad"),
        .filtered = address.counter(state[FILTERED], "filtered"),
        .end = address.counter(state[END], "warmup_end"),
    };
}

// The decisions of a forward pass are one tensor of floats, in the order of `Packed` (native.py): four for step (64
// bits), count and outlier, then batch and value, then saved_grad and saved_gamma of running statistics.
constexpr int64_t HEAD = 4;

Tensor new_decisions(const Tensor& x, const Options& options) {
    const int64_t rows = 2 * (1 + options.center + (options.forward == Forward::RUNNING));
    return floats(x, {HEAD + rows * x.size(-1)});
}

Decisions addresses_of_decisions(const Addresses& address, const Tensor& made, const Options& options,
                                 int64_t channels, bool filters) {
    float *first = address(made, "decisions"), *batch = first + HEAD, *value = batch + (1 + options.center) * channels;
    float* saved = options.forward == Forward::RUNNING ? value + (1 + options.center) * channels : nullptr;
    return {
        .batch = batch, .value = value, .count = first + 2, .step = reinterpret_cast<int64_t*>(first),
        .saved_grad = saved, .saved_gamma = saved ? saved + channels : nullptr,
        .outlier = filters ? reinterpret_cast<bool*>(first + 3) : nullptr,
    };
}

// Record for autograd that kernels wrote to these buffers.
void mark_written(const variable_list& state, std::initializer_list<Buffer> buffers) {
    for (Buffer i : buffers)
        if (state[i].defined()) state[i].unsafeGetTensorImpl()->bump_version();
}

// What has no gradient. Buffers cannot be saved as variables: other steps write to them before the backward pass.
// Decisions need not be saved: only this step writes to them.
struct Given : torch::CustomClassHolder {
    Options options;
    bool has_bias;
    Tensor mask, decisions;
    variable_list state;
    std::vector<int64_t> plan;  // of launches on a GPU; empty for the kernels in C++

    Given(const Options& options, bool has_bias, const Tensor& mask, const Tensor& decisions,
          const c10::List<Optional>& buffers, at::IntArrayRef plan)
        : options(options), has_bias(has_bias), mask(mask), decisions(decisions), plan(plan.vec()) {
        state.reserve(buffers.size());
        for (const Optional& each : buffers) state.push_back(each.value_or(Tensor()));
    }

    bool in_cpp() const { return plan.empty(); }
    Addresses addresses(const Tensor& x) const { return {x.device(), in_cpp()}; }
    // A parameter as the kernels read it: those in C++ as float32.
    Tensor parameter(const Tensor& given, const char* name, const Tensor& x) const {
        return in_cpp() && given.defined() ? vector(x, given, name) : given;
    }
    Tensor plain(const Tensor& input) const {  // contiguous and, as Triton's kernels take for granted, aligned
        const Tensor x = (input.is_neg() ? input.resolve_neg() : input).contiguous();
        const bool any_address = in_cpp() || !x.has_storage();
        return any_address || reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0 ? x : x.clone();
    }
    void run(const TrainingStep& step, bool backward, const Tensor& x) const {
        if (!in_cpp()) {
            (backward ? differentiate_on_gpu : train_on_gpu)(step, plan_of(plan), x.options());
        } else {
            by_type(x, [&](auto of) {
                (backward ? differentiate<decltype(of)> : train<decltype(of)>)(step, at::get_num_threads());
            });
        }
    }
};

TrainingStep common_arguments(const Tensor& x, const Tensor& mask, const Tensor& weight, const Given& given) {
    const Addresses address = given.addresses(x);
    return {
        .x = x.data_ptr(), .mask = address.operator()<bool>(mask, "mask"), .weight = address.parameter(weight, "weight"),
        .n = x.numel() / x.size(-1), .channels = x.size(-1), .options = given.options,
        .state = addresses_of_state(address, given.state),
        .decisions = addresses_of_decisions(address, given.decisions, given.options, x.size(-1),
                                            given.state[FILTERED].defined()),
    };
}

struct Step : torch::autograd::Function<Step> {
    static Tensor forward(AutogradContext* context, const Tensor& input, const Optional& given_weight,
                          const Optional& given_bias, const c10::intrusive_ptr<Given>& given) {
        const Tensor x = given->plain(input), y = at::empty(x.sizes(), x.options());
        const Tensor weight = given->parameter(given_weight.value_or(Tensor()), "weight", x);
        const Tensor bias = given->parameter(given_bias.value_or(Tensor()), "bias", x);
        const bool decided = given->decisions.defined();
        if (!decided) given->decisions = new_decisions(x, given->options);
        TrainingStep step = common_arguments(x, given->mask, weight, *given);
        if (given->in_cpp() && step.state.end && *step.state.end)
            step.options.warmup = given->options.warmup = *step.state.end;
        step.bias = given->addresses(x).parameter(bias, "bias");
        step.decided = decided;
        step.y = y.data_ptr();
        given->run(step, false, x);
        if (!decided) mark_written(given->state, {RUNNING, STEP, SKIPPED, WINDOW, FILTERED});
        context->save_for_backward({input, given_weight.value_or(Tensor()), given->mask});
        context->saved_data["given"] = at::IValue::make_capsule(given);
        return y;
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        TORCH_CHECK(!at::GradMode::is_enabled(),
                    "norms with batch statistics cannot be differentiated twice (create_graph=True) while training; "
                    "put them into evaluation mode, or take a per-token norm");
        const auto given = c10::static_intrusive_pointer_cast<Given>(context->saved_data["given"].toCapsule());
        const variable_list saved = context->get_saved_variables();
        const Tensor x = given->plain(saved[0]), weight = given->parameter(saved[1], "weight", x), mask = saved[2];
        const Tensor dy = given->plain(gradients[0]), dx = at::empty(x.sizes(), x.options());
        TORCH_CHECK(dy.has_storage(), "these kernels take no gradients under vmap; take one after the other, or, for a "
                    "norm with the exact gradient, use `with normkit.kernels(\"reference\")`");
        TORCH_CHECK(dy.scalar_type() == x.scalar_type(), "the gradient is ", dy.scalar_type(), ", x ", x.scalar_type());
        const auto kind = weight.defined() ? weight.scalar_type() : at::kFloat;  // float32 for C++
        const auto gradient = [&](bool wanted) {  // the kernels in C++ compute both
            return wanted || given->in_cpp() ? at::empty({x.size(-1)}, x.options().dtype(kind)) : Tensor();
        };
        const Tensor dweight = gradient(weight.defined()), dbias = gradient(given->has_bias);
        TrainingStep step = common_arguments(x, mask, weight, *given);
        step.options.real &= mask.defined();
        step.dy = dy.data_ptr();
        step.dx = dx.data_ptr();
        step.dweight = const_cast<float*>(given->addresses(x).parameter(dweight, "dweight"));
        step.dbias = const_cast<float*>(given->addresses(x).parameter(dbias, "dbias"));
        given->run(step, true, x);
        mark_written(given->state, {SKIPPED_GRAD, WINDOW_GRAD, SMOOTH_GRAD});
        // of x, weight, bias, given
        const auto cast = [&](const Tensor& sum) {
            const auto kind = saved[1].scalar_type();
            return sum.scalar_type() == kind ? sum : sum.to(kind);
        };
        return {dx, weight.defined() ? cast(dweight) : weight, given->has_bias ? cast(dbias) : Tensor(), Tensor()};
    }
};

// y and the decisions, which are made unless they are given.
std::tuple<Tensor, Tensor> step(const Tensor& x, const Optional& weight, const Optional& bias, const Optional& mask,
                                const Optional& decisions, const c10::List<Optional>& state, const Tensor& numbers,
                                bool known, int64_t groups, at::IntArrayRef plan) {
    const auto given = c10::make_intrusive<Given>(options_of(numbers, known, groups), bias.has_value(),
                                                  mask ? mask->contiguous() : Tensor(), decisions.value_or(Tensor()),
                                                  state, plan);
    const Tensor y = Step::apply(x, weight, bias, given);
    return {y, given->decisions};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(normkit, library) {
    library.def("standardize(Tensor x, Tensor stat, Tensor? weight, Tensor? bias, int groups, float eps) -> Tensor");
    library.def("row_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool length, bool center) -> Tensor");
    library.def(
        "row_norm_grad(Tensor dy, Tensor x, Tensor? weight, float eps, bool length, bool center, bool sums)"
        " -> (Tensor, Tensor)");
    library.def(
        "step(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor? decisions, Tensor?[] state, Tensor numbers, "
        "bool known, int groups, int[] plan) -> (Tensor, Tensor)");
    library.impl("step", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(step));
}

TORCH_LIBRARY_IMPL(normkit, CompositeExplicitAutograd, library) {  // not CPU: errors name what is on another device
    library.impl("standardize", TORCH_FN(standardize));
    library.impl("row_norm", TORCH_FN(row_norm));
    library.impl("row_norm_grad", TORCH_FN(row_norm_grad));
}
