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
#include <new>
#include <type_traits>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

using std::int64_t;

// Memory that begins at a line of the caches: otherwise each load of 64 bytes reads two lines.
template <class T>
struct Aligned {
    using value_type = T;
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
};

using Floats = std::vector<float, Aligned<float>>;

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

// The sum of `body(c)` over these channels, in several registers: one would wait for its own additions.
template <class Body>
inline float total(int64_t first, int64_t last, Body body) {
    float sum = 0;
#pragma omp simd reduction(+ : sum) simdlen(32)
    for (int64_t c = first; c < last; ++c) sum += body(c);
    return sum;
}

// The sums of three functions on one reading.
template <class First, class Second, class Third>
inline std::array<float, 3> totals(int64_t first, int64_t last, First a, Second b, Third d) {
    float of_a = 0, of_b = 0, of_d = 0;
#pragma omp simd reduction(+ : of_a, of_b, of_d) simdlen(32)
    for (int64_t c = first; c < last; ++c) of_a += a(c), of_b += b(c), of_d += d(c);
    return {of_a, of_b, of_d};
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
constexpr int64_t TILE = 64;        // elements that bypass the caches together
constexpr int64_t AHEAD = 8 << 10;  // bytes to prefetch before they are read
constexpr int64_t LARGE = 2 << 20;  // bytes of results: more would leave the second-level cache before they are read

template <class T>
constexpr int64_t LINE = 64 / sizeof(T);  // elements in a line of the caches

struct Chunks {
    int64_t n, rows, number;
    bool large;

    Chunks(int64_t n, int64_t bytes_of_a_row) : n(n), large(n * bytes_of_a_row > LARGE) {
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        rows = BLOCK * std::max<int64_t>(1, (blocks + CHUNKS - 1) / CHUNKS);
        number = (n + rows - 1) / rows;
    }

    // `body(chunk, first row, row after the last)` for every chunk. `backwards`, a second reading of large inputs starts
    // with what the first has left in the cache.
    template <class Body>
    void over(int64_t channels, int threads, bool backwards, Body body) const {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n * channels > SMALL)
        for (int64_t k = 0; k < number; ++k) {
            const int64_t chunk = backwards ? number - 1 - k : k;
            body(chunk, chunk * rows, std::min(n, (chunk + 1) * rows));
        }
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

// Copy a tile past the caches: the wider the stores, the fewer the lines that leave the processor in parts.
template <class T>
inline void stream(const T* tile, T* to) {
#if defined(__AVX512F__)
    for (int64_t k = 0; k < TILE; k += LINE<T>) _mm512_stream_si512((__m512i*)(to + k), _mm512_load_si512(tile + k));
#elif defined(__AVX__)
    for (int64_t k = 0; k < TILE; k += LINE<T> / 2)
        _mm256_stream_si256((__m256i*)(to + k), _mm256_load_si256((const __m256i*)(tile + k)));
#elif defined(__SSE2__)
    for (int64_t k = 0; k < TILE; k += LINE<T> / 4)
        _mm_stream_si128((__m128i*)(to + k), _mm_load_si128((const __m128i*)(tile + k)));
#endif
}

// Rows of results. Large results bypass the caches, which saves reading the memory that is overwritten. They do so in
// tiles: reading and writing overlap, a whole row at once would let one wait for the other.
template <class T>
class OutputRows {
    T* all;
    bool streams;
    alignas(64) T tile[TILE];

   public:
    OutputRows(T* all, int64_t channels, bool large) : all(all), streams(false) {
#ifdef __SSE2__
        streams = large && channels % LINE<T> == 0 && reinterpret_cast<std::uintptr_t>(all) % 64 == 0;
#endif
    }

    // `body(c)` into each channel of row i; as `each`, no call reads what another writes. "flatten" makes the body part
    // of both loops: the compiler stops inlining in functions as large as the kernels.
    template <class Body>
    [[gnu::flatten]] void write(int64_t i, int64_t channels, Body body) {
        T* row = all + i * channels;
        int64_t first = 0;
        for (; streams && first + TILE <= channels; first += TILE) {
            each(TILE, [=, to = tile](int64_t c) { put(to + c, body(first + c)); });
            stream(tile, row + first);
        }
        each(first, channels, [=](int64_t c) { put(row + c, body(c)); });
    }

    ~OutputRows() {
#ifdef __SSE2__
        if (streams) _mm_sfence();
#endif
    }
};

// Rows as floats; with `groups`, after layer-scale: each group of channels times 1 / sqrt(mean(x^2) + eps).
template <class T>
class InputRows {
    const T* all;
    int64_t channels, groups;
    float eps;
    Floats buffer;

   public:
    Floats factor;  // of layer-scale, for each channel of the last row that was read

    InputRows(const T* all, int64_t channels, int64_t groups = 0, float eps = 0, bool keeps_factor = false)
        : all(all), channels(channels), groups(groups), eps(eps),
          buffer(groups || !std::is_same_v<T, float> ? channels : 0), factor(keeps_factor ? channels : 0) {}

    [[gnu::always_inline]] const float* operator[](int64_t i) {
        const T* row = all + i * channels;
        float* to = buffer.data();
        if (!groups) return wide_row(row);
        const int64_t width = channels / groups;
        for (int64_t at = 0; at < channels; at += width) {
            const float square = total(at, at + width, [=](int64_t c) { return wide(row[c]) * wide(row[c]); });
            const float r = 1 / std::sqrt(square / width + eps);
            each(at, at + width, [=](int64_t c) { to[c] = wide(row[c]) * r; });
            if (!factor.empty()) std::fill_n(factor.data() + at, width, r);
        }
        return to;
    }

   private:
    const float* wide_row(const float* row) { return row; }

    const float* wide_row(const bf16* row) {
        each(channels, [=, to = buffer.data()](int64_t c) { to[c] = wide(row[c]); });
        return buffer.data();
    }
};

}  // namespace
