// Columns of [n, channels]: their moments, scale and shift, and the gradient of standardizing them. Activations (`void*`)
// are contiguous, of one type; vectors are [channels]; a field that is left out is 0 or no address.

#pragma once

#include "loops.h"

namespace {

struct ColumnForward {  // column_forward: y = (u - mean) * scale + shift and the moments of u, x after layer-scale
    const void* x;
    const bool* mask;  // [n], true where a row is real
    void* y;
    const float* mean;
    const float* scale;
    const float* shift;
    float* stat;   // [1 + center, channels]
    float* count;  // of real rows
    int64_t n;
    int64_t channels;
    int64_t groups;  // of layer-scale; 0 for none
    float eps;
    int center;
};

struct ColumnBackward {  // column_backward: dx, and the sums of dy and of dy * (u - mean)
    const void* dy;
    const void* x;
    const bool* mask;
    void* dx;
    const float* mean;
    const float* dy_coefficient;
    const float* x_coefficient;
    const float* constant;
    float* sums;  // [2, channels]; [4, channels] if `real`: then those of real rows
    int64_t n;
    int64_t channels;
    int64_t groups;
    float eps;
    int real;
};

struct Moments {  // of some rows: their mean (where it is to be removed), the sum of squares about it, their number
    float *mean, *square;
    double count;

    // Join those of other rows (Chan, Golub & LeVeque 1979).
    void join(const Moments& other, int64_t channels) {
        if (!other.count) return;
        const float share = float(other.count / (count + other.count)), both = float(count) * share;
        each(channels, [&, to = square, from = other.square](int64_t c) { to[c] += from[c]; });
        if (mean)
            each(channels, [=, mean = mean, square = square, next = other.mean](int64_t c) {
                const float apart = next[c] - mean[c];
                mean[c] += apart * share;
                square[c] += apart * apart * both;
            });
        count += other.count;
    }
};

template <class T>
void column_forward(const ColumnForward& given, int threads) {
    const T* x = static_cast<const T*>(given.x);
    T* y = static_cast<T*>(given.y);
    const bool* mask = given.mask;
    const float *mean = given.mean, *scale = given.scale, *shift = given.shift;
    float* stat = given.stat;
    const int64_t n = given.n, channels = given.channels, groups = given.groups;
    const float eps = given.eps;
    const int center = given.center;
    const Chunks chunks(n, channels * sizeof(T));
    const int64_t ahead = 1 + AHEAD / (channels * sizeof(T));  // rows
    const int64_t size = stat ? (1 + center) * channels : 0;
    Floats parts(chunks.number * size);
    std::vector<double> counts(chunks.number);
    const auto moments = [=](float* place, double rows) {
        return Moments{center ? place + channels : nullptr, place, rows};
    };
    chunks.over(channels, threads, !stat && chunks.large, [&](int64_t chunk, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels, groups, eps);
        OutputRows<T> results(y, channels, chunks.large);
        Floats sums(size), origin(center ? channels : 0);
        Moments all = moments(parts.data() + chunk * size, 0);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(sums.begin(), sums.end(), 0.0f);
            Moments block = moments(sums.data(), 0);
            for (int64_t i = first; i < last; ++i) {
                const bool counted = stat && (!mask || mask[i]);
                // prefetching makes a pass faster that only computes moments, and no other
                for (int64_t c = 0; !y && i + ahead < n && c < channels; c += LINE<T>)
                    __builtin_prefetch(x + (i + ahead) * channels + c);
                const float* row = rows[i];
                block.count += counted;
                if (center && counted && block.count == 1)  // squares about a row of the block lose few digits
                    std::copy_n(row, channels, origin.data());
                const auto pass = [&](auto writes, auto shifts, auto counts, auto centers) {
                    constexpr bool WRITES = writes, SHIFTS = shifts, COUNTS = counts, CENTERS = centers;
                    const auto read = [=, sum = block.mean, square = block.square, origin = origin.data()](int64_t c) {
                        const float u = row[c], apart = CENTERS ? u - origin[c] : u;
                        if constexpr (COUNTS && CENTERS) sum[c] += apart;
                        if constexpr (COUNTS) square[c] += apart * apart;
                        return WRITES ? (SHIFTS ? u - mean[c] : u) * scale[c] + shift[c] : 0;
                    };
                    if constexpr (WRITES) results.write(i, channels, read);
                    else each(channels, read);
                };
                specialize(pass, y, mean, counted, center);
            }
            if (!block.count) continue;
            if (center)
                each(channels, [=, share = float(1 / block.count), mean = block.mean, square = block.square,
                                origin = origin.data()](int64_t c) {
                    const float apart = mean[c] * share;
                    square[c] -= mean[c] * apart;
                    mean[c] = origin[c] + apart;
                });
            all.join(block, channels);
        }
        counts[chunk] = all.count;
    });
    if (!stat) return;
    double real = 0;
    Floats sums(size);
    if (center) {
        Moments all = moments(sums.data(), 0);
        for (int64_t k = 0; k < chunks.number; ++k) all.join(moments(parts.data() + k * size, counts[k]), channels);
        real = all.count;
        std::copy_n(all.mean, channels, stat);
    } else {
        for (double found : counts) real += found;
        add_up(parts, chunks.number, size, sums.data());
    }
    const double most = std::max(real, 1.0);
    for (int64_t c = 0; c < channels; ++c) stat[center * channels + c] = float(sums[c] / most);
    *given.count = float(real);
}

