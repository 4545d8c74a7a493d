// The training step of a norm by batch statistics as one function of autograd, without Python in either direction:
// `Standardize` (autograd.py) with the kernels of this folder.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "arguments.h"

using at::Tensor;
using std::int64_t;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Numbers = std::vector<int64_t>;
using Factors = std::vector<double>;

extern "C" {  // of kernels.cpp
extern void (*train_float32)(const Train&, int);
extern void (*train_bfloat16)(const Train&, int);
extern void (*differentiate_float32)(const Differentiate&, int);
extern void (*differentiate_bfloat16)(const Differentiate&, int);
}

namespace {

// In the order in which step.py lists them.
enum Number { FORWARD, BACKWARD, KNOWN, WARMUP, UNTIL_R, UNTIL_D, UNBIASED, EARLY, CLAMP, CENTER, GROUPS, REAL };
enum Factor { EPS, RATE, RATE_GRAD, BOUND_R, BOUND_D, FLOOR };
enum State { RUNNING, STEP, SKIPPED, SKIPPED_GRAD, WINDOW, WINDOW_GRAD, SMOOTH_GRAD };
constexpr const char* STATES[] = {"running", "step", "skipped", "skipped_grad", "window", "window_grad", "smooth_grad"};
enum Decision { BATCH, VALUE, COUNT, NEXT_STEP, OUTPUT_SCALE, OUTPUT_SHIFT, SAVED_GRAD, SAVED_GAMMA, DECISIONS };
enum Rule { BATCH_RULE, RUNNING_RULE, GEOMETRIC_RULE, ARITHMETIC_RULE, RENORM_RULE };  // as in rules.h

template <class T = float>
T* at_address(const Tensor& tensor) {
    return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

int64_t slots(const Tensor& window) { return window.defined() ? window.size(0) : 0; }

void written(const Tensor& state) {
    if (state.defined()) state.unsafeGetTensorImpl()->bump_version();
}

Tensor plain(const Tensor& x) { return x.resolve_neg().contiguous(); }

// Kernels for the type of `x`, once it is one that they read.
template <class Kernel, class Arguments>
void run(const Tensor& x, Kernel float32, Kernel bfloat16, const Arguments& arguments) {
    TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "no kernel for ", x.scalar_type());
    (x.scalar_type() == at::kFloat ? float32 : bfloat16)(arguments, at::get_num_threads());
}

void check(const Tensor& vectors, at::ScalarType kind, const char* name) {
    TORCH_CHECK(!vectors.defined() || (vectors.scalar_type() == kind && vectors.is_contiguous() && vectors.is_cpu()),
                name, " is ", vectors.scalar_type(), " on ", vectors.device(), "; it must be ", kind,
                ", contiguous, on a CPU");
}

using Optional = std::optional<Tensor>;

Tensor defined(const Optional& tensor) { return tensor ? *tensor : Tensor(); }

struct Options {  // what has no gradient
    Tensor mask;
    variable_list state;
    Numbers numbers;
    Factors factors;
};

struct Step : torch::autograd::Function<Step> {
    static Tensor forward(AutogradContext* context, const Tensor& input, const Optional& given_weight,
                          const Optional& given_bias, const Options& options, variable_list& decisions) {
        const auto& [mask, state, numbers, factors] = options;
        const Tensor weight = defined(given_weight), bias = defined(given_bias);
        const Tensor x = plain(input), y = at::empty_like(x), real = mask.defined() ? mask.contiguous() : mask;
        const int64_t channels = x.size(-1), k = 1 + numbers[CENTER], rule = numbers[FORWARD];
        const bool decided = !decisions.empty();
        check(weight, at::kFloat, "weight"), check(bias, at::kFloat, "bias");
        for (int i : {STEP, SKIPPED, SKIPPED_GRAD}) check(state[i], at::kLong, STATES[i]);
        for (int i : {RUNNING, WINDOW, WINDOW_GRAD, SMOOTH_GRAD}) check(state[i], at::kFloat, STATES[i]);
        if (!decided) {
            const auto floats = x.options().dtype(at::kFloat);
            decisions.resize(DECISIONS);
            for (int i : {BATCH, VALUE}) decisions[i] = at::empty({k, channels}, floats);
            decisions[COUNT] = at::empty({}, floats);
            decisions[NEXT_STEP] = at::empty({}, x.options().dtype(at::kLong));
            if (rule >= ARITHMETIC_RULE) decisions[OUTPUT_SCALE] = at::empty({channels}, floats);
            if (rule == RENORM_RULE) decisions[OUTPUT_SHIFT] = at::empty({channels}, floats);
            if (rule == RUNNING_RULE)
                for (int i : {SAVED_GRAD, SAVED_GAMMA}) decisions[i] = at::empty({1, channels}, floats);
        }
        for (int i = 0; i < DECISIONS; ++i) check(decisions[i], i == NEXT_STEP ? at::kLong : at::kFloat, "a statistic");
        Train given{};
        given.x = x.data_ptr(), given.y = y.data_ptr(), given.mask = at_address<std::uint8_t>(real);
        given.weight = at_address(weight), given.bias = at_address(bias);
        given.n = x.numel() / channels, given.channels = channels, given.groups = numbers[GROUPS];
        given.center = numbers[CENTER], given.rule = rule, given.known_in_advance = numbers[KNOWN];
        given.warmup = numbers[WARMUP], given.until_r = numbers[UNTIL_R], given.until_d = numbers[UNTIL_D];
        given.unbiased = numbers[UNBIASED], given.eps = factors[EPS], given.rate = factors[RATE];
        given.bound_r = factors[BOUND_R], given.bound_d = factors[BOUND_D], given.floor = factors[FLOOR];
        given.running = at_address(state[RUNNING]), given.step = at_address<int64_t>(state[STEP]);
        given.skipped = at_address<int64_t>(state[SKIPPED]), given.window = at_address(state[WINDOW]);
        given.window_size = slots(state[WINDOW]);
        given.smooth_grad = rule == RUNNING_RULE ? at_address(state[SMOOTH_GRAD]) : nullptr;
        given.decided = decided, given.batch = at_address(decisions[BATCH]), given.value = at_address(decisions[VALUE]);
        given.count = at_address(decisions[COUNT]), given.next_step = at_address<int64_t>(decisions[NEXT_STEP]);
        given.output_scale = at_address(decisions[OUTPUT_SCALE]);
        given.output_shift = at_address(decisions[OUTPUT_SHIFT]);
        given.saved_grad = at_address(decisions[SAVED_GRAD]), given.saved_gamma = at_address(decisions[SAVED_GAMMA]);
        run(x, train_float32, train_bfloat16, given);
        if (!decided)
            for (int i : {RUNNING, STEP, SKIPPED, WINDOW}) written(state[i]);
        variable_list saved{input, weight, mask};
        saved.insert(saved.end(), decisions.begin() + VALUE, decisions.end());
        context->save_for_backward(saved);
        context->saved_data["has_bias"] = bias.defined();
        context->saved_data["numbers"] = numbers;
        context->saved_data["factors"] = factors;
        // not saved as variables: other steps write to them before this backward pass
        for (int i : {SKIPPED_GRAD, WINDOW_GRAD, SMOOTH_GRAD})
            if (state[i].defined()) context->saved_data[std::to_string(i)] = state[i];
        return y;
    }

