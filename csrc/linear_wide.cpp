// Products on AVX2 with more than 8 bits: NF4's levels, and INT8 where a checkpoint's scheme rounds rows to -128, for
// which the products of bytes have no room. Levels are decoded to int16, for several tiles of rows only
// once, and multiplied by activations that are widened to int16 as well. The dots are the same exact integers as those
// of the two tables in int_unpack.h, and everything after them is in the same order.
#include "linear_wide.h"

#include "input_rule.h"
#include "int_groups.h"
#include "put_sum.h"

#if defined(KVASIR_AVX2)

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int WIDE_TILE = 4;     // rows that share the loads of a level
constexpr int WIDE_ROWS = 32;    // of a slab
constexpr int WIDE_BLOCKS = 8;   // decoded at a time: 16 KiB
constexpr int WIDE_WORDS = 32;   // of a block, each four columns of eight rows
constexpr int WIDE_LEVELS = 32;  // int16 of a word
constexpr int64_t WIDE_AHEAD = 4096;  // prefetch distance in bytes

struct WideTable {
    uint8_t low[16], high[16];  // the bytes of each code's level
};

constexpr WideTable nf4_table() {
    WideTable table = {};
    for (int code = 0; code < 16; ++code) {
        const int level = 128 * NF4_UPPER[code] + NF4_LOWER[code] - 8192;
        table.low[code] = static_cast<uint8_t>(level & 255);
        table.high[code] = static_cast<uint8_t>(level >> 8 & 255);
    }
    return table;
}

constexpr WideTable NF4_WIDE = nf4_table();

// A slab's sums of one panel, and what is decoded of it.
struct WideSlab {
    alignas(64) int16_t levels[WIDE_BLOCKS * WIDE_WORDS * WIDE_LEVELS];
    alignas(64) int16_t x[WIDE_TILE][WIDE_BLOCKS * 64];
    f32x16 sums[8][WIDE_ROWS];  // segment, row
};

// The levels of eight rows by four columns, from codes in bytes: [0] has the first two rows of each half of the vector,
// [1] the others.
struct WideWord {
    __m256i of[2];
};

KVASIR_INLINE WideWord widen_bytes(__m256i codes) {  // INT8
    const __m256i low = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    const __m256i high = _mm256_cmpgt_epi8(_mm256_setzero_si256(), low);
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
}

KVASIR_INLINE WideWord widen_levels(__m256i codes) {  // NF4
    const __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(NF4_WIDE.low)), codes);
    const __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(NF4_WIDE.high)), codes);
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
}

KVASIR_INLINE __m256i lower_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
KVASIR_INLINE __m256i upper_nibbles(__m256i v) { return lower_nibbles(_mm256_srli_epi16(v, 4)); }

// Where a tile reads the levels of 32 columns by eight rows: eight words, two at a time.
template <int FORMAT>
struct FromCodes {  // the planes of the packed block: 64 bytes have two words of both halves of the panel, INT8 one
    static constexpr int CHUNK = FORMAT == FORMAT_NF4 ? 256 : 512;  // bytes
    const uint8_t* planes;
    KVASIR_INLINE void take(WideWord (&words)[2], int pair) const {
        if constexpr (FORMAT == FORMAT_NF4) {
            const __m256i v = load_256(planes + 64 * pair);
            words[0] = widen_levels(lower_nibbles(v));
            words[1] = widen_levels(upper_nibbles(v));
        } else {
            words[0] = widen_bytes(load_256(planes + 128 * pair));
            words[1] = widen_bytes(load_256(planes + 128 * pair + 64));
        }
    }
};

struct FromLevels {
    const int16_t* levels;
    KVASIR_INLINE void take(WideWord (&words)[2], int pair) const {
        const int16_t* from = levels + 2 * WIDE_LEVELS * pair;
        words[0] = {{load_256(from), load_256(from + 16)}};
        words[1] = {{load_256(from + 32), load_256(from + 48)}};
    }
};

