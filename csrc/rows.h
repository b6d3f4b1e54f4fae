// Operations on single rows: norms, rotary embedding, activation functions, sums, lookups.
#pragma once

#include <cstdint>

namespace kvasir {

enum Function : int32_t {
    FUNCTION_NONE = 0,
    FUNCTION_SILU = 1,
    FUNCTION_GELU = 2,
    FUNCTION_GELU_TANH = 3,
    FUNCTION_RELU = 4,
    FUNCTION_EXP = 5,
    FUNCTION_SIGMOID = 6,
    FUNCTION_CLAMPED_SWIGLU = 7,  // only of two rows: see ClampedSwiglu
    FUNCTION_SOFTPLUS = 8,        // only of one row
    FUNCTION_RELU2 = 9,           // the square of relu
};

}  // namespace kvasir
