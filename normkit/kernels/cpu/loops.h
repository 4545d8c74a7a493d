// Loops over rows of float32 or bfloat16 numbers, distributed to threads in chunks.
//
// Chunks follow from the shape alone, each adds up its own rows, and their sums are added in order: the same input
// gives the same bits on any number of threads. A row of bfloat16 is converted to floats in a buffer that stays in the
// first-level cache. Arithmetic is float32, plain sums over chunks are double.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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

// `body(c)` for every channel from `first` to before `last`, vectorized: no call reads what another writes.
template <class Body>
inline void each(int64_t first, int64_t last, Body body) {
#pragma omp simd
    for (int64_t c = first; c < last; ++c) body(c);
}

template <class Body>
inline void each(int64_t channels, Body body) {
    each(0, channels, body);
}

// The sum of `body(c)` over these channels.
template <class Body>
inline float total(int64_t first, int64_t last, Body body) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = first; c < last; ++c) sum += body(c);
    return sum;
}

// The sums of three functions on one reading.
template <class First, class Second, class Third>
inline std::array<float, 3> totals(int64_t first, int64_t last, First a, Second b, Third d) {
    float of_a = 0, of_b = 0, of_d = 0;
#pragma omp simd reduction(+ : of_a, of_b, of_d)
    for (int64_t c = first; c < last; ++c) of_a += a(c), of_b += b(c), of_d += d(c);
    return {of_a, of_b, of_d};
}

inline auto square_of(const float* x) {
    return [=](int64_t c) { return x[c] * x[c]; };
}

// `body(flags...)` with the flags as constants: a loop in it is compiled for each combination, without tests.
template <class Body>
inline void specialize(Body body) {
    body();
}

template <class Body, class... Flags>
inline void specialize(Body body, bool flag, Flags... others) {
    const auto with = [&](auto constant) {
        specialize([&](auto... constants) { body(constant, constants...); }, others...);
    };
    flag ? with(std::true_type{}) : with(std::false_type{});
}

constexpr int64_t BLOCK = 32;       // rows, a unit of sums
constexpr int64_t CHUNKS = 128;     // at most, so as many threads at most
constexpr int64_t SMALL = 1 << 15;  // elements: fewer are not worth a second thread
constexpr int64_t LARGE = 12 << 20; // bytes of results: more would not stay in a cache until they are read

struct Chunks {
    int64_t n, rows, number;

    explicit Chunks(int64_t n) : n(n) {
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        rows = BLOCK * std::max<int64_t>(1, (blocks + CHUNKS - 1) / CHUNKS);
        number = (n + rows - 1) / rows;
    }

    // `body(chunk, first row, row after the last)` for every chunk.
    template <class Body>
    void over(int64_t channels, int threads, Body body) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n * channels > SMALL)
        for (int64_t chunk = 0; chunk < number; ++chunk) body(chunk, chunk * rows, std::min(n, (chunk + 1) * rows));
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

// Rows of results. Large results bypass the caches, which saves reading the memory that is overwritten.
template <class T>
class OutputRows {
    T* all;
    int64_t channels;
    bool streams;
    std::vector<T> line;

   public:
    OutputRows(T* all, int64_t n, int64_t channels) : all(all), channels(channels), streams(false) {
#ifdef __SSE2__
        const int64_t row = channels * sizeof(T);
        streams = n * row > LARGE && row % 16 == 0 && reinterpret_cast<std::uintptr_t>(all) % 16 == 0;
#endif
        if (streams) line.resize(channels);
    }

    T* row(int64_t i) { return streams ? line.data() : all + i * channels; }

    void done(int64_t i) {
#ifdef __SSE2__
        if (!streams) return;
        const auto* from = reinterpret_cast<const __m128i*>(line.data());
        auto* to = reinterpret_cast<__m128i*>(all + i * channels);
        for (int64_t k = 0; k < int64_t(channels * sizeof(T) / 16); ++k)
            _mm_stream_si128(to + k, _mm_loadu_si128(from + k));
#endif
    }

    ~OutputRows() {
#ifdef __SSE2__
        if (streams) _mm_sfence();
#endif
    }
};

// Rows as floats, and the factor of each run of their channels: 1 / sqrt(mean(x^2) + eps) for each of `groups`
// (layer-scale), 1 for the whole row without groups.
template <class T>
class InputRows {
    const T* all;
    int64_t channels, groups;
    float eps;
    Floats buffer;

   public:
    int64_t runs, width;
    Floats factor;  // of each run of the last row that was read

    InputRows(const T* all, int64_t channels, int64_t groups = 0, float eps = 0)
        : all(all), channels(channels), groups(groups), eps(eps), buffer(channels), runs(std::max<int64_t>(groups, 1)),
          width(channels / runs), factor(runs, 1.0f) {}

    const float* operator[](int64_t i) {
        const float* x = wide_row(all + i * channels);
        for (int64_t k = 0; k < groups; ++k)
            factor[k] = 1 / std::sqrt(total(k * width, (k + 1) * width, square_of(x)) / width + eps);
        return x;
    }

   private:
    const float* wide_row(const float* row) { return row; }

    const float* wide_row(const bf16* row) {
        each(channels, [=, to = buffer.data()](int64_t c) { to[c] = wide(row[c]); });
        return buffer.data();
    }
};

}  // namespace
