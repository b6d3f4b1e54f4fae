// The parts that linear.cpp combines: float formats (linear_float.cpp) and integer formats (prepare_int, linear_int,
// lookup_int), with the signatures of kernels.h.
#pragma once

#include "matrix.h"

namespace kvasir {
namespace KVASIR_ISA {

void prepare_float(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows);
void linear_float(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);
void lookup_float(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count);

void prepare_int(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows);
void linear_int(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);
void lookup_int(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count);

}  // namespace KVASIR_ISA
}  // namespace kvasir
