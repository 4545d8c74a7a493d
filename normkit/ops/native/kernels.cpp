// Norms of float32 and bfloat16 rows on a CPU: each pass reads and writes every activation once.
//
// Everything is a walk over rows, handed to threads in chunks. Chunks follow from the shape alone, each adds up its own
// rows, and their sums are added in order: the same input gives the same bits on any number of threads. A row is
// fetched as floats, into a buffer that stays in the first cache where it must be converted or divided by its root mean
// square (layer-scale). Arithmetic is float32, sums over chunks are double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

using std::int64_t;
using Floats = std::vector<float>;

struct bf16 {
    std::uint16_t bits;
};

inline float wide(float value) { return value; }

inline float wide(bf16 value) {
    const std::uint32_t bits = std::uint32_t(value.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

inline void put(float* to, float value) { *to = value; }

inline void put(bf16* to, float value) {  // to nearest, ties to even; NaN stays NaN
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = std::uint16_t(value == value ? rounded : 0x7fc0);
}

// `body(c)` for every channel, many at once: what one of them writes none of the others reads.
template <class Body>
inline void each(int64_t channels, Body body) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) body(c);
}

inline float dot(const float* a, const float* b, int64_t size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < size; ++c) sum += a[c] * b[c];
    return sum;
}

// -- walks ---------------------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK = 32;       // rows: they stay in the second cache between two readings; the first level of sums
constexpr int64_t CHUNKS = 128;     // at most, so as many threads at most
constexpr int64_t SMALL = 1 << 15;  // elements that are not worth a second thread
constexpr int64_t LARGE = 12 << 20; // bytes of results that no cache would hold for whoever reads them next

struct Cut {
    int64_t n, rows, chunks;

    explicit Cut(int64_t n) : n(n) {
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        rows = BLOCK * std::max<int64_t>(1, (blocks + CHUNKS - 1) / CHUNKS);
        chunks = (n + rows - 1) / rows;
    }

    // `walk(chunk, first row, row after the last)` for every chunk.
    template <class Walk>
    void over(int64_t channels, int threads, Walk walk) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n * channels > SMALL)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) walk(chunk, chunk * rows, std::min(n, (chunk + 1) * rows));
    }
};

// Sums of chunks, `[chunks, size]`, into `out[size]`.
void add_up(const Floats& parts, int64_t chunks, int64_t size, float* out) {
    std::vector<double> sum(size);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float* part = parts.data() + chunk * size;
        each(size, [&, to = sum.data()](int64_t c) { to[c] += part[c]; });
    }
    for (int64_t c = 0; c < size; ++c) out[c] = float(sum[c]);
}

// Rows of results. Where they are many they go to memory past the caches, which saves reading what is overwritten.
template <class T>
class Results {
    T* all;
    int64_t channels;
    bool past;
    std::vector<T> line;

   public:
    Results(T* all, int64_t n, int64_t channels) : all(all), channels(channels), past(false) {
#ifdef __SSE2__
        const int64_t row = channels * sizeof(T);
        past = n * row > LARGE && row % 16 == 0 && reinterpret_cast<std::uintptr_t>(all) % 16 == 0;
#endif
        if (past) line.resize(channels);
    }

    T* row(int64_t i) { return past ? line.data() : all + i * channels; }

    void done(int64_t i) {
#ifdef __SSE2__
        if (!past) return;
        const auto* from = reinterpret_cast<const __m128i*>(line.data());
        auto* to = reinterpret_cast<__m128i*>(all + i * channels);
        for (int64_t k = 0; k < int64_t(channels * sizeof(T) / 16); ++k) _mm_stream_si128(to + k, _mm_loadu_si128(from + k));
#endif
    }

    ~Results() {
#ifdef __SSE2__
        if (past) _mm_sfence();
#endif
    }
};

// Rows as floats, each of `groups` runs of channels divided by its root mean square where there are groups.
template <class T>
class Rows {
    const T* all;
    int64_t channels;
    float eps;
    Floats room;

   public:
    int64_t groups, width;
    Floats inv;  // of the groups of the row that was read last

    Rows(const T* all, int64_t channels, int64_t groups = 0, float eps = 0)
        : all(all), channels(channels), eps(eps), room(channels), groups(groups), width(groups ? channels / groups : 0),
          inv(groups) {}

