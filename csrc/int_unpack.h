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

// A tile multiplies some rows by P panels, whose blocks begin at block[0 to P - 1]. It has N sums: sum i is that of row
// i / P and panel i % P.

// One chunk of 32 columns of each panel: its planes or, if UNPACKED, the levels of the only panel (in `low`).
template <bool UNPACKED, int P>
struct Chunk {
    const uint8_t* low[P];
    const uint8_t* high[P];
};

// unpacked: the levels of the block, if the chunk has those.
template <int FORMAT, bool UNPACKED, int P>
KVASIR_INLINE Chunk<UNPACKED, P> chunk_of(const uint8_t* const (&block)[P], int chunk, const uint8_t* unpacked) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    static_assert(P == 1 || !UNPACKED);
    if constexpr (UNPACKED) return {{unpacked + 32 * LANES * chunk}, {}};
    Chunk<UNPACKED, P> planes;
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        planes.low[p] = block[p] + l.low + 64 * l.low_bits * chunk;
        planes.high[p] = block[p] + l.high + 64 * l.high_bits * chunk;
    }
    return planes;
}

// Columns 4 C to 4 C + 3 of a chunk of panel p.
template <int FORMAT, int C, int PART, bool UNPACKED, int P>
KVASIR_INLINE u8x64 levels_of(const Chunk<UNPACKED, P>& chunk, int p) {
    if constexpr (UNPACKED) return load(chunk.low[p] + 64 * C);
    else return levels<FORMAT, C, PART>(chunk.low[p], chunk.high[p]);
}

// Prefetches, ahead[p] bytes after each block, its part `part` of BYTES bytes, into L2: more panels do not fit L1.
template <int BYTES, int P>
KVASIR_INLINE void prefetch_part(const uint8_t* const (&block)[P], const int64_t* ahead, int part) {
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        if (ahead[p] == 0) continue;
        KVASIR_UNROLL
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(block[p] + ahead[p] + part * BYTES + i, 0, 2);
    }
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
KVASIR_INLINE void add_to_pairs(i16x32 (&sums)[M], const Chunk<U, 1>& chunk, const uint8_t* q, int64_t x_stride) {
    const auto w = factors<FORMAT>(levels_of<FORMAT, C, PART>(chunk, 0));
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const i16x32 products = pairs(w, word(q + m * x_stride + 4 * C));
        sums[m] = FIRST ? products : add(sums[m], products);
    }
    if constexpr (C + 1 < END) add_to_pairs<FORMAT, C + 1, END, PART, false>(sums, chunk, q, x_stride);
}

// dots += columns 4 C to 4 END - 1 of the chunk for all rows, whose quantized values begin at q.
template <int FORMAT, int C, int END, int PART, int M, bool U>
KVASIR_INLINE void add_words(i32x16 (&dots)[M], const Chunk<U, 1>& chunk, const uint8_t* q, int64_t x_stride) {
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
// within a column keeps N independent sums in flight.
template <int FORMAT, int C, int END, int PART, int N, bool U, int P>
KVASIR_INLINE void add_words(i32x16 (&dots)[N], const Chunk<U, P>& chunk, const uint8_t* q, int64_t x_stride) {
    u8x64 w[P];
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) w[p] = levels_of<FORMAT, C, PART>(chunk, p);
    KVASIR_UNROLL
    for (int i = 0; i < N; ++i) {
        const uint8_t* x = q + i / P * x_stride + 4 * C;
        if constexpr (P == 1) dots[i] = dot<max_level(FORMAT)>(dots[i], w[0], x);
        else dots[i] = dot<max_level(FORMAT)>(dots[i], w[i % P], word(x));  // loaded once for all panels
    }
    if constexpr (C + 1 < END) add_words<FORMAT, C + 1, END, PART>(dots, chunk, q, x_stride);
}

#endif

// The level that counts as 0 in the dots.
constexpr int zero_of(int format) { return int_layout_of(format).zero - centre_of(format); }

// Half a chunk: columns 16 HALF to 16 HALF + 15.
template <int FORMAT, int HALF, int PART = 0, int N, bool U, int P>
KVASIR_INLINE void add_half(i32x16 (&dots)[N], const Chunk<U, P>& chunk, const uint8_t* q, int64_t x_stride) {
    add_words<FORMAT, 4 * HALF, 4 * HALF + 4, PART>(dots, chunk, q, x_stride);
}

// A whole chunk of 32 columns.
template <int FORMAT, int PART = 0, int N, bool U, int P>
KVASIR_INLINE void add_chunk(i32x16 (&dots)[N], const Chunk<U, P>& chunk, const uint8_t* q, int64_t x_stride) {
    add_words<FORMAT, 0, 8, PART>(dots, chunk, q, x_stride);
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
