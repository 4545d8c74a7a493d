// Arguments of a training step, for both of its passes. `cpu/library.cpp` fills them, the kernels of `cpu/rules.h` and
// `triton/launches.h` read them. Activations (`void*`) are [n, channels], contiguous, of one type; vectors are
// [channels]; no address where not given.

#pragma once

#include <cstdint>

enum class Forward : std::int64_t { BATCH, RUNNING, GEOMETRIC };
enum class Backward : std::int64_t { EXACT, RUNNING, WINDOWED };

struct Options {  // of the norm, and the fields of its KernelRule (rule.py)
    Forward forward;
    Backward backward;
    bool known_in_advance;
    std::int64_t warmup;
    bool unbiased, clamp;
    int center;
    std::int64_t groups;  // of layer-scale; 0 for none
    bool real;            // gradient statistics sum over real rows, not over all
    float eps, rate, rate_grad, floor;
};

struct State {       // buffers of the norm, updated
    float* running;  // [1 + center, channels]
    std::int64_t *step, *skipped, *skipped_grad;
    float *window, *window_grad;  // [slots, channels]
    std::int64_t slots, slots_grad;
    float* smooth_grad;
    std::int64_t* filtered;  // counts outliers; not given if they are not filtered
    const std::int64_t* end;  // of the warm-up, if not `warmup`; 0 until it is known
};

struct Decisions {         // of the forward pass: fields of StepStatistics
    float *batch, *value;  // [1 + center, channels]
    float* count;
    std::int64_t* step;
    float *saved_grad, *saved_gamma;
    bool* outlier;
};

struct TrainingStep {
    const void* x;
    const bool* mask;  // [n], true where a row is real
    const float* weight;
    std::int64_t n, channels;
    Options options;
    State state;
    Decisions decisions;
    // forward
    const float* bias;
    bool decided;  // by an earlier forward pass
    void* y;
    // backward
    const void* dy;
    void* dx;
    float *dweight, *dbias;
};