// Factor of `y = (u - mean) * factor + bias`, for u of this `variance`.
inline Floats factor_of(const float* variance, const float* weight, int64_t channels, float eps) {
    Floats factor(channels);
    for (int64_t c = 0; c < channels; ++c) factor[c] = (weight ? weight[c] : 1) / std::sqrt(variance[c] + eps);
    return factor;
}

// y for statistics [1 + center, channels]: mean and variance, or the mean square alone.
template <class T>
void write_standardized(const void* x, void* y, const float* stat, bool center, const float* weight, const float* bias,
                        int64_t n, int64_t channels, int64_t groups, float eps, int threads) {
    const Floats none(bias ? 0 : channels), scale = factor_of(stat + center * channels, weight, channels, eps);
    column_forward<T>({.x = x, .y = y, .mean = center ? stat : nullptr, .scale = scale.data(),
                       .shift = bias ? bias : none.data(), .n = n, .channels = channels, .groups = groups, .eps = eps},
                      threads);
}

// With u = x after layer-scale, the gradient of u is `dy_coefficient dy + x_coefficient (u - mean) + constant`, in the
// padding `dy_coefficient dy` alone; dx is that through layer-scale. The sums of dy and of dy (u - mean) run over all
// rows and, if `real`, over real ones too.
template <class T>
void column_backward(const ColumnBackward& given, int threads) {
    const T *dy = static_cast<const T*>(given.dy), *x = static_cast<const T*>(given.x);
    T* dx = static_cast<T*>(given.dx);
    const bool* mask = given.mask;
    const float *mean = given.mean, *dy_coefficient = given.dy_coefficient;
    const float *x_coefficient = given.x_coefficient, *constant = given.constant;
    float* sums = given.sums;
    const int64_t n = given.n, channels = given.channels, groups = given.groups;
    const float eps = given.eps;
    const int real = given.real;
    const int64_t width = channels / std::max<int64_t>(groups, 1);  // of a group of layer-scale
    const Chunks chunks(n, channels * sizeof(T));
    const int64_t size = sums ? (real ? 4 : 2) * channels : 0;
    Floats parts(2 * chunks.number * size);  // then the block of each chunk: memory for one costs as much as its sums
    chunks.over(channels, threads, !sums && chunks.large, [&](int64_t chunk, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels, groups, eps, groups && dx), grads(dy, channels);
        OutputRows<T> results(dx, channels, chunks.large);
        Floats along(groups ? channels : 0);
        float* const block = parts.data() + (chunks.number + chunk) * size;
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill_n(block, size, 0.0f);
            for (int64_t i = first; i < last; ++i) {
                const bool kept = !mask || mask[i];
                const float *row = rows[i], *g = grads[i];
                // the first two sums are of padding, the next of real rows
                float *sum = block + (real && kept ? 2 * channels : 0), *with = sum + channels;
                const auto pass = [&](auto writes, auto adds, auto shifts, auto real_row, auto scales) {
                    constexpr bool WRITES = writes, ADDS = adds, SHIFTS = shifts, REAL = real_row, SCALES = scales;
                    const auto apart = [=](int64_t c) { return SHIFTS ? row[c] - mean[c] : row[c]; };
                    const auto gradient = [=](int64_t c) {  // of u
                        const float direct = g[c] * dy_coefficient[c];
                        if constexpr (!REAL) return direct;
                        return direct + apart(c) * x_coefficient[c] + (SHIFTS ? constant[c] : 0);
                    };
                    for (int64_t at = 0; SCALES && WRITES && at < channels; at += width) {
                        const float dot = total(at, at + width, [=](int64_t c) { return gradient(c) * row[c]; });
                        std::fill_n(along.data() + at, width, dot / width);
                    }
                    const auto read = [=, along = along.data(), factor = rows.factor.data()](int64_t c) {
                        if constexpr (ADDS) sum[c] += g[c], with[c] += g[c] * apart(c);
                        return !WRITES ? 0 : SCALES ? factor[c] * (gradient(c) - row[c] * along[c]) : gradient(c);
                    };
                    if constexpr (WRITES) results.write(i, channels, read);
                    else each(channels, read);
                };
                specialize(pass, dx, sums, mean, kept, groups);
            }
            each(size, [from = block, all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (!sums) return;
    add_up(parts, chunks.number, size, sums);
    for (int64_t c = 0; real && c < 2 * channels; ++c) sums[c] += sums[2 * channels + c];
}

}  // namespace
