// Products with integer formats (int_formats.h). Each output element is one chain of float multiply-adds over groups in
// ascending order; each group's dot product is an exact integer. All micro-kernels therefore give the same bits:
//
//     groups of 32:   acc = fma(ws * xs, dot, acc), then for formats with minima acc = fma(wmin, xs * sum(x), acc)
//     groups of 64:   the same for each half of 32, with the scale of the whole; the minimum of zero points is
//                     -(zero * ws), and wmin a bias. NVFP4: part = ws0 * dot0, part = fma(ws1, dot1, part) over the
//                     two scales of a half; acc = fma(d * xs, part, acc)
//     super-blocks:   part = fma(scale, dot, part) over the 16 or 32 columns of each scale, from 0;
//                     acc = fma(d * xs, part, acc), then acc = fma(-(dmin * xs), the sum of min * sum(x), acc)
//
// Each segment starts at 0. A balanced tree adds the segments, then bias and residual are added.
#include "int_groups.h"
#include "int_super_blocks.h"
#include "linear.h"
#include "put_sum.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The maximum rows of a tile of one panel and of two, and the number of rows from which tiles have two panels.
#if defined(KVASIR_AVX512)
constexpr int MAX_TILE_ROWS[2] = {8, 6}, PAIR_FROM = 9;
#elif defined(KVASIR_AVX2)
constexpr int MAX_TILE_ROWS[2] = {4, 0}, PAIR_FROM = 1 << 30;
#else
constexpr int MAX_TILE_ROWS[2] = {2, 0}, PAIR_FROM = 1 << 30;
#endif
constexpr int MAX_ROWS = 8;
constexpr int MAX_SEGMENTS = 8;
constexpr int64_t AHEAD = 4096, AHEAD_SUPER = 8192;  // prefetch distances in bytes for few rows

struct Sums {
    f32x16 of[MAX_SEGMENTS][MAX_ROWS][2];  // segment, row, panel
};

struct Source {
    const uint8_t* panel;
    const uint8_t* unpacked;  // its levels, if the tile reads those
    const uint8_t* x;
    int64_t panel_bytes, x_stride, segments, blocks;
    int64_t ahead;  // prefetch distance in bytes, 0 for none
};

// Computes the sum of each segment, for M rows and P panels.
template <int FORMAT, int M, int P, bool UNPACKED = false>
__attribute__((noinline)) void add_tile(Sums& sums, const Source& from) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int64_t x_block = l.cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256);
    const int64_t panel_bytes = from.panel_bytes, x_stride = from.x_stride, ahead = from.ahead;
    const uint8_t* w = from.panel;
    const uint8_t* unpacked = from.unpacked;
    const uint8_t* x = from.x;
    for (int64_t s = 0; s < from.segments; ++s) {
        f32x16 acc[M][P];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) acc[m][p] = broadcast(0.0f);
        }
        for (int64_t b = 0; b < from.blocks; ++b, w += l.bytes, x += x_block) {
            const uint8_t* block[P];
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) block[p] = w + p * panel_bytes;
            if (l.cols == 64 && ahead != 0) prefetch_part<l.bytes>(block, ahead, 0);
            if constexpr (l.scale == SCALE_E5M3) add_fp4_groups<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride);
            else if constexpr (l.cols == 64) add_groups<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride);
            else add_super_block<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride, ahead);
            if constexpr (UNPACKED) unpacked += l.cols * LANES;
        }
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) sums.of[s][m][p] = acc[m][p];
        }
    }
}

using Tile = void (*)(Sums&, const Source&);

// Indexed by [panels - 1][rows - 1] of a tile.
template <int FORMAT>
constexpr Tile TILES[2][MAX_ROWS] = {
#if defined(KVASIR_AVX512)
    {add_tile<FORMAT, 1, 1>, add_tile<FORMAT, 2, 1>, add_tile<FORMAT, 3, 1>, add_tile<FORMAT, 4, 1>,
     add_tile<FORMAT, 5, 1>, add_tile<FORMAT, 6, 1>, add_tile<FORMAT, 7, 1>, add_tile<FORMAT, 8, 1>},
    {nullptr, nullptr, nullptr, add_tile<FORMAT, 4, 2>, add_tile<FORMAT, 5, 2>, add_tile<FORMAT, 6, 2>},
#elif defined(KVASIR_AVX2)
    {add_tile<FORMAT, 1, 1>, add_tile<FORMAT, 2, 1>, add_tile<FORMAT, 3, 1>, add_tile<FORMAT, 4, 1>},
#else
    {add_tile<FORMAT, 1, 1>, add_tile<FORMAT, 2, 1>},
#endif
};

// CASE for every format.
#define KVASIR_INT_FORMATS(CASE) \
    CASE(Q4_0) \
    CASE(Q4_1) \
    CASE(Q5_0) \
    CASE(Q5_1) \
    CASE(Q8_0) \
    CASE(IQ4_NL) \
    CASE(MXFP4) \
    CASE(INT4) \
    CASE(INT8) \
    CASE(INT4_ZP) \
    CASE(INT8_ZP) \
    CASE(AFFINE4) \
    CASE(AFFINE8) \
    CASE(NF4) \
    CASE(NVFP4) \
    CASE(Q2_K) \
    CASE(Q3_K) \
    CASE(Q4_K) \
    CASE(Q5_K) \
    CASE(Q6_K) \
    CASE(IQ4_XS) \
    CASE(TERNARY)

Tile tile_of(int32_t format, int64_t rows, int64_t panels) {
#define KVASIR_TILE(name) \
    case FORMAT_##name: return TILES<FORMAT_##name>[panels - 1][rows - 1];
    switch (format) {
        KVASIR_INT_FORMATS(KVASIR_TILE)
        default: return nullptr;
    }
#undef KVASIR_TILE
}