    const float* operator[](int64_t i) {
        const float* x = plain(all + i * channels);
        float* to = room.data();
        for (int64_t g = 0; g < groups; ++g) {
            const float* from = x + g * width;
            const float r = inv[g] = 1 / std::sqrt(dot(from, from, width) / width + eps);
            each(width, [=, to = to + g * width](int64_t c) { to[c] = from[c] * r; });
        }
        return groups ? to : x;
    }

   private:
    const float* plain(const float* row) { return row; }

    const float* plain(const bf16* row) {
        each(channels, [=, to = room.data()](int64_t c) { to[c] = wide(row[c]); });
        return room.data();
    }
};

// -- columns -------------------------------------------------------------------------------------------------------------

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
    const auto moments = [=](float* place, double count) { return Moments{center ? place + channels : nullptr, place, count}; };
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
                const float* u = rows[i];
                if (y) {
                    T* out = results.row(i);
                    if (mean)
                        each(channels, [=](int64_t c) { put(out + c, (u[c] - mean[c]) * scale[c] + shift[c]); });
                    else
                        each(channels, [=](int64_t c) { put(out + c, u[c] * scale[c] + shift[c]); });
                    results.done(i);
                }
                if (!stat || (mask && !mask[i])) continue;
                block.count += 1;
                if (center)
                    each(channels, [=, sum = block.mean](int64_t c) { sum[c] += u[c]; });
                else
                    each(channels, [=, sum = block.square](int64_t c) { sum[c] += u[c] * u[c]; });
            }
            if (!block.count) continue;
            if (center) {
                each(channels, [=, share = float(1 / block.count), mean = block.mean](int64_t c) { mean[c] *= share; });
                for (int64_t i = first; i < last; ++i) {
                    if (mask && !mask[i]) continue;
                    each(channels, [=, u = rows[i], mean = block.mean, square = block.square](int64_t c) {
                        const float apart = u[c] - mean[c];
                        square[c] += apart * apart;
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

// `dx = slant dy + slope (u - mean) + level`, of padding `slant dy` alone, then back through layer-scale; the sums of dy
// and of dy (u - mean), over all rows and, where `real`, over real ones too.
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
                const float *u = rows[i], *g = grads[i];
                if (sums) {  // of padding, then of real rows
                    float* sum = block.data() + (real && kept ? 2 * channels : 0);
                    if (mean)
                        each(channels, [=, with = sum + channels](int64_t c) {
                            sum[c] += g[c];
                            with[c] += g[c] * (u[c] - mean[c]);
                        });
                    else
                        each(channels, [=, with = sum + channels](int64_t c) {
                            sum[c] += g[c];
                            with[c] += g[c] * u[c];
                        });
                }
                if (!dx) continue;
                T* out = results.row(i);
                if (groups) {
                    float* d = beside.data();
                    if (kept)
                        each(channels, [=](int64_t c) { d[c] = g[c] * slant[c] + u[c] * slope[c]; });
                    else
                        each(channels, [=](int64_t c) { d[c] = g[c] * slant[c]; });
                    for (int64_t k = 0; k < groups; ++k) {
                        const int64_t at = k * rows.width;
                        const float r = rows.inv[k], along = dot(d + at, u + at, rows.width) / rows.width;
                        each(rows.width, [=, d = d + at, u = u + at, out = out + at](int64_t c) {
                            put(out + c, r * (d[c] - u[c] * along));
                        });
                    }
                } else if (!kept) {
                    each(channels, [=](int64_t c) { put(out + c, g[c] * slant[c]); });
                } else if (mean) {
                    each(channels, [=](int64_t c) {
                        put(out + c, g[c] * slant[c] + (u[c] - mean[c]) * slope[c] + level[c]);
                    });
                } else {
                    each(channels, [=](int64_t c) { put(out + c, g[c] * slant[c] + u[c] * slope[c]); });
                }
                results.done(i);
            }
            each(size, [from = block.data(), all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (!sums) return;
    add_up(parts, cut.chunks, size, sums);
    for (int64_t c = 0; real && c < 2 * channels; ++c) sums[c] += sums[2 * channels + c];
}

// -- rows ----------------------------------------------------------------------------------------------------------------

// What a row is multiplied by: 1 / sqrt(mean(x^2) + eps), or 1 / max(|x|, eps), which does not depend on x if `clamped`.
struct Factor {
    float value;
    bool clamped;

    Factor(const float* x, int64_t channels, float eps, int length) {
        const float square = dot(x, x, channels), norm = std::sqrt(square);
        clamped = length && norm < eps;
        value = 1 / (length ? std::max(norm, eps) : std::sqrt(square / channels + eps));
        if (norm != norm) value = norm;  // std::max would lose it
    }
};

template <class T>
void row_forward(const T* x, T* y, const float* weight, const float* bias, int64_t n, int64_t channels, float eps,
                 int length, int threads) {
    Cut(n).over(channels, threads, [&](int64_t, int64_t from, int64_t to) {
        Rows<T> rows(x, channels);
        Results<T> results(y, n, channels);
        for (int64_t i = from; i < to; ++i) {
            const float* u = rows[i];
            const float r = Factor(u, channels, eps, length).value;
            T* out = results.row(i);
            if (weight && bias)
                each(channels, [=](int64_t c) { put(out + c, u[c] * r * weight[c] + bias[c]); });
            else if (weight)
                each(channels, [=](int64_t c) { put(out + c, u[c] * r * weight[c]); });
            else
                each(channels, [=](int64_t c) { put(out + c, u[c] * r); });
            results.done(i);
        }
    });
}

// With z = r x and g = weight dy: `dx = r (g - z mean(g z))`, for a length `r (g - z sum(g z))`; the sums of dy and dy z.
template <class T>
void row_backward(const T* dy, const T* x, T* dx, const float* weight, float* sums, int64_t n, int64_t channels,
                  float eps, int length, int threads) {
    const Cut cut(n);
    const int64_t size = sums ? 2 * channels : 0;
    Floats parts(cut.chunks * size);
    cut.over(channels, threads, [&](int64_t chunk, int64_t from, int64_t to) {
        Rows<T> rows(x, channels), grads(dy, channels);
        Results<T> results(dx, n, channels);
        Floats beside(channels), block(size);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            std::fill(block.begin(), block.end(), 0.0f);
            for (int64_t i = first; i < last; ++i) {
                const float *u = rows[i], *g = grads[i];
                const Factor factor(u, channels, eps, length);
                const float r = factor.value;
                if (sums)
                    each(channels, [=, sum = block.data(), with = block.data() + channels](int64_t c) {
                        sum[c] += g[c];
                        with[c] += g[c] * (u[c] * r);
                    });
                if (weight) {
                    each(channels, [=, to = beside.data()](int64_t c) { to[c] = g[c] * weight[c]; });
                    g = beside.data();
                }
                const float along = factor.clamped ? 0 : dot(g, u, channels) * r * r / (length ? 1 : channels);
                each(channels, [=, out = results.row(i)](int64_t c) { put(out + c, r * (g[c] - u[c] * along)); });
                results.done(i);
            }
            each(size, [from = block.data(), all = parts.data() + chunk * size](int64_t c) { all[c] += from[c]; });
        }
    });
    if (sums) add_up(parts, cut.chunks, size, sums);
}

}  // namespace

#define EXPORT(T, NAME)                                                                                                 \
    extern "C" void column_forward_##NAME(const T* x, const std::uint8_t* mask, T* y, const float* mean,                \
                                          const float* scale, const float* shift, float* stat, float* count, int64_t n, \
                                          int64_t channels, int64_t groups, float eps, int center, int threads) {       \
        column_forward(x, mask, y, mean, scale, shift, stat, count, n, channels, groups, eps, center, threads);         \
    }                                                                                                                   \
    extern "C" void column_backward_##NAME(const T* dy, const T* x, const std::uint8_t* mask, T* dx, const float* mean, \
                                           const float* slant, const float* slope, const float* level, float* sums,     \
                                           int64_t n, int64_t channels, int64_t groups, float eps, int real,            \
                                           int threads) {                                                               \
        column_backward(dy, x, mask, dx, mean, slant, slope, level, sums, n, channels, groups, eps, real, threads);     \
    }                                                                                                                   \
    extern "C" void row_forward_##NAME(const T* x, T* y, const float* weight, const float* bias, int64_t n,             \
                                       int64_t channels, float eps, int length, int threads) {                          \
        row_forward(x, y, weight, bias, n, channels, eps, length, threads);                                             \
    }                                                                                                                   \
    extern "C" void row_backward_##NAME(const T* dy, const T* x, T* dx, const float* weight, float* sums, int64_t n,    \
                                        int64_t channels, float eps, int length, int threads) {                         \
        row_backward(dy, x, dx, weight, sums, n, channels, eps, length, threads);                                       \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
