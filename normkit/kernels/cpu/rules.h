// A whole pass of a norm with batch statistics, its rule applied in between: `train_stat` and `grad_stat` as a KernelRule
// (kernel_rule.py) describes them. The rules in Python stay the reference. Designated initializers are C++20, which g++
// and clang take in C++17 too.

#pragma once

#include "columns.h"
#include "../training_step.h"

namespace {

inline bool finite(const float* values, int64_t size) {
    return std::all_of(values, values + size, [](float value) { return value - value == 0; });
}

// Mean over a window [size, channels] with `entry` in its `slot`; the entry is stored if `keep`.
inline float window_mean(float* window, int64_t size, int64_t channels, int64_t slot, float entry, bool keep,
                         bool geometric) {
    float sum = 0;
    for (int64_t row = 0; row < size; ++row) {
        const float value = row == slot ? entry : window[row * channels];
        sum += geometric ? std::log(value > 0 ? value : 1) : value;  // an empty slot is 0; no mean is used yet
    }
    if (keep) window[slot * channels] = entry;
    return geometric ? std::exp(sum / size) : sum / size;
}

// 0 up to the end of warm-up, then linearly to 1 at `until`.
inline float ramp(int64_t step, int64_t warmup, int64_t until) {
    return std::clamp(float(step - warmup) / float(std::max<int64_t>(until - warmup, 1)), 0.0f, 1.0f);
}

// `old` moved by this share of the way to `target`: at 1 it is the target, which `old + share * ...` may round away.
inline float moved(float old, float target, float share) {
    return share < 0.5f ? old + share * (target - old) : target - (1 - share) * (target - old);
}

inline float within(float value, float most) { return std::max(std::min(value, most), -most); }

// Follow the drift of statistics and note when the warm-up ends: `WarmupNorm.drift_state` (_warmup.py), the reference.
inline void measure_drift(const State& state, const float* batch, int64_t channels, int64_t step, float eps) {
    constexpr float FAST = 1 / 8.0f, SLOW = 1 / 32.0f, LARGEST_LAG = 0.15f, UNSEEN = 1e-4f;
    constexpr int64_t NOTICE = 16;
    if (!state.warmup_end || *state.warmup_end) return;
    float *fast = state.averages, *slow = fast + channels, *variance = slow + channels;
    const float floor = eps > 0 ? eps : std::numeric_limits<float>::min();
    const bool first = *state.lag == 0;
    double drift = 0, noise = 0;
    for (int64_t c = 0; c < channels; ++c) {
        const float level = std::log(std::max(batch[c], floor));
        if (first) fast[c] = slow[c] = level;
        const float apart = level - slow[c];
        variance[c] += SLOW * (apart * apart - variance[c]);
        fast[c] += FAST * (level - fast[c]);
        slow[c] += SLOW * apart;
        drift += (fast[c] - slow[c]) * (fast[c] - slow[c]);
        noise += variance[c];
    }
    const float before = first ? 1 : *state.lag, share = float(drift / (noise + UNSEEN * channels));
    *state.lag = before + SLOW * (share - before);
    if (*state.lag < LARGEST_LAG) *state.warmup_end = step + NOTICE;
}

// Factor and constant of `y = (u - mean) * scale + shift` for `y = weight (output_scale z + output_shift) + bias`, z of
// this `variance`.
inline void affine(const float* variance, const float* weight, const float* bias, const float* output_scale,
                   const float* output_shift, int64_t channels, float eps, Floats& scale, Floats& shift) {
    scale.resize(channels);
    shift.resize(channels);
    for (int64_t c = 0; c < channels; ++c) {
        const float w = weight ? weight[c] : 1;
        scale[c] = w * (output_scale ? output_scale[c] : 1) / std::sqrt(variance[c] + eps);
        shift[c] = (bias ? bias[c] : 0) + (output_shift ? w * output_shift[c] : 0);
    }
}

template <class T>
void standardize(const Standardize& given, int threads) {
    Floats scale, shift;
    affine(given.stat + given.center * given.channels, given.weight, given.bias, given.output_scale,
           given.output_shift, given.channels, given.eps, scale, shift);
    const ColumnForward pass{.x = given.x, .y = given.y, .mean = given.center ? given.stat : nullptr,
                             .scale = scale.data(), .shift = shift.data(), .n = given.n, .channels = given.channels,
                             .groups = given.groups, .eps = given.eps};
    column_forward<T>(pass, threads);
}

// Compute the statistics of the batch, apply the rule and update the state. If the statistics are known in advance, y
// is written on the reading that sums.
template <class T>
void decide(const TrainingStep& given, int threads) {
    const Options options = given.options;
    const State state = given.state;
    const Decisions made = given.decisions;
    const int64_t channels = given.channels, size = state.slots, warmup = options.warmup;
    const Forward rule = options.forward;
    const bool geometric = rule == Forward::GEOMETRIC;
    const int center = options.center;
    const float eps = options.eps, rate = options.rate, bound_r = options.bound_r;
    float *mean_now = made.batch, *now = made.batch + center * channels, *before = state.running + center * channels;
    Floats scale, shift;
    if (options.known_in_advance)
        affine(before, given.weight, given.bias, nullptr, nullptr, channels, eps, scale, shift);
    const ColumnForward sums{.x = given.x, .mask = given.mask, .y = options.known_in_advance ? given.y : nullptr,
                             .scale = scale.data(), .shift = shift.data(), .stat = made.batch, .count = made.count,
                             .n = given.n, .channels = channels, .groups = options.groups, .eps = eps,
                             .center = center};
    column_forward<T>(sums, threads);
    const float count = *made.count;
    const bool ok = count > 0 && finite(made.batch, (1 + center) * channels);
    const int64_t step = *made.step = *state.step + 1, slot = size ? step % size : 0;
    const bool early = rule == Forward::RUNNING ? step <= warmup : step <= size || step < warmup;
    const float most_r = 1 + (bound_r - 1) * ramp(step, warmup, options.until_r);
    const float most_d = options.bound_d * ramp(step, warmup, options.until_d);
    for (int64_t c = 0; c < channels; ++c) {
        const float old = before[c], seen = ok ? now[c] : old;  // unusable batch: fall back to running statistics
        float used = seen, fresh = seen;  // to divide by, and to keep as the running value
        if (rule == Forward::BATCH) {
            if (options.unbiased) fresh *= count / std::max(count - 1, 1.0f);
            fresh = moved(old, fresh, rate);
        } else if (rule == Forward::RUNNING) {
            used = early ? seen : old;
            made.saved_grad[c] = state.smooth_grad[c];
            made.saved_gamma[c] = seen / (used + eps);
            fresh = moved(old, seen, early ? std::max(1 / float(step), options.floor) : rate);
        } else if (rule == Forward::RENORM) {
            const float sigma = std::sqrt(old + eps), sigma_now = std::sqrt(seen + eps);
            const float mean = ok ? mean_now[c] : state.running[c], next = moved(sigma, sigma_now, rate);
            made.output_scale[c] = std::clamp(sigma_now / sigma, 1 / most_r, most_r);
            made.output_shift[c] = within((mean - state.running[c]) / sigma, most_d);
            fresh = next * next - eps;
        } else {
            const float entry = std::max(seen, options.floor);
            const float mean = window_mean(state.window + c, size, channels, slot, entry, ok, geometric);
            used = early ? seen : mean;
            fresh = moved(old, used, rate);
            if (made.output_scale) {
                const float jump = std::sqrt((used + eps) / (old + eps));
                const bool is_free = step > std::max(options.until_r, warmup);
                made.output_scale[c] = is_free ? std::clamp(jump, 1 / bound_r, bound_r) : 1;
            }
        }
        made.value[center * channels + c] = used;
        if (ok) before[c] = fresh;
        if (!center) continue;
        made.value[c] = ok ? mean_now[c] : state.running[c];
        if (ok) state.running[c] = moved(state.running[c], mean_now[c], rate);
    }
    if (ok) measure_drift(state, now, channels, step, eps);
    *(ok ? state.step : state.skipped) = ok ? step : *state.skipped + 1;
}

// A training forward: decide, unless that is done already, and write y.
template <class T>
void train(const TrainingStep& given, int threads) {
    const Options& options = given.options;
    if (!given.decided) {
        decide<T>(given, threads);
        if (options.known_in_advance) return;
    }
    const Decisions& made = given.decisions;
    const Standardize pass{.x = given.x, .y = given.y, .stat = made.value, .weight = given.weight, .bias = given.bias,
                           .output_scale = made.output_scale, .output_shift = made.output_shift, .n = given.n,
                           .channels = given.channels, .groups = options.groups, .eps = options.eps,
                           .center = options.center};
    standardize<T>(pass, threads);
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
    const float *weight = given.weight, *output_scale = made.output_scale, *output_shift = made.output_shift;
    float* smooth = state.smooth_grad;
    Floats inv(channels), factor(channels, 1.0f), dy_coefficient(channels), x_coefficient(channels);
    Floats constant(channels), sums((real ? 4 : 2) * channels), batch((1 + center) * channels);
    const float *mean = center ? made.value : nullptr, *variance = made.value + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        inv[c] = 1 / std::sqrt(variance[c] + eps);
        if (weight) factor[c] *= weight[c];
        if (output_scale) factor[c] *= output_scale[c];
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
        given.dweight[c] = along * (output_scale ? output_scale[c] : 1) + (output_shift ? output_shift[c] * sums[c] : 0);
        if (center) batch[c] = grad_sums[c] * factor[c] / most;
        now[c] = grad_sums[channels + c] * inv[c] * factor[c] / most;
    }
    const bool ok = count > 0 && finite(batch.data(), (1 + center) * channels);
    const bool early = rule == Backward::WINDOWED ? step <= size || step < options.warmup : step <= options.warmup;
    for (int64_t c = 0; c < channels; ++c) {
        float used = now[c], fresh = 0;
        if (rule == Backward::RUNNING) {
            const float decay = rate * made.saved_gamma[c];
            used = made.saved_grad[c];
            fresh = smooth[c] - used * (options.clamp ? std::min(decay, 1.0f) : decay) + rate * now[c];
        } else if (rule == Backward::WINDOWED) {
            float* window = state.window_grad + c;  // the oldest row first
            const float mean = window_mean(window, size, channels, 0, now[c], false, false);
            for (int64_t row = 1; ok && row < size; ++row) window[(row - 1) * channels] = window[row * channels];
            if (ok) window[(size - 1) * channels] = now[c];
            fresh = used = early ? now[c] : mean;
            if (smooth) fresh = used = moved(smooth[c], used, rate);
        }
        if (smooth && rule != Backward::EXACT && ok) smooth[c] = fresh;
        if (rule != Backward::EXACT && options.exact_early && early) used = now[c];
        x_coefficient[c] = -inv[c] * inv[c] * used;
        if (center) constant[c] = -inv[c] * batch[c];
    }
    if (rule != Backward::EXACT && !ok) ++*state.skipped_grad;
    if (!options.known_in_advance) pass(given.dx, nullptr);
}

}  // namespace
