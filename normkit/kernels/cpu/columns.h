// Columns of [n, channels]: their moments, standardize, and its gradient.

#pragma once

#include "arguments.h"
#include "loops.h"

namespace {

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
    const std::uint8_t* mask = given.mask;
    const float *mean = given.mean, *scale = given.scale, *shift = given.shift;
    float* stat = given.stat;
    const int64_t n = given.n, channels = given.channels, groups = given.groups;
    const float eps = given.eps;
    const int center = given.center;
    const Chunks chunks(n);
    const int64_t size = stat ? (1 + center) * channels : 0;
    Floats parts(chunks.number * size);
    std::vector<double> counts(chunks.number);
    const auto moments = [=](float* place, double rows) {
        return Moments{center ? place + channels : nullptr, place, rows};
    };
    chunks.over(channels, threads, [&](int64_t chunk, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels, groups, eps);
        OutputRows<T> results(y, n, channels);
        Floats sums(size);
        Moments all = moments(parts.data() + chunk * size, 0);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(sums.begin(), sums.end(), 0.0f);
            Moments block = moments(sums.data(), 0);
            for (int64_t i = first; i < last; ++i) {
                const bool counted = stat && (!mask || mask[i]);
                const float* row = rows[i];
                T* out = y ? results.row(i) : nullptr;
                block.count += counted;
                for (int64_t k = 0, at = 0; k < rows.runs; ++k, at += rows.width) {
                    const float r = rows.factor[k];
                    if (y && mean)
                        each(rows.width, [=, out = out + at](int64_t c) {
                            put(out + c, (row[at + c] * r - mean[at + c]) * scale[at + c] + shift[at + c]);
                        });
                    else if (y)
                        each(rows.width, [=, out = out + at](int64_t c) {
                            put(out + c, row[at + c] * r * scale[at + c] + shift[at + c]);
                        });
                    if (counted && center)
                        each(rows.width, [=, sum = block.mean + at](int64_t c) { sum[c] += row[at + c] * r; });
                    else if (counted)
                        each(rows.width, [=, sum = block.square + at](int64_t c) {
                            const float u = row[at + c] * r;
                            sum[c] += u * u;
                        });
                }
                if (y) results.done(i);
            }
            if (!block.count) continue;
            if (center) {
                each(channels, [=, share = float(1 / block.count), mean = block.mean](int64_t c) { mean[c] *= share; });
                for (int64_t i = first; i < last; ++i) {
                    if (mask && !mask[i]) continue;
                    const float* row = rows[i];
                    for (int64_t k = 0, at = 0; k < rows.runs; ++k, at += rows.width)
                        each(rows.width, [=, r = rows.factor[k], mean = block.mean, square = block.square](int64_t c) {
                            const float apart = row[at + c] * r - mean[at + c];
                            square[at + c] += apart * apart;
                        });
                }
            }
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

// With u = x after layer-scale, the gradient of u is `dy_coefficient dy + x_coefficient (u - mean) + constant`, in the
// padding `dy_coefficient dy` alone; dx is that through layer-scale. The sums of dy and of dy (u - mean) run over all
// rows and, if `real`, over real ones too.
template <class T>
void column_backward(const ColumnBackward& given, int threads) {
    const T *dy = static_cast<const T*>(given.dy), *x = static_cast<const T*>(given.x);
    T* dx = static_cast<T*>(given.dx);
    const std::uint8_t* mask = given.mask;
    const float *mean = given.mean, *dy_coefficient = given.dy_coefficient;
    const float *x_coefficient = given.x_coefficient, *constant = given.constant;
    float* sums = given.sums;
    const int64_t n = given.n, channels = given.channels, groups = given.groups;
    const float eps = given.eps;
    const int real = given.real;
    const Chunks chunks(n);
    const int64_t size = sums ? (real ? 4 : 2) * channels : 0;
    Floats parts(chunks.number * size);
    chunks.over(channels, threads, [&](int64_t chunk, int64_t from, int64_t to) {
        InputRows<T> rows(x, channels, groups, eps), grads(dy, channels);
        OutputRows<T> results(dx, n, channels);
        Floats scratch(channels), block(size);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(block.begin(), block.end(), 0.0f);
            for (int64_t i = first; i < last; ++i) {
                const bool kept = !mask || mask[i];
                const float *row = rows[i], *g = grads[i];
                T* out = dx ? results.row(i) : nullptr;
                // the first two sums are of padding, the next of real rows
                float *sum = block.data() + (real && kept ? 2 * channels : 0), *with = sum + channels;
                for (int64_t k = 0, at = 0; k < rows.runs; ++k, at += rows.width) {
                    const float r = rows.factor[k];
                    if (sums && mean)
                        each(rows.width, [=](int64_t c) {
                            sum[at + c] += g[at + c];
                            with[at + c] += g[at + c] * (row[at + c] * r - mean[at + c]);
                        });
                    else if (sums)
                        each(rows.width, [=](int64_t c) {
                            sum[at + c] += g[at + c];
                            with[at + c] += g[at + c] * (row[at + c] * r);
                        });
                    if (!dx) continue;
                    const auto direct = [=](int64_t c) { return g[at + c] * dy_coefficient[at + c]; };
                    const auto gradient = [=](int64_t c) {
                        return direct(c) + row[at + c] * r * x_coefficient[at + c];
                    };
                    if (groups) {
                        float* d = scratch.data();
                        const float along =
                            (kept ? total(rows.width, [=](int64_t c) { return (d[c] = gradient(c)) * row[at + c]; })
                                  : total(rows.width, [=](int64_t c) { return (d[c] = direct(c)) * row[at + c]; })) *
                            r * r / rows.width;
                        each(rows.width, [=, out = out + at](int64_t c) {
                            put(out + c, r * (d[c] - row[at + c] * along));
                        });
                    } else if (!kept) {
                        each(rows.width, [=](int64_t c) { put(out + c, direct(c)); });
                    } else if (mean) {
                        each(rows.width, [=](int64_t c) {
                            put(out + c, direct(c) + (row[c] - mean[c]) * x_coefficient[c] + constant[c]);
                        });
                    } else {
                        each(rows.width, [=](int64_t c) { put(out + c, gradient(c)); });
                    }
                }
                if (dx) results.done(i);
            }
            each(size, [from = block.data(), all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (!sums) return;
    add_up(parts, chunks.number, size, sums);
    for (int64_t c = 0; real && c < 2 * channels; ++c) sums[c] += sums[2 * channels + c];
}

}  // namespace
