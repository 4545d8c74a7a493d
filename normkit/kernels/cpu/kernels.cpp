// What Python calls: kernels for each type, as addresses of functions. Activations are [n, channels], side by side; no
// address stands for an argument that is not there.

#include "columns.h"
#include "rows.h"
#include "rules.h"

#define EXPORT(KERNEL)                                                     \
    extern "C" {                                                           \
    decltype(&KERNEL<float>) KERNEL##_float32 = &KERNEL<float>;            \
    decltype(&KERNEL<bf16>) KERNEL##_bfloat16 = &KERNEL<bf16>;             \
    }

EXPORT(column_forward)
EXPORT(column_backward)
EXPORT(row_forward)
EXPORT(row_backward)
EXPORT(infer)
EXPORT(train)
EXPORT(differentiate)
