// The block of two groups of 32: each group's dot, its scale and its minimum, added to the sums. The order is in
// linear_int.cpp.
#pragma once

#include "int_unpack.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

template <int FORMAT>
KVASIR_INLINE f32x16 group_scale(const uint8_t* block, int chunk) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    const uint16_t* from = halves(block + l.scales) + LANES * chunk;
    return l.scale == SCALE_BF16 ? load_bf16(from) : load_f16(from);
}

// -zero times the sum of the group.
template <int FORMAT>
KVASIR_INLINE i32x16 group_start(const Group32& x) {
    constexpr int zero = int_layout_of(FORMAT).zero;
    if constexpr (zero == 0) return broadcast_i32(0);
    const i32x16 eight = broadcast_i32(x.start);
    return zero == 128 ? shift_left<4>(eight) : zero == 16 ? shift_left<1>(eight) : eight;
}

template <int FORMAT, int M, int P>
KVASIR_INLINE void add_groups(f32x16 (&acc)[M][P], const uint8_t* const (&block)[P], const uint8_t* x,
                              int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        i32x16 dots[M][P];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const i32x16 start = group_start<FORMAT>(*reinterpret_cast<const Group32*>(x + m * x_stride));
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) dots[m][p] = start;
        }
        const Chunk<P> planes = chunk_of<FORMAT>(block, chunk);
        add_half<FORMAT, 0>(dots, planes, x, x_stride);
        add_half<FORMAT, 1>(dots, planes, x, x_stride);
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) {
            const f32x16 scale = group_scale<FORMAT>(block[p], chunk);
            f32x16 minimum = scale;
            if constexpr (l.minimum) minimum = load_f16(halves(block[p] + l.minima) + LANES * chunk);
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) {
                const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
                acc[m][p] = fma(mul(scale, broadcast(group.scale)), to_float(dots[m][p]), acc[m][p]);
                if constexpr (l.minimum) acc[m][p] = fma(minimum, broadcast(group.scaled_sum), acc[m][p]);
            }
        }
    }
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
