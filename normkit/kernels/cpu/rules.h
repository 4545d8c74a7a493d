// A whole pass of a norm with batch statistics, its rule applied in between: `train_stat` and `grad_stat` as a KernelRule
// (rule.py) describes them. The rules in Python stay the reference.

#pragma once

#include "columns.h"
#include "../step.h"

namespace {

inline bool finite(const float* values, int64_t size) {
    return std::all_of(values, values + size, [](float value) { return value - value == 0; });
}

// Mean over a window [size, channels] with `entry` in its `slot`; an empty slot is 0, and no mean is used yet.
inline float window_mean(const float* window, int64_t size, int64_t channels, int64_t slot, float entry,
                         bool geometric) {
    float sum = 0;
    for (int64_t row = 0; row < size; ++row) {
        const float value = row == slot ? entry : window[row * channels];
        sum += geometric ? std::log(value > 0 ? value : 1) : value;
    }
    return geometric ? std::exp(sum / size) : sum / size;
}

// Whether a window with this batch in its `slot` has an outlier (UN, Eq. 19): its arithmetic mean exceeds its
// `geometric` mean by more than `size` times the variance of the roots of all its entries from before.
inline bool has_outlier(const float* window, int64_t size, int64_t channels, int64_t slot, const float* batch,
                        const float* geometric, float floor) {
    const int64_t number = size * channels;
    double mean = 0, square = 0;
    for (int64_t i = 0; i < number; ++i) mean += std::sqrt(window[i]) / double(number);
    for (int64_t i = 0; i < number; ++i) square += (std::sqrt(window[i]) - mean) * (std::sqrt(window[i]) - mean);
    const float least = float(square / double(number - 1)) * float(size);
    for (int64_t c = 0; c < channels; ++c) {
        const float entry = std::max(batch[c], floor);
        if (window_mean(window + c, size, channels, slot, entry, false) - geometric[c] > least) return true;
    }
    return false;
}

// `old` moved by this share of the way to `target`: at 1 it is the target, which `old + share * ...` may round away.
inline float moved(float old, float target, float share) {
    return share < 0.5f ? old + share * (target - old) : target - (1 - share) * (target - old);
}

// Compute the statistics of the batch, apply the rule and update the state. If the statistics are known in advance, y
// is written on the reading that sums.
template <class T>
void decide(const TrainingStep& given, int threads) {
    const Options options = given.options;
    const State state = given.state;
    const Decisions made = given.decisions;
    const int64_t channels = given.channels, size = state.slots;
    const Forward rule = options.forward;
    const int center = options.center;
    const float eps = options.eps, rate = options.rate;
    float *mean_now = made.batch, *now = made.batch + center * channels, *before = state.running + center * channels;
    Floats scale, none(channels);
    if (options.known_in_advance) scale = factor_of(before, given.weight, channels, eps);
    const ColumnForward sums{.x = given.x, .mask = given.mask, .y = options.known_in_advance ? given.y : nullptr,
                             .scale = scale.data(), .shift = given.bias ? given.bias : none.data(), .stat = made.batch,
                             .count = made.count, .n = given.n, .channels = channels, .groups = options.groups,
                             .eps = eps, .center = center};
    column_forward<T>(sums, threads);
    const float count = *made.count;
    const bool ok = count > 0 && finite(made.batch, (1 + center) * channels);
    const float* seen = ok ? now : before;  // unusable batch: fall back to running statistics
    const int64_t step = *made.step = *state.step + 1, slot = size ? step % size : 0;
    const bool early = rule == Forward::RUNNING ? step <= options.warmup : step <= size || step < options.warmup;
    Floats mean_of_window(rule == Forward::GEOMETRIC ? channels : 0);
    bool outlier = false;
    if (rule == Forward::GEOMETRIC && !early) {
        for (int64_t c = 0; c < channels; ++c)
            mean_of_window[c] =
                window_mean(state.window + c, size, channels, slot, std::max(seen[c], options.floor), true);
        outlier = made.outlier && has_outlier(state.window, size, channels, slot, seen, mean_of_window.data(),
                                              options.floor);
    }
    if (made.outlier) *made.outlier = outlier;
    for (int64_t c = 0; c < channels; ++c) {
        const float old = before[c];
        float used = seen[c], fresh = used;  // to divide by, and to keep as the running value
        if (rule == Forward::BATCH) {
            if (options.unbiased) fresh *= count / std::max(count - 1, 1.0f);
            fresh = moved(old, fresh, rate);
        } else if (rule == Forward::RUNNING) {
            if (!early) used = old;
            made.saved_grad[c] = state.smooth_grad[c];
            made.saved_gamma[c] = seen[c] / (used + eps);
            fresh = moved(old, seen[c], early ? std::max(1 / float(step), options.floor) : rate);
        } else {
            if (ok) state.window[slot * channels + c] = std::max(outlier ? old : seen[c], options.floor);
            if (!early && !outlier) used = mean_of_window[c];
            fresh = moved(old, used, rate);
        }
        made.value[center * channels + c] = used;
        if (ok) before[c] = fresh;
        if (!center) continue;
        made.value[c] = ok ? mean_now[c] : state.running[c];
        if (ok) state.running[c] = moved(state.running[c], mean_now[c], rate);
    }
    if (ok && outlier) ++*state.filtered;
    *(ok ? state.step : state.skipped) = ok ? step : *state.skipped + 1;
}

// A training forward: decide, unless that is done already, and write y.
template <class T>
void train(const TrainingStep& given, int threads) {
    const Options& options = given.options;
    const int64_t channels = given.channels;
    if (!given.decided) {
        decide<T>(given, threads);
        if (options.known_in_advance) return;
    }
    write_standardized<T>(given.x, given.y, given.decisions.value, options.center, given.weight, given.bias, given.n,
                          channels, options.groups, options.eps, threads);
}

// Compute dx and the gradients of weight and bias, apply the rule and update the state. If the gradient statistics to
// remove are known in advance (`saved_grad`), dx is written on the reading that sums.
template <class T>
void differentiate(const TrainingStep& given, int threads) {
    const Options options = given.options;
    const State state = given.state;
    const Decisions made = given.decisions;
    const int64_t channels = given.channels, size = state.slots_grad, step = *made.step;
    const Backward rule = options.backward;
    const int center = options.center;
    const bool real = options.real;
    const float eps = options.eps, rate = options.rate_grad, count = *made.count;
    const float* weight = given.weight;
    const bool outlier = made.outlier && *made.outlier;
    float* smooth = state.smooth_grad;
    Floats inv(channels), factor(channels, 1.0f), dy_coefficient(channels), x_coefficient(channels);
    Floats constant(channels), sums((real ? 4 : 2) * channels), batch((1 + center) * channels);
    const float *mean = center ? made.value : nullptr, *variance = made.value + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        inv[c] = 1 / std::sqrt(variance[c] + eps);
        if (weight) factor[c] *= weight[c];
        dy_coefficient[c] = inv[c] * factor[c];
        if (options.known_in_advance) x_coefficient[c] = -inv[c] * inv[c] * made.saved_grad[c];
    }
    const auto pass = [&](void* dx, float* sums) {
        const ColumnBackward arguments{.dy = given.dy, .x = given.x, .mask = given.mask, .dx = dx, .mean = mean,
                                       .dy_coefficient = dy_coefficient.data(), .x_coefficient = x_coefficient.data(),
                                       .constant = constant.data(), .sums = sums, .n = given.n, .channels = channels,
                                       .groups = options.groups, .eps = eps, .real = real};
        column_backward<T>(arguments, threads);
    };
    pass(options.known_in_advance ? given.dx : nullptr, sums.data());
    const float *grad_sums = sums.data() + (real ? 2 * channels : 0), most = std::max(count, 1.0f);
    float* now = batch.data() + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        const float along = sums[channels + c] * inv[c];
        given.dbias[c] = sums[c];
        given.dweight[c] = along;
        if (center) batch[c] = grad_sums[c] * factor[c] / most;
        now[c] = grad_sums[channels + c] * inv[c] * factor[c] / most;
    }
    const bool ok = count > 0 && finite(batch.data(), (1 + center) * channels);
    const bool early =
        rule == Backward::WINDOWED ? outlier || step <= size || step < options.warmup : step <= options.warmup;
    for (int64_t c = 0; c < channels; ++c) {
        float used = now[c], fresh = 0;
        if (rule == Backward::RUNNING) {
            const float decay = rate * made.saved_gamma[c];
            used = made.saved_grad[c];
            fresh = smooth[c] - used * (options.clamp ? std::min(decay, 1.0f) : decay) + rate * now[c];
        } else if (rule == Backward::WINDOWED) {
            float* window = state.window_grad + c;  // the oldest row first
            const float entry = outlier ? smooth[c] : now[c];
            const float mean = window_mean(window, size, channels, 0, entry, false);
            for (int64_t row = 1; ok && row < size; ++row) window[(row - 1) * channels] = window[row * channels];
            if (ok) window[(size - 1) * channels] = entry;
            fresh = used = moved(smooth[c], early ? now[c] : mean, rate);
        }
        if (rule != Backward::EXACT && ok) smooth[c] = fresh;
        if (rule != Backward::EXACT && early) used = now[c];
        x_coefficient[c] = -inv[c] * inv[c] * used;
        if (center) constant[c] = -inv[c] * batch[c];
    }
    if (rule != Backward::EXACT && !ok) ++*state.skipped_grad;
    if (!options.known_in_advance) pass(given.dx, nullptr);
}

}  // namespace