// 64 columns of a panel to levels: for each chunk of 32 columns and each half of the panel, its eight words.
template <int FORMAT>
void widen_block(int16_t* to, const uint8_t* block) {
    for (int chunk = 0; chunk < 2; ++chunk) {
        for (int half = 0; half < 2; ++half) {
            const FromCodes<FORMAT> codes = {block + FromCodes<FORMAT>::CHUNK * chunk + 32 * half};
            for (int pair = 0; pair < 4; ++pair, to += 2 * WIDE_LEVELS) {
                WideWord words[2];
                codes.take(words, pair);
                for (int i = 0; i < 4; ++i) {
                    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 16 * i), words[i / 2].of[i % 2]);
                }
            }
        }
    }
}

// The exact dots of 32 columns for ROWS rows and eight rows of the matrix.
template <int ROWS, class Levels>
KVASIR_INLINE void wide_dots(__m256i (&dots)[ROWS], Levels from, const int16_t* x) {
    __m256i sums[ROWS][2];
    KVASIR_UNROLL
    for (int m = 0; m < ROWS; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    // Not unrolled: gcc would compute all products before it adds any, in more registers than there are.
#pragma GCC unroll 1
    for (int pair = 0; pair < 4; ++pair, x += 8) {
        WideWord words[2];
        from.take(words, pair);
        KVASIR_UNROLL
        for (int m = 0; m < ROWS; ++m) {
            KVASIR_UNROLL
            for (int i = 0; i < 2; ++i) {
                int64_t four;
                std::memcpy(&four, x + m * WIDE_BLOCKS * 64 + 4 * i, sizeof four);
                const __m256i xs = _mm256_set1_epi64x(four);
                sums[m][0] = _mm256_add_epi32(sums[m][0], _mm256_madd_epi16(words[i].of[0], xs));
                sums[m][1] = _mm256_add_epi32(sums[m][1], _mm256_madd_epi16(words[i].of[1], xs));
            }
        }
    }
    KVASIR_UNROLL
    for (int m = 0; m < ROWS; ++m) dots[m] = _mm256_hadd_epi32(sums[m][0], sums[m][1]);
}

// Adds `blocks` blocks to the sums of ROWS rows, whose groups begin at x: from the slab's levels, or from the blocks.
template <int FORMAT, int ROWS, bool DECODED>
__attribute__((noinline)) void add_wide(f32x16* sums, WideSlab& slab, const uint8_t* block, int64_t blocks,
                                        const uint8_t* x, int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int m = 0; m < ROWS; ++m) {
        const Group32* groups = reinterpret_cast<const Group32*>(x + m * x_stride);
        for (int64_t g = 0; g < 2 * blocks; ++g) {
            for (int i = 0; i < 32; i += 16) {
                const __m256i wide = _mm256_cvtepi8_epi16(load_128(groups[g].q + i));
                _mm256_store_si256(reinterpret_cast<__m256i*>(slab.x[m] + 32 * g + i), wide);
            }
        }
    }
    f32x16 acc[ROWS];
    KVASIR_UNROLL
    for (int m = 0; m < ROWS; ++m) acc[m] = sums[m];
    for (int64_t g = 0; g < 2 * blocks; ++g, x += sizeof(Group32)) {
        const uint8_t* from = block + g / 2 * l.bytes;
        if (!DECODED && g % 2 == 0) {
            for (int i = 0; i < l.bytes; i += 64) __builtin_prefetch(from + WIDE_AHEAD + i, 0, 2);
        }
        const int16_t* q = slab.x[0] + 32 * g;
        __m256i low[ROWS], high[ROWS];
        if constexpr (DECODED) {
            const int16_t* levels = slab.levels + g * 16 * WIDE_LEVELS;
            wide_dots<ROWS>(low, FromLevels{levels}, q);
            wide_dots<ROWS>(high, FromLevels{levels + 8 * WIDE_LEVELS}, q);
        } else {
            const uint8_t* planes = from + g % 2 * FromCodes<FORMAT>::CHUNK;
            wide_dots<ROWS>(low, FromCodes<FORMAT>{planes}, q);
            wide_dots<ROWS>(high, FromCodes<FORMAT>{planes + 32}, q);
        }
        const f32x16 scale = load(reinterpret_cast<const float*>(from + l.scales));
        KVASIR_UNROLL
        for (int m = 0; m < ROWS; ++m) {
            const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
            acc[m] = fma(mul(scale, broadcast(group.scale)), to_float(i32x16{low[m], high[m]}), acc[m]);
        }
    }
    KVASIR_UNROLL
    for (int m = 0; m < ROWS; ++m) sums[m] = acc[m];
}