#if defined(KVASIR_AVX2)

// Levels are unpacked once for all tiles of a panel, if they fit the second cache: from few rows on where that takes
// several instructions, for many rows where it takes one or two.
constexpr int64_t MAX_UNPACKED_COLS = 8192, MAX_UNPACKED = MAX_UNPACKED_COLS * LANES;

constexpr int64_t unpack_from(int format) {
    return int_layout_of(format).high_bits > 0 || int_table_of(format) != nullptr ? 12 : 32;
}

template <int FORMAT, int C>
KVASIR_INLINE void unpack_words(uint8_t* to, const uint8_t* low, const uint8_t* high) {
    const u8x64 v = levels<FORMAT, C, 0>(low, high);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 64 * C), v.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 64 * C + 32), v.high);
    if constexpr (C < 7) unpack_words<FORMAT, C + 1>(to, low, high);
}

// The levels of `blocks` blocks of a panel: for each four columns 64 bytes.
template <int FORMAT>
__attribute__((noinline)) void unpack_panel(uint8_t* to, const uint8_t* from, int64_t blocks) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int64_t b = 0; b < blocks; ++b, from += l.bytes) {
        for (int chunk = 0; chunk < l.cols / 32; ++chunk, to += 32 * LANES) {
            const uint8_t* low = from + l.low + 64 * l.low_bits * chunk;
            const uint8_t* high = from + l.high + 64 * l.high_bits * chunk;
            unpack_words<FORMAT, 0>(to, low, high);
        }
    }
}

// How a format's panels are unpacked, and the tiles of three and of four rows that read the levels.
struct Unpacking {
    void (*unpack)(uint8_t*, const uint8_t*, int64_t);
    Tile tiles[2];
};

// Levels of 8 bits and NF4's are unpacked in linear_slabs.cpp.
template <int FORMAT>
constexpr Unpacking unpacking() {
    if constexpr (FORMAT == FORMAT_NF4 || int_layout_of(FORMAT).low_bits == 8) return {};
    else return {unpack_panel<FORMAT>, {add_tile<FORMAT, 3, 1, true>, add_tile<FORMAT, 4, 1, true>}};
}

Unpacking unpacking_of(const Matrix& m, int64_t rows) {
    const int64_t cols = m.segments * int_blocks(m) * int_layout_of(m.format).cols;
    if (rows < unpack_from(m.format) || cols > MAX_UNPACKED_COLS) return {};
#define KVASIR_UNPACKING(name) \
    case FORMAT_##name: return unpacking<FORMAT_##name>();
    switch (m.format) {
        KVASIR_INT_FORMATS(KVASIR_UNPACKING)
        default: return {};
    }
#undef KVASIR_UNPACKING
}

#endif

struct Target {
    float* out;
    const float* bias;
    const float* residual;
    int64_t out_stride, residual_stride;
};

// out = residual + (bias + sum of the segments, by a balanced tree), for `rows` rows and the first `cols` columns of a
// panel.
void finish(const Target& to, Sums& sums, int64_t segments, int64_t rows, int panel, int64_t cols) {
    for (int64_t m = 0; m < rows; ++m) {
        for (int64_t width = 1; width < segments; width *= 2) {
            for (int64_t s = 0; s < segments; s += 2 * width) {
                sums.of[s][m][panel] = add(sums.of[s][m][panel], sums.of[s + width][m][panel]);
            }
        }
        put_sum(to.out + m * to.out_stride, sums.of[0][m][panel], to.bias,
                to.residual ? to.residual + m * to.residual_stride : nullptr, cols);
    }
}

}  // namespace

void linear_int(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const int64_t bytes = int_panel_bytes(m), stride = int_activated_bytes(m), blocks = int_blocks(m);
    const int64_t near = int_layout_of(m.format).cols == 64 ? AHEAD : AHEAD_SUPER;
    Sums sums;
#if defined(KVASIR_AVX2)
    alignas(64) uint8_t room[MAX_UNPACKED];
    const Unpacking unpacking = unpacking_of(m, rows);
#endif
    for (int64_t panel = first_panel, width; panel < last_panel; panel += width) {
        width = rows >= PAIR_FROM && last_panel - panel >= 2 ? 2 : 1;
        int64_t tile_rows = MAX_TILE_ROWS[width - 1];
        const uint8_t* unpacked = nullptr;
#if defined(KVASIR_AVX2)
        if (unpacking.unpack) {
            unpacking.unpack(room, m.data + panel * bytes, m.segments * blocks);
            unpacked = room;
        }
#endif
        const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
            // A single tile prefetches a short distance ahead. The first of several prefetches the next panels while it
            // computes on these, so that the other tiles find theirs in the cache.
            const int64_t step = tiles == 1 ? near : panel + width < last_panel ? width * bytes : 0;
            const Source source = {m.data + panel * bytes, unpacked, activated + begin * stride, bytes,
                                   stride, m.segments, blocks, t == 0 ? step : 0};
#if defined(KVASIR_AVX2)
            const Tile tile = unpacked ? unpacking.tiles[count - 3] : tile_of(m.format, count, width);
#else
            const Tile tile = tile_of(m.format, count, width);
#endif
            tile(sums, source);
            for (int p = 0; p < width; ++p) {
                const int64_t col = (panel + p) * PANEL, left = m.rows - col;
                const Target target = {out + begin * out_stride + col, bias ? bias + col : nullptr,
                                       residual ? residual + begin * residual_stride + col : nullptr, out_stride,
                                       residual_stride};
                finish(target, sums, m.segments, count, p, left < LANES ? left : LANES);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
