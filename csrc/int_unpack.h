// Packed weights of integer formats to levels, and the exact dots of one chunk of 32 columns.
#pragma once

#include "int_formats.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// gcc keeps arrays of vectors in registers only if every loop over them is unrolled.
#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)
#define KVASIR_UNROLL _Pragma("GCC unroll 16")
#else
#define KVASIR_UNROLL
#endif

KVASIR_INLINE int32_t word(const void* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Levels of two formats are unpacked times a power of two, so that their zero points become Q6_K's.
constexpr int lift_of(int format) { return format == FORMAT_Q3_K ? 3 : format == FORMAT_TERNARY ? 5 : 0; }

constexpr int max_level(int format) {
    if (format == FORMAT_NF4) return 128;
    if (int_table_of(format) != nullptr) return int_table_of(format) == MXFP4_LEVELS ? 28 : 255;
    const IntLayout& l = int_layout_of(format);
    return ((1 << (l.low_bits + l.high_bits)) - 1) << lift_of(format);
}

// The field of BITS bits at FROM of every byte, moved to TO.
template <int BITS, int FROM, int TO>
KVASIR_INLINE u8x64 field(u8x64 v) {
    if constexpr (BITS == 8) return v;
    const u8x64 mask = broadcast_u8(static_cast<uint8_t>(((1 << BITS) - 1) << TO));
    if constexpr (FROM > TO) return bit_and(shift_right16<FROM - TO>(v), mask);
    if constexpr (FROM < TO) return bit_and(shift_left16<TO - FROM>(v), mask);
    return bit_and(v, mask);
}

// Columns 4 C to 4 C + 3 of the chunk of 32 whose planes begin at `low` and `high`. PART: of levels in two tables.
template <int FORMAT, int C, int PART>
KVASIR_INLINE u8x64 levels(const uint8_t* low, const uint8_t* high) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int per_low = 8 / l.low_bits, lift = lift_of(FORMAT);
    u8x64 v = field<l.low_bits, C % per_low * l.low_bits, lift>(load(low + 64 * (C / per_low)));
    if constexpr (int_table_of(FORMAT) != nullptr) v = lookup(int_table_of(FORMAT, PART), v);
    if constexpr (l.high_bits > 0) {
        constexpr int per_high = 8 / l.high_bits;
        const u8x64 upper = load(high + 64 * (C / per_high));
        v = bit_or(v, field<l.high_bits, C % per_high * l.high_bits, l.low_bits + lift>(upper));
    }
    return v;
}

// One chunk of 32 columns of a panel: its planes or, if UNPACKED, its levels (in `low`).
template <bool UNPACKED>
struct Chunk {
    const uint8_t* low;
    const uint8_t* high;
};

// unpacked: the levels of the block, if the chunk has those.
template <int FORMAT, bool UNPACKED>
KVASIR_INLINE Chunk<UNPACKED> chunk_of(const uint8_t* block, int chunk, const uint8_t* unpacked) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    if constexpr (UNPACKED) return {unpacked + 32 * LANES * chunk, nullptr};
    else return {block + l.low + 64 * l.low_bits * chunk, block + l.high + 64 * l.high_bits * chunk};
}

// Columns 4 C to 4 C + 3 of a chunk.
template <int FORMAT, int C, int PART, bool UNPACKED>
KVASIR_INLINE u8x64 levels_of(const Chunk<UNPACKED>& chunk) {
    if constexpr (UNPACKED) return load(chunk.low + 64 * C);
    else return levels<FORMAT, C, PART>(chunk.low, chunk.high);
}

// Prefetches, `ahead` bytes after the block, its part `part` of BYTES bytes, into L2: two panels do not fit L1.
template <int BYTES>
KVASIR_INLINE void prefetch_part(const uint8_t* block, int64_t ahead, int part) {
    KVASIR_UNROLL
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(block + ahead + part * BYTES + i, 0, 2);
}

#if defined(KVASIR_AVX2)

// AVX2 adds products of bytes in 16 bits. Levels above 128 are too great for that, so they are centred, and `zero` with
// them; small levels leave room for the products of several words.
constexpr int centre_of(int format) { return max_level(format) > 128 ? 128 : 0; }
constexpr int words_in_pairs(int format) {
    return centre_of(format) || format == FORMAT_NF4 ? 1 : 32767 / (2 * 127 * max_level(format));
}

template <int FORMAT>
KVASIR_INLINE auto factors(u8x64 levels) {
    if constexpr (centre_of(FORMAT) != 0) return centred(levels);
    else return levels;
}

// sums += columns 4 C to 4 END - 1 of the chunk. FIRST: the sums are not set yet.
template <int FORMAT, int C, int END, int PART, bool FIRST, int M, bool U>
KVASIR_INLINE void add_to_pairs(i16x32 (&sums)[M], const Chunk<U>& chunk, const uint8_t* q, int64_t x_stride) {
    const auto w = factors<FORMAT>(levels_of<FORMAT, C, PART>(chunk));
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const i16x32 products = pairs(w, word(q + m * x_stride + 4 * C));
        sums[m] = FIRST ? products : add(sums[m], products);
    }
    if constexpr (C + 1 < END) add_to_pairs<FORMAT, C + 1, END, PART, false>(sums, chunk, q, x_stride);
}

// dots += columns 4 C to 4 END - 1 of the chunk for all rows, whose quantized values begin at q.
template <int FORMAT, int C, int END, int PART, int M, bool U>
KVASIR_INLINE void add_words(i32x16 (&dots)[M], const Chunk<U>& chunk, const uint8_t* q, int64_t x_stride) {
    constexpr int room = words_in_pairs(FORMAT), middle = END - C < room ? END : C + room;
    i16x32 sums[M];
    add_to_pairs<FORMAT, C, middle, PART, true>(sums, chunk, q, x_stride);
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) dots[m] = add_pairs(dots[m], sums[m]);
    if constexpr (middle < END) add_words<FORMAT, middle, END, PART>(dots, chunk, q, x_stride);
}

#else

constexpr int centre_of(int) { return 0; }

// dots += columns 4 C to 4 END - 1 of the chunk for all rows, whose quantized values begin at q. Iterating over rows
// within a column keeps M independent sums in flight.
template <int FORMAT, int C, int END, int PART, int M, bool U>
KVASIR_INLINE void add_words(i32x16 (&dots)[M], const Chunk<U>& chunk, const uint8_t* q, int64_t x_stride) {
    const u8x64 w = levels_of<FORMAT, C, PART>(chunk);
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) dots[m] = dot<max_level(FORMAT)>(dots[m], w, q + m * x_stride + 4 * C);
    if constexpr (C + 1 < END) add_words<FORMAT, C + 1, END, PART>(dots, chunk, q, x_stride);
}

#endif

// The level that counts as 0 in the dots.
constexpr int zero_of(int format) { return int_layout_of(format).zero - centre_of(format); }

// Half a chunk: columns 16 HALF to 16 HALF + 15.
template <int FORMAT, int HALF, int PART = 0, int M, bool U>
KVASIR_INLINE void add_half(i32x16 (&dots)[M], const Chunk<U>& chunk, const uint8_t* q, int64_t x_stride) {
    add_words<FORMAT, 4 * HALF, 4 * HALF + 4, PART>(dots, chunk, q, x_stride);
}

// A whole chunk of 32 columns.
template <int FORMAT, int PART = 0, int M, bool U>
KVASIR_INLINE void add_chunk(i32x16 (&dots)[M], const Chunk<U>& chunk, const uint8_t* q, int64_t x_stride) {
    add_words<FORMAT, 0, 8, PART>(dots, chunk, q, x_stride);
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
