// The block of 64 columns: the dots of each half, with its scale and its minimum or those of the whole, added to the
// sums. The order is in linear_int.cpp.
#pragma once

#include "int_unpack.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

template <int FORMAT>
KVASIR_INLINE f32x16 group_scale(const uint8_t* block, int chunk) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    if constexpr (l.scale == SCALE_F32) return load(reinterpret_cast<const float*>(block + l.scales));
    const uint16_t* from = halves(block + l.scales) + (l.sub == 64 ? 0 : LANES * chunk);
    return l.scale == SCALE_BF16 ? load_bf16(from) : load_f16(from);
}

template <int FORMAT>
KVASIR_INLINE f32x16 group_minimum(const uint8_t* block, int chunk, f32x16 scale) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    const uint16_t* from = halves(block + l.minima) + (l.sub == 64 ? 0 : LANES * chunk);
    const f32x16 number = l.scale == SCALE_BF16 ? load_bf16(from) : load_f16(from);
    return l.zero_point ? sub(broadcast(0.0f), mul(number, scale)) : number;
}

// -zero times the sum of the group; for levels in two tables, in units of the upper.
template <int FORMAT>
KVASIR_INLINE i32x16 group_start(const Group32& x) {
    constexpr int zero = zero_of(FORMAT);
    if constexpr (zero == 0) return broadcast_i32(0);
    const i32x16 eight = broadcast_i32(x.start);
    if constexpr (zero == -128) return sub(broadcast_i32(0), shift_left<4>(eight));
    return zero == 8192  ? shift_left<3>(eight)
           : zero == 128 ? shift_left<4>(eight)
           : zero == 16  ? shift_left<1>(eight)
                         : eight;
}

template <int FORMAT, bool UNPACKED, int M>
KVASIR_INLINE void add_groups(f32x16 (&acc)[M], const uint8_t* block, const uint8_t* unpacked, const uint8_t* x,
                              int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        i32x16 dots[M];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) dots[m] = group_start<FORMAT>(*reinterpret_cast<const Group32*>(x + m * x_stride));
        const auto planes = chunk_of<FORMAT, UNPACKED>(block, chunk, unpacked);
        add_chunk<FORMAT>(dots, planes, x, x_stride);
        if constexpr (FORMAT == FORMAT_NF4) {
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) dots[m] = shift_left<7>(dots[m]);
            add_chunk<FORMAT, 1>(dots, planes, x, x_stride);
        }
        const f32x16 scale = group_scale<FORMAT>(block, chunk);
        f32x16 minimum = scale;
        if constexpr (l.minimum) minimum = group_minimum<FORMAT>(block, chunk, scale);
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
            acc[m] = fma(mul(scale, broadcast(group.scale)), to_float(dots[m]), acc[m]);
            if constexpr (l.minimum) acc[m] = fma(minimum, broadcast(group.scaled_sum), acc[m]);
        }
    }
}

// The scale of 16 columns of NVFP4: a byte with an exponent of 5 bits and a mantissa of 3.
KVASIR_INLINE f32x16 fp4_scale(const uint8_t* bytes) {
    return bits_to_float(add(shift_left<20>(load_u8(bytes)), broadcast_i32(117 << 23)));
}

template <int FORMAT, int HALF, bool UNPACKED, int M>
KVASIR_INLINE void add_fp4_half(f32x16 (&part)[M], const uint8_t* block, const uint8_t* unpacked, int chunk,
                                const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    i32x16 dots[M];
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
        dots[m] = broadcast_i32(2 * (HALF == 0 ? group.half_start : group.start - group.half_start));
    }
    add_half<FORMAT, HALF>(dots, chunk_of<FORMAT, UNPACKED>(block, chunk, unpacked), x, x_stride);
    const f32x16 scale = fp4_scale(block + l.scales + LANES * (2 * chunk + HALF));
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const f32x16 dot = to_float(dots[m]);
        part[m] = HALF == 0 ? mul(scale, dot) : fma(scale, dot, part[m]);
    }
}

template <int FORMAT, bool UNPACKED, int M>
KVASIR_INLINE void add_fp4_groups(f32x16 (&acc)[M], const uint8_t* block, const uint8_t* unpacked, const uint8_t* x,
                                  int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        f32x16 part[M];
        add_fp4_half<FORMAT, 0, UNPACKED>(part, block, unpacked, chunk, x, x_stride);
        add_fp4_half<FORMAT, 1, UNPACKED>(part, block, unpacked, chunk, x, x_stride);
        const f32x16 d = load(reinterpret_cast<const float*>(block + l.d));
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
            acc[m] = fma(mul(d, broadcast(group.scale)), part[m], acc[m]);
        }
    }
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
