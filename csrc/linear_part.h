// One product of a linear instruction.
#pragma once

#include "matrix.h"

namespace kvasir {

// out = residual + (bias + (product with its adapters)); all but the product are optional.
struct LinearPart {
    const Matrix* matrix;
    const uint8_t* activated;
    float* out;
    int64_t out_stride;
    const float* bias;
    const float* residual;
    int64_t residual_stride;
};

}  // namespace kvasir
