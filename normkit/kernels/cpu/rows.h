// Rows divided by their root mean square or their length, with their mean removed or not, and the gradient of that.

#pragma once

#include "loops.h"

namespace {

struct RowForward {  // row_forward: each row, less its mean if `center`, divided by its root mean square or length
    const void* x;
    void* y;
    const float* weight;
    const float* bias;
    int64_t n;
    int64_t channels;
    float eps;
    int length;
    int center;
};

struct RowBackward {  // row_backward
    const void* dy;
    const void* x;
    void* dx;
    const float* weight;
    float* sums;  // [2, channels]: of dy and of dy * z
    int64_t n;
    int64_t channels;
    float eps;
    int length;
    int center;
};

// Factor of a row with this sum of squares: 1 / sqrt(mean(x^2) + eps), or 1 / max(|x|, eps), a constant if `clamped`.
struct Factor {
    float value;
    bool clamped;

    Factor(float square, int64_t channels, float eps, int length) {
        const float norm = std::sqrt(square);
        clamped = length && norm < eps;
        value = 1 / (length ? std::max(norm, eps) : std::sqrt(square / channels + eps));
        if (norm != norm) value = norm;  // std::max would lose it
    }
};

inline float mean_of(const float* row, int64_t channels) {
    return total(0, channels, [=](int64_t c) { return row[c]; }) / channels;
}

template <class T>
void row_forward(const RowForward& given, int threads) {
    const T* x = static_cast<const T*>(given.x);
    T* y = static_cast<T*>(given.y);
    const float *weight = given.weight, *bias = given.bias;
    const int64_t n = given.n, channels = given.channels;
    const float eps = given.eps;
    const int length = given.length, center = given.center;
    const Chunks chunks(n, channels * sizeof(T));
    chunks.over(channels, threads, false, [&](int64_t, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels);
        OutputRows<T> results(y, channels, chunks.large);
        for (int64_t i = from; i < to; ++i) {
            const float* u = rows[i];
            const float mean = center ? mean_of(u, channels) : 0;
            const auto apart = [=](int64_t c) { return u[c] - mean; };
            const float square = total(0, channels, [=](int64_t c) { return apart(c) * apart(c); });
            const float r = Factor(square, channels, eps, length).value;
            const auto pass = [&](auto weighted, auto biased) {
                constexpr bool WEIGHTED = weighted, BIASED = biased;
                results.write(i, channels, [=](int64_t c) {
                    const float y = WEIGHTED ? apart(c) * r * weight[c] : apart(c) * r;
                    return BIASED ? y + bias[c] : y;
                });
            };
            specialize(pass, weight, bias);
        }
    });
}

// With z = r (x - mean) and g = weight dy: `dx = r (g - z mean(g z))`, for a length `r (g - z sum(g z))`, with the mean
// removed `r (g - mean(g) - z mean(g z))`; the sums of dy and of dy z.
template <class T>
void row_backward(const RowBackward& given, int threads) {
    const T *dy = static_cast<const T*>(given.dy), *x = static_cast<const T*>(given.x);
    T* dx = static_cast<T*>(given.dx);
    const float* weight = given.weight;
    float* sums = given.sums;
    const int64_t n = given.n, channels = given.channels;
    const float eps = given.eps;
    const int length = given.length, center = given.center;
    const Chunks chunks(n, channels * sizeof(T));
    const int64_t size = sums ? 2 * channels : 0;
    Floats parts(chunks.number * size);
    chunks.over(channels, threads, false, [&](int64_t chunk, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels), grads(dy, channels);
        OutputRows<T> results(dx, channels, chunks.large);
        Floats block(size);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(block.begin(), block.end(), 0.0f);
            for (int64_t i = first; i < last; ++i) {
                const float *u = rows[i], *dy = grads[i];
                float *sum = block.data(), *with = sum + channels;
                const auto pass = [&](auto weighted, auto adds) {
                    constexpr bool WEIGHTED = weighted, ADDS = adds;
                    const auto g = [=](int64_t c) { return WEIGHTED ? dy[c] * weight[c] : dy[c]; };
                    const float mean = center ? mean_of(u, channels) : 0;
                    const auto apart = [=](int64_t c) { return u[c] - mean; };
                    const auto [square, dot, all] = totals(
                        0, channels, [=](int64_t c) { return apart(c) * apart(c); },
                        [=](int64_t c) { return g(c) * apart(c); }, g);
                    const Factor factor(square, channels, eps, length);
                    const float r = factor.value;
                    const float along = factor.clamped ? 0 : dot * r * r / (length ? 1 : channels);
                    const float mean_g = center ? all / channels : 0;
                    results.write(i, channels, [=](int64_t c) {
                        if constexpr (ADDS) sum[c] += dy[c], with[c] += dy[c] * (apart(c) * r);
                        return r * (g(c) - mean_g - apart(c) * along);
                    });
                };
                specialize(pass, weight, sums);
            }
            each(size, [from = block.data(), all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (sums) add_up(parts, chunks.number, size, sums);
}

}  // namespace
