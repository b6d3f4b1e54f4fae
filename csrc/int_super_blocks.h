// The super-block of 256: the dots under each of its scales, then its own scale, then its minima. The order is in
// linear_int.cpp.
#pragma once

#include "int_unpack.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// Scale `sub` of a super-block.
template <int FORMAT>
KVASIR_INLINE f32x16 sub_scale(const uint8_t* block, int sub) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    const uint8_t* scales = block + l.scales;
    if constexpr (l.scale == SCALE_ONE) return broadcast(1.0f);
    if constexpr (l.scale == SCALE_U8) return to_float(load_u8(scales + LANES * sub));
    if constexpr (l.scale == SCALE_I8) return to_float(load_i8(reinterpret_cast<const int8_t*>(scales) + LANES * sub));
    const i32x16 pair = load_u8_pairs(scales + 2 * LANES * (sub / 2));
    const i32x16 byte = sub % 2 == 0 ? pair : shift_right<16>(pair);
    return to_float(bit_and(byte, broadcast_i32(15)));
}

// Minima 2 `pair` and 2 `pair` + 1 of a super-block, as int16.
template <int FORMAT>
KVASIR_INLINE i32x16 minimum_pair(const uint8_t* block, int pair) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    if constexpr (l.scale != SCALE_NIBBLES) return load_u8_pairs(block + l.minima + 2 * LANES * pair);
    const i32x16 both = load_u8_pairs(block + l.scales + 2 * LANES * pair);
    return bit_and(shift_right<4>(both), broadcast_i32(0x000f000f));
}

// -zero times the sum of the columns of scale `sub`, with the zero scaled like the levels.
template <int FORMAT>
KVASIR_INLINE i32x16 sub_start(const Group256& x, int sub) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int zero = zero_of(FORMAT);
    if constexpr (zero == 0) return broadcast_i32(0);
    if constexpr (l.sub == 16) return broadcast_i32(x.start[sub]);
    const i32x16 both = broadcast_i32(x.start[2 * sub] + x.start[2 * sub + 1]);
    return zero == 128 ? shift_left<2>(both) : both;
}

KVASIR_INLINE const Group256& super_group_of(const uint8_t* x) { return *reinterpret_cast<const Group256*>(x); }

template <int FORMAT, int P, int N>
KVASIR_INLINE void start_dots(i32x16 (&dots)[N], int sub, const uint8_t* x, int64_t x_stride) {
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) dots[i] = sub_start<FORMAT>(super_group_of(x + i / P * x_stride), sub);
}

// part = fma(scale, dot, part) for the columns of scale `sub`.
template <int FORMAT, int N, int P>
KVASIR_INLINE void add_dots(f32x16 (&part)[N], const i32x16 (&dots)[N], const uint8_t* const (&block)[P], int sub) {
    f32x16 scale[P];
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) scale[p] = sub_scale<FORMAT>(block[p], sub);
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) part[i] = fma(scale[i % P], to_float(dots[i]), part[i]);
}

// acc = fma(-(dmin * xs), the sum of min * sum(x), acc) for panel p: the sum is one exact integer.
template <int FORMAT, int P, int N>
KVASIR_INLINE void add_minima(f32x16 (&acc)[N], int p, const uint8_t* block, const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int pairs = 128 / l.sub;
    i32x16 minima[pairs];
    KVASIR_UNROLL
    for (int j = 0; j < pairs; ++j) minima[j] = minimum_pair<FORMAT>(block, j);
    const f32x16 dmin = sub(broadcast(0.0f), load_f16(halves(block + l.dmin)));
    KVASIR_UNROLL
    for (int m = 0; m < N / P; ++m) {
        const Group256& group = super_group_of(x + m * x_stride);
        const int16_t* sums = l.sub == 16 ? group.sum16 : group.sum32;
        i32x16 total = broadcast_i32(0);
        KVASIR_UNROLL
        for (int j = 0; j < pairs; ++j) total = dot_i16(total, minima[j], word(sums + 2 * j));
        acc[m * P + p] = fma(mul(dmin, broadcast(group.scale)), to_float(total), acc[m * P + p]);
    }
}

// ahead: prefetch distance of each panel in bytes, 0 for none. Each chunk prefetches its share: all at once they would wait for line
// buffers.
template <int FORMAT, bool UNPACKED, int N, int P>
KVASIR_INLINE void add_super_block(f32x16 (&acc)[N], const uint8_t* const (&block)[P], const uint8_t* unpacked,
                                   const uint8_t* x, int64_t x_stride, const int64_t* ahead) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int chunk_bytes = (l.bytes + 511) / 512 * 64;
    f32x16 part[N];
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) part[i] = broadcast(0.0f);
    for (int chunk = 0; chunk < 8; ++chunk) {
        const auto planes = chunk_of<FORMAT, UNPACKED>(block, chunk, unpacked);
        const uint8_t* q = x + 32 * chunk;
        prefetch_part<chunk_bytes>(block, ahead, chunk);
        i32x16 dots[N];
        if constexpr (l.sub == 32) {
            start_dots<FORMAT, P>(dots, chunk, x, x_stride);
            add_chunk<FORMAT>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, chunk);
        } else {
            start_dots<FORMAT, P>(dots, 2 * chunk, x, x_stride);
            add_half<FORMAT, 0>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, 2 * chunk);
            start_dots<FORMAT, P>(dots, 2 * chunk + 1, x, x_stride);
            add_half<FORMAT, 1>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, 2 * chunk + 1);
        }
    }
    f32x16 d[P];
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        d[p] = load_f16(halves(block[p] + l.d));
        if constexpr (lift_of(FORMAT) > 0) d[p] = mul(d[p], broadcast(1.0f / (1 << lift_of(FORMAT))));  // exact
    }
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) {
        acc[i] = fma(mul(d[i % P], broadcast(super_group_of(x + i / P * x_stride).scale)), part[i], acc[i]);
    }
    if constexpr (l.minimum) {
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) add_minima<FORMAT, P>(acc, p, block[p], x, x_stride);
    }
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
