// Columns of [n, channels]: their moments, standardize, and its gradient.

#pragma once

#include "walks.h"

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
void column_forward(const T* x, const std::uint8_t* mask, T* y, const float* mean, const float* scale,
                    const float* shift, float* stat, float* count, int64_t n, int64_t channels, int64_t groups,
                    float eps, int center, int threads) {
    const Cut cut(n);
    const int64_t size = stat ? (1 + center) * channels : 0;
    Floats parts(cut.chunks * size);
    std::vector<double> counts(cut.chunks);
    const auto moments = [=](float* place, double rows) {
        return Moments{center ? place + channels : nullptr, place, rows};
    };
    cut.over(channels, threads, [&](int64_t chunk, int64_t from, int64_t to) {
        Rows<T> rows(x, channels, groups, eps);
        Results<T> results(y, n, channels);
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
        for (int64_t k = 0; k < cut.chunks; ++k) all.join(moments(parts.data() + k * size, counts[k]), channels);
        real = all.count;
        std::copy_n(all.mean, channels, stat);
    } else {
        for (double found : counts) real += found;
        add_up(parts, cut.chunks, size, sums.data());
    }
    const double most = std::max(real, 1.0);
    for (int64_t c = 0; c < channels; ++c) stat[center * channels + c] = float(sums[c] / most);
    *count = float(real);
}

// With u = x after layer-scale, `slant dy + slope (u - mean) + level`, of padding `slant dy` alone, then back through
// layer-scale to dx; the sums of dy and of dy (u - mean), over all rows and, where `real`, over real ones too.
template <class T>
void column_backward(const T* dy, const T* x, const std::uint8_t* mask, T* dx, const float* mean, const float* slant,
                     const float* slope, const float* level, float* sums, int64_t n, int64_t channels, int64_t groups,
                     float eps, int real, int threads) {
    const Cut cut(n);
    const int64_t size = sums ? (real ? 4 : 2) * channels : 0;
    Floats parts(cut.chunks * size);
    cut.over(channels, threads, [&](int64_t chunk, int64_t from, int64_t to) {
        Rows<T> rows(x, channels, groups, eps), grads(dy, channels);
        Results<T> results(dx, n, channels);
        Floats beside(channels), block(size);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(block.begin(), block.end(), 0.0f);
            for (int64_t i = first; i < last; ++i) {
                const bool kept = !mask || mask[i];
                const float *row = rows[i], *g = grads[i];
                T* out = dx ? results.row(i) : nullptr;
                float *sum = block.data() + (real && kept ? 2 * channels : 0), *with = sum + channels;  // padding first
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
                    const auto slanted = [=](int64_t c) { return g[at + c] * slant[at + c]; };
                    const auto whole = [=](int64_t c) { return slanted(c) + row[at + c] * r * slope[at + c]; };
                    if (groups) {
                        float* d = beside.data();
                        const float along =
                            (kept ? total(rows.width, [=](int64_t c) { return (d[c] = whole(c)) * row[at + c]; })
                                  : total(rows.width, [=](int64_t c) { return (d[c] = slanted(c)) * row[at + c]; })) *
                            r * r / rows.width;
                        each(rows.width, [=, out = out + at](int64_t c) {
                            put(out + c, r * (d[c] - row[at + c] * along));
                        });
                    } else if (!kept) {
                        each(rows.width, [=](int64_t c) { put(out + c, slanted(c)); });
                    } else if (mean) {
                        each(rows.width, [=](int64_t c) {
                            put(out + c, slanted(c) + (row[c] - mean[c]) * slope[c] + level[c]);
                        });
                    } else {
                        each(rows.width, [=](int64_t c) { put(out + c, whole(c)); });
                    }
                }
                if (dx) results.done(i);
            }
            each(size, [from = block.data(), all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (!sums) return;
    add_up(parts, cut.chunks, size, sums);
    for (int64_t c = 0; real && c < 2 * channels; ++c) sums[c] += sums[2 * channels + c];
}

}  // namespace
