// Levels of more than 8 bits on AVX2: NF4's, and INT8's where a checkpoint's scheme rounds rows to -128, for which the
// products of bytes have no room. Levels and activations are widened to int16. The dots are the same exact integers as
// those of the two tables in int_unpack.h.
#pragma once

#include "int_groups.h"
#include "linear_slabs.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// 32 columns of a panel: a vector has a pair of columns of eight rows.
struct WordGroup {
    alignas(64) int16_t levels[16][2][16];  // pair, half of the panel
};

// Four columns of eight rows: a pair of columns of each row, or all four of the first two rows of each half of the vector
// and of the others.
struct Quads {
    __m256i of[2];
};

struct WordTable {
    uint8_t low[16], high[16];  // the bytes of each code's level
};

constexpr WordTable nf4_table() {
    WordTable table = {};
    for (int code = 0; code < 16; ++code) {
        const int level = 128 * NF4_UPPER[code] + NF4_LOWER[code] - 8192;
        table.low[code] = static_cast<uint8_t>(level & 255);
        table.high[code] = static_cast<uint8_t>(level >> 8 & 255);
    }
    return table;
}

constexpr WordTable NF4_WORDS = nf4_table();

KVASIR_INLINE Quads joined(__m256i low, __m256i high) {  // bytes
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
}

KVASIR_INLINE Quads in_pairs(Quads rows) {
    const __m256 left = _mm256_castsi256_ps(rows.of[0]), right = _mm256_castsi256_ps(rows.of[1]);
    return {{_mm256_castps_si256(_mm256_shuffle_ps(left, right, 0x88)),
             _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0xdd))}};
}

// Where a tile reads columns 4 c to 4 c + 3 of a group, in pairs, for one half of the panel.
template <int FORMAT>
struct FromCodes {
    static constexpr int CHUNK = FORMAT == FORMAT_NF4 ? 256 : 512;  // bytes of 32 columns
    const uint8_t* planes;
    KVASIR_INLINE Quads rows(int c, int half) const {
        if constexpr (FORMAT == FORMAT_NF4) {
            const __m256i v = load_256(planes + 64 * (c / 2) + 32 * half);
            const __m256i codes = _mm256_and_si256(c % 2 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
            return joined(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(NF4_WORDS.low)), codes),
                          _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(NF4_WORDS.high)), codes));
        } else {
            const __m256i low = _mm256_xor_si256(load_256(planes + 64 * c + 32 * half), _mm256_set1_epi8(-128));
            return joined(low, _mm256_cmpgt_epi8(_mm256_setzero_si256(), low));
        }
    }
    KVASIR_INLINE Quads read(int c, int half) const { return in_pairs(rows(c, half)); }
};

struct FromWords {
    const WordGroup& group;
    KVASIR_INLINE Quads read(int c, int half) const {
        return {{load_256(group.levels[2 * c][half]), load_256(group.levels[2 * c + 1][half])}};
    }
};

// An instruction of its own, so that gcc neither reorders the sums, for which it needs more registers than there are,
// nor copies them.
KVASIR_INLINE void add_to(__m256i& sum, __m256i products) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
}

// The exact dots of a group for M rows and both halves of the panel.
template <int M, class Levels>
KVASIR_INLINE void word_dots(__m256i (&dots)[M][2], Levels from, const int16_t* x, int64_t x_stride) {
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) dots[m][0] = dots[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int c = 0; c < 8; ++c, x += 4) {
        const Quads low = from.read(c, 0), high = from.read(c, 1);
        KVASIR_UNROLL
        for (int i = 0; i < 2; ++i) {
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) {
                const __m256i xs = _mm256_set1_epi32(word(x + m * x_stride + 2 * i));
                add_to(dots[m][0], _mm256_madd_epi16(low.of[i], xs));
                add_to(dots[m][1], _mm256_madd_epi16(high.of[i], xs));
            }
        }
    }
}

// The same for one row, from codes: it is cheaper to add the pairs of a row at the end than to move them.
template <int FORMAT>
KVASIR_INLINE void word_dots(__m256i (&dots)[1][2], FromCodes<FORMAT> from, const int16_t* x, int64_t) {
    for (int half = 0; half < 2; ++half) {
        __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        KVASIR_UNROLL
        for (int c = 0; c < 8; ++c) {
            const Quads levels = from.rows(c, half);
            int64_t four;
            std::memcpy(&four, x + 4 * c, sizeof four);
            const __m256i xs = _mm256_set1_epi64x(four);
            KVASIR_UNROLL
            for (int i = 0; i < 2; ++i) add_to(sums[i], _mm256_madd_epi16(levels.of[i], xs));
        }
        dots[0][half] = _mm256_hadd_epi32(sums[0], sums[1]);
    }
}

template <int FORMAT_>
struct Words {
    static constexpr int FORMAT = FORMAT_, CODE_ROWS = 4, ROWS = 4;
    static constexpr int64_t UNPACK_FROM = 5;
    using Group = WordGroup;

    static void unpack(Group* to, const uint8_t* block) {
        for (int chunk = 0; chunk < 2; ++chunk) {
            const FromCodes<FORMAT> codes = {block + FromCodes<FORMAT>::CHUNK * chunk};
            for (int c = 0; c < 8; ++c) {
                for (int half = 0; half < 2; ++half) {
                    const Quads pairs = codes.read(c, half);
                    for (int i = 0; i < 2; ++i) {
                        _mm256_store_si256(reinterpret_cast<__m256i*>(to[chunk].levels[2 * c + i][half]), pairs.of[i]);
                    }
                }
            }
        }
    }

    // The groups of at most SLAB_BLOCKS blocks.
    template <int M, bool UNPACKED>
    __attribute__((noinline)) static void multiply(float (*sums)[LANES], const Group* groups, const uint8_t* block,
                                                   int64_t blocks, const uint8_t* x, int64_t x_stride, int64_t ahead) {
        constexpr IntLayout l = int_layout_of(FORMAT);
        constexpr int64_t COLS = 64 * SLAB_BLOCKS;
        alignas(64) int16_t wide[M][COLS];
        for (int m = 0; m < M; ++m) {
            const Group32* from = reinterpret_cast<const Group32*>(x + m * x_stride);
            for (int64_t g = 0; g < 2 * blocks; ++g) {
                for (int k = 0; k < 32; k += 16) {
                    const __m256i number = _mm256_cvtepi8_epi16(load_128(from[g].q + k));
                    _mm256_store_si256(reinterpret_cast<__m256i*>(wide[m] + 32 * g + k), number);
                }
            }
        }
        f32x16 acc[M];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) acc[m] = load(sums[m]);
        for (int64_t g = 0; g < 2 * blocks; ++g, x += sizeof(Group32)) {
            const uint8_t* from = block + g / 2 * l.bytes;
            __m256i dots[M][2];
            if constexpr (UNPACKED) {
                word_dots(dots, FromWords{groups[g]}, wide[0] + 32 * g, COLS);
            } else {
                if (ahead && g % 2 == 0) prefetch_block<l.bytes>(from + ahead);
                word_dots(dots, FromCodes<FORMAT>{from + g % 2 * FromCodes<FORMAT>::CHUNK}, wide[0] + 32 * g, COLS);
            }
            const f32x16 scale = load(reinterpret_cast<const float*>(from + l.scales));
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) {
                const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
                acc[m] = fma(mul(scale, broadcast(group.scale)), to_float(i32x16{dots[m][0], dots[m][1]}), acc[m]);
            }
        }
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) store(sums[m], acc[m]);
    }
};

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
