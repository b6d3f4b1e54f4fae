// Products with integer formats whose levels are unpacked for many rows at once (linear_slabs.cpp).
#pragma once

#include "matrix.h"

namespace kvasir {
namespace KVASIR_ISA {

constexpr int64_t SLAB_BLOCKS = 8;    // of 64 columns: about 16 KiB of levels
constexpr int64_t SLAB_ROWS = 128;    // that a slab's levels serve
constexpr int64_t SLAB_AHEAD = 4096;  // prefetch distance in bytes where there is no slab

template <int64_t BYTES>
inline void prefetch_block(const uint8_t* block) {
    for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(block + i, 0, 2);
}

// Whether linear_slabs, and not linear_int, computes a product on this instruction set; the bits are the same.
bool in_slabs(const Matrix& m, int64_t rows);
void linear_slabs(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);

}  // namespace KVASIR_ISA
}  // namespace kvasir
