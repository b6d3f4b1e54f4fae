// Products with integer formats whose levels or activations need more than products of bytes (linear_wide.cpp).
#pragma once

#include "matrix.h"

namespace kvasir {
namespace KVASIR_ISA {

// Whether linear_wide, and not linear_int, computes a product on this instruction set; the bits are the same.
bool is_wide(const Matrix& m);
void linear_wide(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                 float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);

}  // namespace KVASIR_ISA
}  // namespace kvasir
