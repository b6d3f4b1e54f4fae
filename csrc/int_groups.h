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

KVASIR_INLINE const Group32& group_of(const uint8_t* x) { return *reinterpret_cast<const Group32*>(x); }

template <int FORMAT, bool UNPACKED, int N, int P>
KVASIR_INLINE void add_groups(f32x16 (&acc)[N], const uint8_t* const (&block)[P], const uint8_t* unpacked,
                              const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        i32x16 dots[N];
        KVASIR_UNROLL
        for (int i = 0; i < N; ++i) dots[i] = group_start<FORMAT>(group_of(x + i / P * x_stride));
        const auto planes = chunk_of<FORMAT, UNPACKED>(block, chunk, unpacked);
        add_chunk<FORMAT>(dots, planes, x, x_stride);
        if constexpr (FORMAT == FORMAT_NF4) {
            KVASIR_UNROLL
            for (int i = 0; i < N; ++i) dots[i] = shift_left<7>(dots[i]);
            add_chunk<FORMAT, 1>(dots, planes, x, x_stride);
        }
        f32x16 scale[P], minimum[P];
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) {
            scale[p] = group_scale<FORMAT>(block[p], chunk);
            if constexpr (l.minimum) minimum[p] = group_minimum<FORMAT>(block[p], chunk, scale[p]);
        }
        KVASIR_UNROLL
        for (int i = 0; i < N; ++i) {
            const Group32& group = group_of(x + i / P * x_stride);
            acc[i] = fma(mul(scale[i % P], broadcast(group.scale)), to_float(dots[i]), acc[i]);
            if constexpr (l.minimum) acc[i] = fma(minimum[i % P], broadcast(group.scaled_sum), acc[i]);
        }
    }
}

// The scale of 16 columns of NVFP4: a byte with an exponent of 5 bits and a mantissa of 3.
KVASIR_INLINE f32x16 fp4_scale(const uint8_t* bytes) {
    return bits_to_float(add(shift_left<20>(load_u8(bytes)), broadcast_i32(117 << 23)));
}

template <int FORMAT, int HALF, bool UNPACKED, int N, int P>
KVASIR_INLINE void add_fp4_half(f32x16 (&part)[N], const uint8_t* const (&block)[P], const uint8_t* unpacked,
                                int chunk, const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    i32x16 dots[N];
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) {
        const Group32& group = group_of(x + i / P * x_stride);
        dots[i] = broadcast_i32(2 * (HALF == 0 ? group.half_start : group.start - group.half_start));
    }
    add_half<FORMAT, HALF>(dots, chunk_of<FORMAT, UNPACKED>(block, chunk, unpacked), x, x_stride);
    f32x16 scale[P];
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) scale[p] = fp4_scale(block[p] + l.scales + LANES * (2 * chunk + HALF));
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) {
        const f32x16 dot = to_float(dots[i]);
        part[i] = HALF == 0 ? mul(scale[i % P], dot) : fma(scale[i % P], dot, part[i]);
    }
}

template <int FORMAT, bool UNPACKED, int N, int P>
KVASIR_INLINE void add_fp4_groups(f32x16 (&acc)[N], const uint8_t* const (&block)[P], const uint8_t* unpacked,
                                  const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        f32x16 part[N];
        add_fp4_half<FORMAT, 0, UNPACKED>(part, block, unpacked, chunk, x, x_stride);
        add_fp4_half<FORMAT, 1, UNPACKED>(part, block, unpacked, chunk, x, x_stride);
        f32x16 d[P];
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) d[p] = load(reinterpret_cast<const float*>(block[p] + l.d));
        KVASIR_UNROLL
        for (int i = 0; i < N; ++i) {
            acc[i] = fma(mul(d[i % P], broadcast(group_of(x + i / P * x_stride).scale)), part[i], acc[i]);
        }
    }
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
