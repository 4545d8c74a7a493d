// Both passes of a training step on a GPU, as launches of kernels that Triton compiled (plans.py). Forward: sums, rule,
// standardize. Backward: sums, rule, dx. If the statistics are known in advance, standardize and dx share the reading of
// the sums. Scratch memory comes from PyTorch's allocator.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "../step.h"

namespace {

// The kernels of a plan.
enum KernelIndex { SUMS, FILTER, RULE, OUTPUT, GRAD_SUMS, GRAD_RULE, GRAD_OUTPUT, KERNELS };

// Functions of NVIDIA's driver: cuLaunchKernel, cuCtxPushCurrent, cuCtxPopCurrent.
using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                             void**);
using PushContext = int (*)(void*);
using PopContext = int (*)(void**);

struct Plan {  // in the order of plans.py
    std::int64_t launch, push, pop, context, stream, programs, blocks, sum_blocks;
    struct {
        std::int64_t function, warps, shared;
    } kernels[KERNELS];
};

inline Plan plan_of(at::IntArrayRef numbers) {
    TORCH_CHECK(numbers.size() * sizeof(std::int64_t) == sizeof(Plan), "plans.py and launches.h differ in their plans");
    Plan plan;
    std::memcpy(&plan, numbers.data(), sizeof(Plan));
    return plan;
}

// The context of the device is current as long as this lives: threads of autograd may have none.
struct Current {
    const Plan& plan;
    explicit Current(const Plan& plan) : plan(plan) { reinterpret_cast<PushContext>(plan.push)((void*)plan.context); }
    ~Current() {
        void* popped;
        reinterpret_cast<PopContext>(plan.pop)(&popped);
    }
};

// Launch a kernel. Addresses that are missing are no parameters: Triton compiled them away.
template <class... Values>
void launch(const Plan& plan, KernelIndex index, std::int64_t width, std::int64_t height, const Values&... values) {
    std::array<std::int64_t, sizeof...(values) + 4> memory{};  // the last four are Triton's own, unused
    std::array<void*, sizeof...(values) + 4> parameters;
    std::size_t count = 0;
    const auto add = [&](const auto& value) {
        if constexpr (std::is_pointer_v<std::decay_t<decltype(value)>>)
            if (!value) return;
        std::memcpy(&memory[count++], &value, sizeof(value));  // 32-bit integers are the lower half
    };
    (add(values), ...);
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = &memory[i];
    const auto& kernel = plan.kernels[index];
    const int error = reinterpret_cast<LaunchKernel>(plan.launch)(
        (void*)kernel.function, unsigned(width), unsigned(height), 1, unsigned(32 * kernel.warps), 1, 1,
        unsigned(kernel.shared), (void*)plan.stream, parameters.data(), nullptr);
    TORCH_CHECK(!error, "cuLaunchKernel failed with error ", error, " for kernel ", int(index), " of a training step");
}

// Memory for partial results, cut into aligned parts.
struct Scratch {
    at::Tensor memory;
    std::int64_t used = 0;

    static std::int64_t padded(std::int64_t size) { return (size + 31) / 32 * 32; }
    Scratch(const at::TensorOptions& options, std::initializer_list<std::int64_t> sizes) {
        std::int64_t total = 0;
        for (std::int64_t size : sizes) total += padded(size);
        memory = at::empty({total}, options.dtype(at::kFloat));
    }
    float* take(std::int64_t size) {
        float* part = size ? static_cast<float*>(memory.data_ptr()) + used : nullptr;
        used += padded(size);
        return part;
    }
};

inline void train_on_gpu(const TrainingStep& step, const Plan& plan, const at::TensorOptions& options_of_x) {
    const Current current(plan);
    const Options& options = step.options;
    const State& state = step.state;
    const Decisions& made = step.decisions;
    const std::int64_t n = step.n, channels = step.channels, center = options.center, last = center * channels;
    const float* none = nullptr;
    if (!step.decided) {
        const bool known = options.known_in_advance;
        const std::int64_t share = plan.programs * channels, shares = plan.programs * plan.blocks;
        const std::int64_t parts = made.outlier ? 4 * plan.sum_blocks : 0;
        Scratch scratch(options_of_x, {center * share, share, plan.programs, shares, parts});
        float *sum = scratch.take(center * share), *square = scratch.take(share), *count = scratch.take(plan.programs);
        float *finite = scratch.take(shares), *excess = scratch.take(parts);
        launch(plan, SUMS, plan.programs, plan.blocks, step.x, step.mask, known ? step.y : nullptr,
               known && center ? state.running : none, known ? state.running + last : none, known ? step.weight : none,
               known ? step.bias : none, sum, square, count, finite, state.step, made.step, n, channels, channels,
               options.eps);
        if (made.outlier)
            launch(plan, FILTER, plan.sum_blocks, 1, sum, square, count, finite, state.running, state.window, made.step,
                   excess, plan.programs, shares, channels, state.slots, options.floor);
        launch(plan, RULE, plan.sum_blocks, 1, sum, square, count, finite, made.step, state.running, state.step,
               state.skipped, state.window, excess, state.filtered, made.outlier, made.batch, made.value, made.count,
               made.saved_grad, made.saved_gamma, state.smooth_grad, state.end, plan.programs, shares,
               plan.sum_blocks, channels, state.slots, options.eps, options.rate, options.warmup, options.floor);
        if (known) return;
    }
    launch(plan, OUTPUT, plan.programs, plan.blocks, step.x, step.y, center ? made.value : none, made.value + last,
           step.weight, step.bias, n, channels, channels, options.eps);
}

inline void differentiate_on_gpu(const TrainingStep& step, const Plan& plan, const at::TensorOptions& options_of_x) {
    const Current current(plan);
    const Options& options = step.options;
    const State& state = step.state;
    const Decisions& made = step.decisions;
    const std::int64_t n = step.n, channels = step.channels, center = options.center, last = center * channels;
    const bool known = options.known_in_advance, exact = options.backward == Backward::EXACT;
    const std::int64_t share = plan.programs * (options.real ? 4 : 2) * channels, shares = plan.programs * plan.blocks;
    const std::int64_t removed_size = known ? 0 : (1 + center) * channels;
    Scratch scratch(options_of_x, {share, exact ? 0 : shares, removed_size});
    float *sums = scratch.take(share), *finite = scratch.take(exact ? 0 : shares), *removed = scratch.take(removed_size);
    const float *none = nullptr, *mean = center ? made.value : none, *variance = made.value + last;
    launch(plan, GRAD_SUMS, plan.programs, plan.blocks, step.dy, step.x, step.mask, known ? step.dx : nullptr, mean,
           variance, step.weight, known ? made.saved_grad : none, sums, finite, n, channels,
           channels, channels, options.eps);
    launch(plan, GRAD_RULE, plan.sum_blocks, 1, sums, finite, made.count, made.step, step.weight,
           made.saved_grad, made.saved_gamma, made.outlier, state.skipped_grad, state.window_grad,
           state.smooth_grad, state.end, removed, step.dweight, step.dbias, plan.programs, shares, channels,
           state.slots_grad, options.rate_grad, options.warmup);
    if (!known)
        launch(plan, GRAD_OUTPUT, plan.programs, plan.blocks, step.dy, step.x, step.mask, step.dx, mean, variance,
               step.weight, removed, n, channels, channels, channels, options.eps);
}

}  // namespace