template <int FORMAT, bool DECODED>
void add_tile(f32x16* sums, WideSlab& slab, const uint8_t* block, int64_t blocks, const uint8_t* x, int64_t x_stride,
              int64_t rows) {
    static_assert(WIDE_TILE == 4, "a case for each number of rows");
    switch (rows) {
        case 1: return add_wide<FORMAT, 1, DECODED>(sums, slab, block, blocks, x, x_stride);
        case 2: return add_wide<FORMAT, 2, DECODED>(sums, slab, block, blocks, x, x_stride);
        case 3: return add_wide<FORMAT, 3, DECODED>(sums, slab, block, blocks, x, x_stride);
        default: return add_wide<FORMAT, 4, DECODED>(sums, slab, block, blocks, x, x_stride);
    }
}

// The sums of all segments of one panel for `rows` (at most WIDE_ROWS) rows: slab.sums[segment][row]. A single tile
// decodes as it goes.
template <int FORMAT>
void wide_sums(WideSlab& slab, const uint8_t* panel, const uint8_t* x, int64_t x_stride, int64_t rows,
               int64_t segments, int64_t blocks) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    const int64_t tiles = (rows + WIDE_TILE - 1) / WIDE_TILE;
    for (int64_t s = 0; s < segments; ++s) {
        for (int64_t m = 0; m < rows; ++m) slab.sums[s][m] = broadcast(0.0f);
        for (int64_t first = 0; first < blocks; first += WIDE_BLOCKS) {
            const int64_t count = blocks - first < WIDE_BLOCKS ? blocks - first : WIDE_BLOCKS;
            if (tiles == 1) {
                add_tile<FORMAT, false>(slab.sums[s], slab, panel, count, x, x_stride, rows);
            } else {
                for (int64_t b = 0; b < count; ++b) {
                    widen_block<FORMAT>(slab.levels + b * WIDE_WORDS * WIDE_LEVELS, panel + b * l.bytes);
                }
                for (int64_t t = 0; t < tiles; ++t) {
                    const int64_t begin = rows * t / tiles, tall = rows * (t + 1) / tiles - begin;
                    add_tile<FORMAT, true>(slab.sums[s] + begin, slab, panel, count, x + begin * x_stride, x_stride, tall);
                }
            }
            panel += count * l.bytes;
            x += count * 2 * static_cast<int64_t>(sizeof(Group32));
        }
    }
}

}  // namespace

bool is_wide(const Matrix& m) {
    const InputRule* rule = input_rule(m);
    return m.format == FORMAT_NF4 || (rule && rule->rounding == ROUND_INT8);
}

void linear_wide(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                 float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const int64_t bytes = int_panel_bytes(m), stride = int_activated_bytes(m), blocks = int_blocks(m);
    const auto add_up = m.format == FORMAT_NF4 ? wide_sums<FORMAT_NF4> : wide_sums<FORMAT_INT8>;
    WideSlab slab;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const int64_t col = panel * PANEL, left = m.rows - col, cols = left < LANES ? left : LANES;
        for (int64_t begin = 0; begin < rows; begin += WIDE_ROWS) {
            const int64_t count = rows - begin < WIDE_ROWS ? rows - begin : WIDE_ROWS;
            add_up(slab, m.data + panel * bytes, activated + begin * stride, stride, count, m.segments, blocks);
            for (int64_t r = 0; r < count; ++r) {
                const int64_t row = begin + r;
                for (int64_t width = 1; width < m.segments; width *= 2) {
                    for (int64_t s = 0; s < m.segments; s += 2 * width) {
                        slab.sums[s][r] = add(slab.sums[s][r], slab.sums[s + width][r]);
                    }
                }
                put_sum(out + row * out_stride + col, slab.sums[0][r], bias ? bias + col : nullptr,
                        residual ? residual + row * residual_stride + col : nullptr, cols);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir

#else

namespace kvasir {
namespace KVASIR_ISA {

bool is_wide(const Matrix&) { return false; }

void linear_wide(const Matrix&, const uint8_t*, int64_t, int64_t, int64_t, float*, int64_t, const float*, const float*,
                 int64_t) {}

}  // namespace KVASIR_ISA
}  // namespace kvasir

#endif