    static variable_list backward(AutogradContext* context, variable_list gradients) {
        TORCH_CHECK(!at::GradMode::is_enabled(),
                    "norms by batch statistics cannot be differentiated twice (create_graph=True) while training; "
                    "put them into evaluation mode, or take a norm of each token by itself");
        const variable_list saved = context->get_saved_variables();
        const auto state = [&](int i) {
            const auto found = context->saved_data.find(std::to_string(i));
            return found == context->saved_data.end() ? Tensor() : found->second.toTensor();
        };
        const auto decision = [&](int i) { return saved[2 + i]; };  // after x, weight, mask; the batch is left out
        const Numbers numbers = context->saved_data["numbers"].toIntVector();
        const Factors factors = context->saved_data["factors"].toDoubleVector();
        const Tensor x = plain(saved[0]), weight = saved[1], dy = plain(gradients[0]), dx = at::empty_like(x);
        const Tensor mask = saved[2].defined() ? saved[2].contiguous() : saved[2];
        const Tensor window = state(WINDOW_GRAD), smooth = state(SMOOTH_GRAD), skipped = state(SKIPPED_GRAD);
        TORCH_CHECK(dy.scalar_type() == x.scalar_type(), "the gradient is ", dy.scalar_type(), ", x ", x.scalar_type());
        const int64_t channels = x.size(-1);
        const Tensor dweight = at::empty({channels}, x.options().dtype(at::kFloat)), dbias = at::empty_like(dweight);
        Differentiate given{};
        given.dy = dy.data_ptr(), given.x = x.data_ptr(), given.dx = dx.data_ptr();
        given.mask = at_address<std::uint8_t>(mask), given.weight = at_address(weight);
        given.n = x.numel() / channels, given.channels = channels, given.groups = numbers[GROUPS];
        given.center = numbers[CENTER], given.real = mask.defined() && numbers[REAL], given.eps = factors[EPS];
        given.rule = numbers[BACKWARD], given.known_in_advance = numbers[KNOWN], given.rate = factors[RATE_GRAD];
        given.warmup = numbers[WARMUP], given.exact_early = numbers[EARLY], given.clamp = numbers[CLAMP];
        given.value = at_address(decision(VALUE)), given.count = at_address(decision(COUNT));
        given.step = at_address<int64_t>(decision(NEXT_STEP));
        given.output_scale = at_address(decision(OUTPUT_SCALE));
        given.output_shift = at_address(decision(OUTPUT_SHIFT));
        given.saved_grad = at_address(decision(SAVED_GRAD)), given.saved_gamma = at_address(decision(SAVED_GAMMA));
        given.skipped = at_address<int64_t>(skipped), given.window = at_address(window);
        given.window_size = slots(window), given.smooth_grad = at_address(smooth);
        given.dweight = at_address(dweight), given.dbias = at_address(dbias);
        run(x, differentiate_float32, differentiate_bfloat16, given);
        for (const Tensor& each : {skipped, window, smooth}) written(each);
        const bool has_bias = context->saved_data["has_bias"].toBool();
        variable_list found(5);  // of x, weight, bias, options, decisions
        found[0] = dx, found[1] = weight.defined() ? dweight : weight, found[2] = has_bias ? dbias : Tensor();
        return found;
    }
};

variable_list defined(const c10::List<Optional>& tensors) {
    variable_list found;
    for (const Optional& each : tensors) found.push_back(defined(each));
    return found;
}

// y and the decisions.
std::tuple<Tensor, c10::List<Optional>> step(const Tensor& x, const Optional& weight, const Optional& bias,
                                             const Optional& mask, const c10::List<Optional>& state,
                                             const c10::List<Optional>& decisions, at::IntArrayRef numbers,
                                             at::ArrayRef<double> factors) {
    variable_list made = defined(decisions);
    const Options options{defined(mask), defined(state), numbers.vec(), factors.vec()};
    const Tensor y = Step::apply(x, weight, bias, options, made);
    c10::List<Optional> found;
    for (const Tensor& each : made) found.push_back(each.defined() ? Optional(each) : std::nullopt);
    return {y, found};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(normkit, library) {
    library.def(
        "step(Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor?[] state, Tensor?[] decisions, "
        "int[] numbers, float[] factors) -> (Tensor, Tensor?[])");
    library.impl("step", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(step));
}
