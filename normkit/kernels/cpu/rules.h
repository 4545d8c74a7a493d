// A whole pass of a norm by batch statistics, its rule applied in between: `train_stat` and `grad_stat` as a KernelRule
// (kernel_rule.py) describes them. The rules in Python stay the reference.

#pragma once

#include "columns.h"

namespace {

enum Forward { BATCH, RUNNING, GEOMETRIC, ARITHMETIC, RENORM };
enum Backward { EXACT, RUNNING_GRADIENT, WINDOWED };

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

inline float within(float value, float most) { return std::max(std::min(value, most), -most); }

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

// The norm at inference, by its `running` statistics.
template <class T>
void infer(const Infer& given, int threads) {
    Floats scale, shift;
    affine(given.running + given.center * given.channels, given.weight, given.bias, nullptr, nullptr, given.channels,
           given.eps, scale, shift);
    ColumnForward pass{};
    pass.x = given.x, pass.y = given.y, pass.mean = given.center ? given.running : nullptr;
    pass.scale = scale.data(), pass.shift = shift.data();
    pass.n = given.n, pass.channels = given.channels, pass.groups = given.groups;
    pass.eps = given.eps, pass.center = given.center;
    column_forward<T>(pass, threads);
}

// Compute the statistics of the batch, apply the rule and update the state. If the statistics are known in advance, y
// is written on the reading that sums.
template <class T>
void decide(const Train& given, int threads) {
    const int64_t channels = given.channels, rule = given.rule, size = given.window_size;
    const int center = given.center, known_in_advance = given.known_in_advance;
    const float eps = given.eps, rate = given.rate;
    float *batch = given.batch, *value = given.value, *running = given.running;
    float *output_scale = given.output_scale, *output_shift = given.output_shift;
    float *mean_now = batch, *now = batch + center * channels, *before = running + center * channels;
    Floats scale, shift;
    if (known_in_advance) affine(before, given.weight, given.bias, nullptr, nullptr, channels, eps, scale, shift);
    ColumnForward sums{};
    sums.x = given.x, sums.mask = given.mask, sums.y = known_in_advance ? given.y : nullptr;
    sums.scale = scale.data(), sums.shift = shift.data(), sums.stat = batch, sums.count = given.count;
    sums.n = given.n, sums.channels = channels, sums.groups = given.groups, sums.eps = eps, sums.center = center;
    column_forward<T>(sums, threads);
    const float count = *given.count;
    const bool ok = count > 0 && finite(batch, (1 + center) * channels);
    const int64_t step = *given.next_step = *given.step + 1, slot = size ? step % size : 0;
    const bool early = rule == RUNNING ? step <= given.warmup : step <= size || step < given.warmup;
    const float bound_r = given.bound_r, most_r = 1 + (bound_r - 1) * ramp(step, given.warmup, given.until_r);
    const float most_d = given.bound_d * ramp(step, given.warmup, given.until_d);
    for (int64_t c = 0; c < channels; ++c) {
        const float old = before[c], seen = ok ? now[c] : old;  // unusable batch: fall back to running statistics
        float used = seen, fresh = seen;
        if (rule == RUNNING) {
            used = early ? seen : old;
            given.saved_grad[c] = given.smooth_grad[c];
            given.saved_gamma[c] = seen / (used + eps);
            fresh = old + (early ? std::max(1 / float(step), given.floor) : rate) * (seen - old);
        } else if (rule == RENORM) {
            const float sigma = std::sqrt(old + eps), sigma_now = std::sqrt(seen + eps);
            const float mean = ok ? mean_now[c] : running[c], moved = sigma + rate * (sigma_now - sigma);
            output_scale[c] = std::clamp(sigma_now / sigma, 1 / most_r, most_r);
            output_shift[c] = within((mean - running[c]) / sigma, most_d);
            fresh = moved * moved - eps;
        } else {
            if (rule == BATCH) {
                if (given.unbiased) fresh = seen * (count / std::max(count - 1, 1.0f));
            } else {
                const float entry = std::max(seen, given.floor);
                const float mean = window_mean(given.window + c, size, channels, slot, entry, ok, rule == GEOMETRIC);
                fresh = used = early ? seen : mean;
                if (output_scale) {
                    const float jump = std::sqrt((used + eps) / (old + eps));
                    output_scale[c] = step <= given.until_r ? 1 : std::clamp(jump, 1 / bound_r, bound_r);
                }
            }
            fresh = old + rate * (fresh - old);
        }
        value[center * channels + c] = used;
        if (ok) before[c] = fresh;
        if (!center) continue;
        value[c] = ok ? mean_now[c] : running[c];
        if (ok) running[c] += rate * (mean_now[c] - running[c]);
    }
    *(ok ? given.step : given.skipped) = ok ? step : *given.skipped + 1;
}

// A training forward: decide, unless that is done already, and write y.
template <class T>
void train(const Train& given, int threads) {
    if (!given.decided) {
        decide<T>(given, threads);
        if (given.known_in_advance) return;
    }
    Floats scale, shift;
    affine(given.value + given.center * given.channels, given.weight, given.bias, given.output_scale,
           given.output_shift, given.channels, given.eps, scale, shift);
    ColumnForward pass{};
    pass.x = given.x, pass.y = given.y, pass.mean = given.center ? given.value : nullptr;
    pass.scale = scale.data(), pass.shift = shift.data();
    pass.n = given.n, pass.channels = given.channels, pass.groups = given.groups;
    pass.eps = given.eps, pass.center = given.center;
    column_forward<T>(pass, threads);
}

// Compute dx and the gradients of weight and bias, apply the rule and update the state. If the gradient statistics to
// remove are known in advance (`saved_grad`), dx is written on the reading that sums.
template <class T>
void differentiate(const Differentiate& given, int threads) {
    const int64_t channels = given.channels, rule = given.rule, size = given.window_size, step = *given.step;
    const int center = given.center, real = given.real, known_in_advance = given.known_in_advance;
    const float *weight = given.weight, *output_scale = given.output_scale, *output_shift = given.output_shift;
    const float eps = given.eps, rate = given.rate, count = *given.count;
    float* smooth = given.smooth_grad;
    Floats inv(channels), factor(channels, 1.0f), dy_coefficient(channels), x_coefficient(channels);
    Floats constant(channels), sums((real ? 4 : 2) * channels), batch((1 + center) * channels);
    const float *mean = center ? given.value : nullptr, *variance = given.value + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        inv[c] = 1 / std::sqrt(variance[c] + eps);
        if (weight) factor[c] *= weight[c];
        if (output_scale) factor[c] *= output_scale[c];
        dy_coefficient[c] = inv[c] * factor[c];
        if (known_in_advance) x_coefficient[c] = -inv[c] * inv[c] * given.saved_grad[c];
    }
    const auto pass = [&](void* dx, float* sums) {
        ColumnBackward pass{};
        pass.dy = given.dy, pass.x = given.x, pass.mask = given.mask, pass.dx = dx, pass.mean = mean;
        pass.dy_coefficient = dy_coefficient.data(), pass.x_coefficient = x_coefficient.data();
        pass.constant = constant.data(), pass.sums = sums;
        pass.n = given.n, pass.channels = channels, pass.groups = given.groups, pass.eps = eps, pass.real = real;
        column_backward<T>(pass, threads);
    };
    pass(known_in_advance ? given.dx : nullptr, sums.data());
    const float *grad_sums = sums.data() + (real ? 2 * channels : 0), most = std::max(count, 1.0f);
    float* now = batch.data() + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        const float along = sums[channels + c] * inv[c];
        if (given.dbias) given.dbias[c] = sums[c];
        if (given.dweight)
            given.dweight[c] =
                along * (output_scale ? output_scale[c] : 1) + (output_shift ? output_shift[c] * sums[c] : 0);
        if (center) batch[c] = grad_sums[c] * factor[c] / most;
        now[c] = grad_sums[channels + c] * inv[c] * factor[c] / most;
    }
    const bool ok = count > 0 && finite(batch.data(), (1 + center) * channels);
    const bool early = rule == WINDOWED ? step <= size || step < given.warmup : step <= given.warmup;
    for (int64_t c = 0; c < channels; ++c) {
        float used = now[c], fresh = 0;
        if (rule == RUNNING_GRADIENT) {
            const float decay = rate * given.saved_gamma[c];
            used = given.saved_grad[c];
            fresh = smooth[c] - used * (given.clamp ? std::min(decay, 1.0f) : decay) + rate * now[c];
        } else if (rule == WINDOWED) {
            const float mean = window_mean(given.window + c, size, channels, step % size, now[c], ok, false);
            fresh = used = early ? now[c] : mean;
            if (smooth) fresh = used = smooth[c] + rate * (used - smooth[c]);
        }
        if (smooth && rule != EXACT && ok) smooth[c] = fresh;
        if (rule != EXACT && given.exact_early && early) used = now[c];
        x_coefficient[c] = -inv[c] * inv[c] * used;
        if (center) constant[c] = -inv[c] * batch[c];
    }
    if (rule != EXACT && !ok) ++*given.skipped;
    if (!known_in_advance) pass(given.dx, nullptr);
}

}  // namespace
