// Arguments of the kernels. Python reads these structs (arguments.py) and fills them by name; a field that it leaves
// out is 0 or no address. Activations (`void*`) are [n, channels], contiguous, of one type; vectors are [channels].

#pragma once

#include <cstdint>

struct ColumnForward {  // column_forward: y = (u - mean) * scale + shift and the moments of u, x after layer-scale
    const void* x;
    const bool* mask;  // [n], true where a row is real
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
    const bool* mask;
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

struct RowForward {  // row_forward: each row, less its mean if `center`, divided by its root mean square or length
    const void* x;
    void* y;
    const float* weight;
    const float* bias;
    std::int64_t n;
    std::int64_t channels;
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
    std::int64_t n;
    std::int64_t channels;
    float eps;
    int length;
    int center;
};

struct Standardize {  // standardize: y = weight * (output_scale * z + output_shift) + bias, z by given statistics
    const void* x;
    void* y;
    const float* stat;  // [1 + center, channels]
    const float* weight;
    const float* bias;
    const float* output_scale;
    const float* output_shift;
    std::int64_t n;
    std::int64_t channels;
    std::int64_t groups;
    float eps;
    int center;
};
