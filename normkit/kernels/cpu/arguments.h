// Arguments of the kernels. Python reads these structs (arguments.py) and fills them by name; a field that it leaves
// out is 0 or no address. Activations (`void*`) are [n, channels], contiguous, of one type; vectors are [channels].

#pragma once

#include <cstdint>

struct ColumnForward {  // column_forward: y = (u - mean) * scale + shift and the moments of u, x after layer-scale
    const void* x;
    const std::uint8_t* mask;  // [n], 1 where a row is real
    void* y;
    const float* mean;
    const float* scale;
    const float* shift;
    float* stat;   // [1 + center, channels]
    float* count;  // of real rows
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;  // of layer-scale; 0 for none
    float eps;
    int center;
};

struct ColumnBackward {  // column_backward: dx, and the sums of dy and of dy * (u - mean)
    const void* dy;
    const void* x;
    const std::uint8_t* mask;
    void* dx;
    const float* mean;
    const float* dy_coefficient;
    const float* x_coefficient;
    const float* constant;
    float* sums;  // [2, channels]; [4, channels] if `real`: then those of real rows
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;
    float eps;
    int real;
};

struct RowForward {  // row_forward: each row divided by its root mean square, or by its length
    const void* x;
    void* y;
    const float* weight;
    const float* bias;
    std::int64_t n;
    std::int64_t channels;
    float eps;
    int length;
};

struct RowBackward {  // row_backward
    const void* dy;
    const void* x;
    void* dx;
    const float* weight;
    float* sums;  // [2, channels]: of dy and of dy * z
    std::int64_t n;
    std::int64_t channels;
    float eps;
    int length;
};

struct Infer {  // infer: a norm by its running statistics
    const void* x;
    void* y;
    const float* running;  // [1 + center, channels]
    const float* weight;
    const float* bias;
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;
    float eps;
    int center;
};

struct Train {  // train: a training forward, its rule applied in between, or by the decisions of an earlier one
    const void* x;
    const std::uint8_t* mask;
    void* y;
    const float* weight;
    const float* bias;
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;
    float eps;
    int center;
    // the rule: fields of KernelRule
    std::int64_t rule;
    int known_in_advance;
    float rate;
    std::int64_t warmup;
    std::int64_t until_r;
    std::int64_t until_d;
    float bound_r;
    float bound_d;
    float floor;
    int unbiased;
    // state of the norm, updated
    float* running;
    std::int64_t* step;
    std::int64_t* skipped;
    float* window;  // [window_size, channels]
    std::int64_t window_size;
    const float* smooth_grad;
    // decisions of the step: fields of StepStatistics
    int decided;  // they are given
    float* batch;
    float* value;
    float* count;
    std::int64_t* next_step;
    float* output_scale;
    float* output_shift;
    float* saved_grad;
    float* saved_gamma;
};

struct Differentiate {  // differentiate: the backward pass of `train`
    const void* dy;
    const void* x;
    const std::uint8_t* mask;
    void* dx;
    const float* weight;
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;
    float eps;
    int center;
    int real;  // statistics sum over real rows, not over all
    // the rule
    std::int64_t rule;
    int known_in_advance;
    float rate;
    std::int64_t warmup;
    int exact_early;
    int clamp;
    // decisions of the forward pass
    const float* value;
    const float* count;
    const std::int64_t* step;
    const float* output_scale;
    const float* output_shift;
    const float* saved_grad;
    const float* saved_gamma;
    // state of the norm, updated
    std::int64_t* skipped;
    float* window;
    std::int64_t window_size;
    float* smooth_grad;
    // gradients of the parameters
    float* dweight;
    float* dbias;
};
