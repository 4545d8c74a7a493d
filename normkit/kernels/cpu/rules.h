// A whole pass of a norm by batch statistics, its rule applied in between: `StatNorm.train_stat` and `grad_stat` as
// ops/mirror.py names them. The rules in Python stay the reference.

#pragma once

#include "columns.h"

namespace {

enum Forward { BATCH, STALE, GEOMETRIC, ARITHMETIC, RENORM };
enum Backward { EXACT, STALE_GRADIENT, WINDOWED };

inline bool finite(const float* values, int64_t size) {
    return std::all_of(values, values + size, [](float value) { return value - value == 0; });
}

// The mean over `size` slots of a window [size, channels] whose `slot` is `entry` now, written down if `keep`.
inline float pushed(float* window, int64_t size, int64_t channels, int64_t slot, float entry, bool keep,
                    bool geometric) {
    float sum = 0;
    for (int64_t row = 0; row < size; ++row) {
        const float value = row == slot ? entry : window[row * channels];
        sum += geometric ? std::log(value > 0 ? value : 1) : value;  // 0: nothing recorded, too early to be used
    }
    if (keep) window[slot * channels] = entry;
    return geometric ? std::exp(sum / size) : sum / size;
}

// 0 up to the warm-up's end, then linearly to 1 at `until`.
inline float grown(int64_t step, int64_t warmup, int64_t until) {
    return std::clamp(float(step - warmup) / float(std::max<int64_t>(until - warmup, 1)), 0.0f, 1.0f);
}

inline float within(float value, float most) { return std::max(std::min(value, most), -most); }

// What multiplies and is added to u - mean, given its `variance`: `weight (post z + shift) + bias`.
inline void affine(const float* variance, const float* weight, const float* bias, const float* post, const float* shift,
                   int64_t channels, float eps, Floats& scale, Floats& level) {
    scale.resize(channels);
    level.resize(channels);
    for (int64_t c = 0; c < channels; ++c) {
        const float w = weight ? weight[c] : 1;
        scale[c] = w * (post ? post[c] : 1) / std::sqrt(variance[c] + eps);
        level[c] = (bias ? bias[c] : 0) + (shift ? w * shift[c] : 0);
    }
}

// The norm at inference, by its `running` statistics.
template <class T>
void infer(const T* x, T* y, const float* running, const float* weight, const float* bias, int64_t n, int64_t channels,
           int64_t groups, float eps, int center, int threads) {
    Floats scale, level;
    affine(running + center * channels, weight, bias, nullptr, nullptr, channels, eps, scale, level);
    column_forward<T>(x, nullptr, y, center ? running : nullptr, scale.data(), level.data(), nullptr, nullptr, n,
                      channels, groups, eps, center, threads);
}

// Moves `running`, `step`, `skipped` and `window`. Finds y, the statistics of the batch (`batch`, usable or not) of
// `count` rows, those to standardize with (`value`), `next` step, `post`, `shift` and the memo (`removed`, `gamma`).
// Where the statistics are `foretold`, y is written on the same reading.
template <class T>
void train(const T* x, const std::uint8_t* mask, T* y, const float* weight, const float* bias, int64_t n,
           int64_t channels, int64_t groups, float eps, int center, int64_t rule, int foretold, float rate,
           int64_t warmup, int64_t until_r, int64_t until_d, float bound_r, float bound_d, float floor, int unbiased,
           float* running, int64_t* step, int64_t* skipped, float* window, int64_t size, const float* smooth,
           float* batch, float* value, float* count, int64_t* next, float* post, float* shift, float* removed,
           float* gamma, int threads) {
    float *mean_now = batch, *now = batch + center * channels, *before = running + center * channels;
    Floats scale, level;
    if (foretold) affine(before, weight, bias, nullptr, nullptr, channels, eps, scale, level);
    column_forward<T>(x, mask, foretold ? y : nullptr, nullptr, scale.data(), level.data(), batch, count, n, channels,
                      groups, eps, center, threads);
    const bool ok = *count > 0 && finite(batch, (1 + center) * channels);
    const int64_t at = *next = *step + 1, slot = size ? at % size : 0;
    const bool early = rule == STALE ? at <= warmup : at <= size || at < warmup;
    const float most_r = 1 + (bound_r - 1) * grown(at, warmup, until_r), most_d = bound_d * grown(at, warmup, until_d);
    for (int64_t c = 0; c < channels; ++c) {
        const float old = before[c], seen = ok ? now[c] : old;  // of a batch that says nothing: the past stands in
        float used = seen, fresh = seen;
        if (rule == STALE) {
            used = early ? seen : old;
            removed[c] = smooth[c];
            gamma[c] = seen / (used + eps);
            fresh = old + (early ? 1 / float(at) : rate) * (seen - old);
        } else if (rule == RENORM) {
            const float sigma = std::sqrt(old + eps), sigma_now = std::sqrt(seen + eps);
            const float mean = ok ? mean_now[c] : running[c], moved = sigma + rate * (sigma_now - sigma);
            post[c] = std::clamp(sigma_now / sigma, 1 / most_r, most_r);
            shift[c] = within((mean - running[c]) / sigma, most_d);
            fresh = moved * moved - eps;
        } else {
            if (rule == BATCH) {
                if (unbiased) fresh = seen * (*count / std::max(*count - 1, 1.0f));
            } else {
                const float entry = std::max(seen, floor);
                const float mean = pushed(window + c, size, channels, slot, entry, ok, rule == GEOMETRIC);
                fresh = used = early ? seen : mean;
                if (post) {
                    const float jump = std::sqrt((used + eps) / (old + eps));
                    post[c] = at <= until_r ? 1 : std::clamp(jump, 1 / bound_r, bound_r);
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
    *(ok ? step : skipped) = ok ? at : *skipped + 1;
    if (foretold) return;
    affine(value + center * channels, weight, bias, post, shift, channels, eps, scale, level);
    column_forward<T>(x, nullptr, y, center ? value : nullptr, scale.data(), level.data(), nullptr, nullptr, n,
                      channels, groups, eps, center, threads);
}

// Moves `skipped`, `window` and `smooth`. Finds dx and the gradients of weight and bias, given `value`, `count`, `at`
// (the step), `post`, `shift` and the memo of the forward pass; what is removed is the memo's where `foretold`.
template <class T>
void differentiate(const T* dy, const T* x, const std::uint8_t* mask, T* dx, const float* weight, int64_t n,
                   int64_t channels, int64_t groups, float eps, int center, int real, int64_t rule, int foretold,
                   float rate, int64_t warmup, int exact_early, int clamp, const float* value, const float* count,
                   const int64_t* at, const float* post, const float* shift, const float* removed, const float* gamma,
                   int64_t* skipped, float* window, int64_t size, float* smooth, float* dweight, float* dbias,
                   int threads) {
    Floats inv(channels), factor(channels, 1.0f), slant(channels), slope(channels), level(channels);
    Floats sums((real ? 4 : 2) * channels), batch((1 + center) * channels);
    const float *mean = center ? value : nullptr, *variance = value + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        inv[c] = 1 / std::sqrt(variance[c] + eps);
        if (weight) factor[c] *= weight[c];
        if (post) factor[c] *= post[c];
        slant[c] = inv[c] * factor[c];
        if (foretold) slope[c] = -inv[c] * inv[c] * removed[c];
    }
    const auto walk = [&](T* to, float* found) {
        column_backward<T>(dy, x, mask, to, mean, slant.data(), slope.data(), level.data(), found, n, channels, groups,
                           eps, real, threads);
    };
    walk(foretold ? dx : nullptr, sums.data());
    const float *felt = sums.data() + (real ? 2 * channels : 0), most = std::max(*count, 1.0f);  // felt by statistics
    float* now = batch.data() + center * channels;
    for (int64_t c = 0; c < channels; ++c) {
        const float along = sums[channels + c] * inv[c];
        if (dbias) dbias[c] = sums[c];
        if (dweight) dweight[c] = along * (post ? post[c] : 1) + (shift ? shift[c] * sums[c] : 0);
        if (center) batch[c] = felt[c] * factor[c] / most;
        now[c] = felt[channels + c] * inv[c] * factor[c] / most;
    }
    const bool ok = *count > 0 && finite(batch.data(), (1 + center) * channels);
    const bool early = rule == WINDOWED ? *at <= size || *at < warmup : *at <= warmup;
    for (int64_t c = 0; c < channels; ++c) {
        float used = now[c], fresh = 0;
        if (rule == STALE_GRADIENT) {
            const float lost = rate * gamma[c];
            used = removed[c];
            fresh = smooth[c] - used * (clamp ? std::min(lost, 1.0f) : lost) + rate * now[c];
        } else if (rule == WINDOWED) {
            const float mean_of_window = pushed(window + c, size, channels, *at % size, now[c], ok, false);
            fresh = used = early ? now[c] : mean_of_window;
            if (smooth) fresh = used = smooth[c] + rate * (used - smooth[c]);
        }
        if (smooth && rule != EXACT && ok) smooth[c] = fresh;
        if (rule != EXACT && exact_early && early) used = now[c];
        slope[c] = -inv[c] * inv[c] * used;
        if (center) level[c] = -inv[c] * batch[c];
    }
    if (rule != EXACT && !ok) ++*skipped;
    if (!foretold) walk(dx, nullptr);
}

}  // namespace
