// Entry points: every kernel for each type of activations, as an address of a function, and the size of its arguments.

#include "columns.h"
#include "rows.h"
#include "rules.h"

#define EXPORT(KERNEL, ARGUMENTS)                                                                       \
    extern "C" {                                                                                        \
    void (*KERNEL##_float32)(const ARGUMENTS&, int) = &KERNEL<float>;                                   \
    void (*KERNEL##_bfloat16)(const ARGUMENTS&, int) = &KERNEL<bf16>;                                   \
    std::int64_t KERNEL##_size = sizeof(ARGUMENTS);                                                     \
    }

EXPORT(column_forward, ColumnForward)
EXPORT(column_backward, ColumnBackward)
EXPORT(row_forward, RowForward)
EXPORT(row_backward, RowBackward)
EXPORT(standardize, Standardize)
EXPORT(train, TrainingStep)
EXPORT(differentiate, TrainingStep)
