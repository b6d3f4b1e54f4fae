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
#include "tile_panels.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The maximum rows of a tile of one panel and of two. Where tiles have one, the number of rows from which slabs pay: for
// levels of one plane, of a table, of two planes.
constexpr int NEVER = 1 << 30;
#if defined(KVASIR_AVX512)
constexpr int MAX_TILE_ROWS[2] = {12, 6}, SLAB_FROM[3] = {NEVER, 13, 13};
#elif defined(KVASIR_AVX2)
constexpr int MAX_TILE_ROWS[2] = {4, 0}, SLAB_FROM[3] = {32, 9, 6};
#else
constexpr int MAX_TILE_ROWS[2] = {2, 0};
#endif
constexpr int MAX_SEGMENTS = 8;
constexpr int SLAB_ROWS = 64;  // that a slab serves
constexpr int64_t AHEAD = 4096, AHEAD_SUPER = 8192;  // prefetch distances in bytes for few rows

// The sums of a tile for each segment, or of all tiles that a slab serves.
template <int COUNT>
struct Sums {
    f32x16 of[MAX_SEGMENTS][COUNT];
};
using TileSums = Sums<MAX_TILE_ROWS[0]>;

struct Source {
    const uint8_t* panel;
    const uint8_t* x;
    int64_t panel_bytes, x_stride, segments, blocks;
    int64_t ahead[2];  // prefetch distance of each panel in bytes, 0 for none
};

// Adds blocks of P panels to a tile's sums, from w and x on. unpacked: their levels, if the tile reads those.
template <int FORMAT, bool UNPACKED, int P, int N>
KVASIR_INLINE void add_blocks(f32x16 (&acc)[N], const Source& from, const uint8_t* w, const uint8_t* x,
                              const uint8_t* unpacked) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int64_t x_block = l.cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256);
    const int64_t panel_bytes = from.panel_bytes, x_stride = from.x_stride;
    for (int64_t b = 0; b < from.blocks; ++b, w += l.bytes, x += x_block) {
        const uint8_t* block[P];
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) block[p] = w + p * panel_bytes;
        if constexpr (l.cols == 64) prefetch_part<l.bytes>(block, from.ahead, 0);
        if constexpr (l.scale == SCALE_E5M3) add_fp4_groups<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride);
        else if constexpr (l.cols == 64) add_groups<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride);
        else add_super_block<FORMAT, UNPACKED>(acc, block, unpacked, x, x_stride, from.ahead);
        if constexpr (UNPACKED) unpacked += l.cols * LANES;
    }
}

// Computes the sum of each segment for M rows and P panels.
template <int FORMAT, int M, int P>
__attribute__((noinline)) void add_tile(TileSums& sums, const Source& from) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int64_t x_block = l.cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256);
    for (int64_t s = 0; s < from.segments; ++s) {
        f32x16 acc[M * P];
        KVASIR_UNROLL
        for (int i = 0; i < M * P; ++i) acc[i] = broadcast(0.0f);
        const int64_t begin = s * from.blocks;
        add_blocks<FORMAT, false, P>(acc, from, from.panel + begin * l.bytes, from.x + begin * x_block, nullptr);
        KVASIR_UNROLL
        for (int i = 0; i < M * P; ++i) sums.of[s][i] = acc[i];
    }
}

using Tile = void (*)(TileSums&, const Source&);

#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)

constexpr int64_t slab_from(int32_t format) {
    return SLAB_FROM[int_layout_of(format).high_bits > 0 ? 2 : int_table_of(format) != nullptr ? 1 : 0];
}

// Levels of 8 bits need no unpacking, or another one (linear_slabs.cpp), as NF4's in two tables do.
constexpr bool has_slabs(int32_t format) {
    return format != FORMAT_NF4 && int_layout_of(format).low_bits != 8 && slab_from(format) != NEVER;
}

#endif

// Whether so many rows have tiles of two panels, where tile_panels() is 2. Few rows of super-blocks and of levels of 8
// bits wait for memory, and one panel after the other is faster then.
constexpr bool in_pairs(int32_t format, int64_t rows) {
    const IntLayout& l = int_layout_of(format);
    return MAX_TILE_ROWS[1] > 0 && rows >= (l.cols == 64 && l.low_bits != 8 ? 3 : 9);
}

template <int FORMAT>
constexpr Tile tile_of_three_and_two() {
    if constexpr (in_pairs(FORMAT, 3)) return add_tile<FORMAT, 3, 2>;
    else return nullptr;
}

// Indexed by [panels - 1][rows - 1].
template <int FORMAT>
constexpr Tile TILES[2][MAX_TILE_ROWS[0]] = {
#if defined(KVASIR_AVX512)
    {add_tile<FORMAT, 1, 1>, add_tile<FORMAT, 2, 1>, add_tile<FORMAT, 3, 1>, add_tile<FORMAT, 4, 1>,
     add_tile<FORMAT, 5, 1>, add_tile<FORMAT, 6, 1>, add_tile<FORMAT, 7, 1>, add_tile<FORMAT, 8, 1>,
     add_tile<FORMAT, 9, 1>, add_tile<FORMAT, 10, 1>, add_tile<FORMAT, 11, 1>, add_tile<FORMAT, 12, 1>},
    {nullptr, nullptr, tile_of_three_and_two<FORMAT>(), add_tile<FORMAT, 4, 2>, add_tile<FORMAT, 5, 2>,
     add_tile<FORMAT, 6, 2>},
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

#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)

// A slab is SLAB_COLS columns of a panel. For many rows its levels are unpacked once, into the first cache, and stay
// there while all rows are multiplied; their sums are in memory between slabs.
constexpr int64_t SLAB_COLS = 512;
struct Slab {
    alignas(64) uint8_t levels[SLAB_COLS * LANES];
    Sums<SLAB_ROWS> sums;
};

template <int FORMAT, int C>
KVASIR_INLINE void unpack_words(uint8_t* to, const uint8_t* low, const uint8_t* high) {
    store(to + 64 * C, levels<FORMAT, C, 0>(low, high));
    if constexpr (C < 7) unpack_words<FORMAT, C + 1>(to, low, high);
}

// The levels of `blocks` blocks of a panel: for each four columns 64 bytes.
template <int FORMAT>
__attribute__((noinline)) void unpack_blocks(uint8_t* to, const uint8_t* from, int64_t blocks) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int64_t b = 0; b < blocks; ++b, from += l.bytes) {
        for (int chunk = 0; chunk < l.cols / 32; ++chunk, to += 32 * LANES) {
            const uint8_t* low = from + l.low + 64 * l.low_bits * chunk;
            const uint8_t* high = from + l.high + 64 * l.high_bits * chunk;
            unpack_words<FORMAT, 0>(to, low, high);
        }
    }
}

// Adds the slab's blocks to the sums of M rows from `row` on. is_first: of a segment.
template <int FORMAT, int M>
__attribute__((noinline)) void add_slab(Slab& slab, const Source& from, int64_t segment, int64_t row, bool is_first) {
    f32x16 acc[M];
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) acc[m] = is_first ? broadcast(0.0f) : slab.sums.of[segment][row + m];
    add_blocks<FORMAT, true, 1>(acc, from, from.panel, from.x, slab.levels);
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) slab.sums.of[segment][row + m] = acc[m];
}

// How a format's blocks are unpacked, and the tiles that read the levels, indexed by rows - 1.
struct Slabs {
    void (*unpack)(uint8_t*, const uint8_t*, int64_t);
    void (*tiles[MAX_TILE_ROWS[0]])(Slab&, const Source&, int64_t, int64_t, bool);
};

template <int FORMAT>
constexpr Slabs slabs() {
    if constexpr (!has_slabs(FORMAT)) return {};
#if defined(KVASIR_AVX512)
    else return {unpack_blocks<FORMAT>,
                 {nullptr, nullptr, nullptr, nullptr, nullptr, add_slab<FORMAT, 6>, add_slab<FORMAT, 7>,
                  add_slab<FORMAT, 8>, add_slab<FORMAT, 9>, add_slab<FORMAT, 10>, add_slab<FORMAT, 11>,
                  add_slab<FORMAT, 12>}};
#else
    else return {unpack_blocks<FORMAT>, {nullptr, nullptr, add_slab<FORMAT, 3>, add_slab<FORMAT, 4>}};
#endif
}

Slabs slabs_of(int32_t format, int64_t rows) {
    if (rows < slab_from(format)) return {};
#define KVASIR_SLABS(name) \
    case FORMAT_##name: return slabs<FORMAT_##name>();
    switch (format) {
        KVASIR_INT_FORMATS(KVASIR_SLABS)
        default: return {};
    }
#undef KVASIR_SLABS
}

// Computes the sum of each segment of `rows` rows, at most SLAB_ROWS. whole: the panel and the rows, all of their blocks.
void add_slabs(Slab& slab, const Slabs& by, const Matrix& m, const Source& whole, int64_t rows) {
    const IntLayout& l = int_layout_of(m.format);
    const int64_t x_block = l.cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256), most = SLAB_COLS / l.cols;
    const int64_t tiles = (rows + MAX_TILE_ROWS[0] - 1) / MAX_TILE_ROWS[0];
    Source from = whole;
    for (int64_t s = 0; s < whole.segments; ++s) {
        for (int64_t done = 0; done < whole.blocks; done += from.blocks) {
            from.blocks = whole.blocks - done < most ? whole.blocks - done : most;
            by.unpack(slab.levels, from.panel, from.blocks);
            const uint8_t* x = whole.x + (s * whole.blocks + done) * x_block;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
                from.x = x + begin * from.x_stride;
                from.ahead[0] = t == 0 ? whole.ahead[0] : 0;
                by.tiles[count - 1](slab, from, s, begin, done == 0);
            }
            from.panel += from.blocks * l.bytes;
        }
    }
}

#endif

struct Target {
    float* out;
    const float* bias;
    const float* residual;
    int64_t out_stride, residual_stride;
};

// out = residual + (bias + sum of the segments, by a balanced tree), for `rows` rows and the first `cols` columns of a
// panel, whose sums are first, first + step, ...
template <int COUNT>
void finish(const Target& to, Sums<COUNT>& sums, int64_t first, int64_t step, int64_t segments, int64_t rows,
            int64_t cols) {
    for (int64_t m = 0; m < rows; ++m) {
        const int64_t i = first + m * step;
        for (int64_t width = 1; width < segments; width *= 2) {
            for (int64_t s = 0; s < segments; s += 2 * width) {
                sums.of[s][i] = add(sums.of[s][i], sums.of[s + width][i]);
            }
        }
        put_sum(to.out + m * to.out_stride, sums.of[0][i], to.bias,
                to.residual ? to.residual + m * to.residual_stride : nullptr, cols);
    }
}

// A product's operands and results, as linear_int has them.
struct Product {
    const Matrix& m;
    const uint8_t* activated;
    int64_t rows, last_panel;
    Target to;  // of the first row and column
    int64_t bytes, stride, blocks;

    Source source(int64_t panel, int64_t row, int64_t ahead, int64_t second_ahead = 0) const {
        return {m.data + panel * bytes, activated + row * stride, bytes, stride, m.segments, blocks, {ahead, second_ahead}};
    }

    // Finishes `count` rows of `width` panels, whose sums begin at row 0.
    template <int COUNT>
    void finish_rows(Sums<COUNT>& sums, int64_t row, int64_t count, int64_t panel, int64_t width) const {
        for (int64_t p = 0; p < width; ++p) {
            const int64_t col = (panel + p) * PANEL, left = m.rows - col;
            const Target target = {to.out + row * to.out_stride + col, to.bias ? to.bias + col : nullptr,
                                   to.residual ? to.residual + row * to.residual_stride + col : nullptr, to.out_stride,
                                   to.residual_stride};
            finish(target, sums, p, width, m.segments, count, left < LANES ? left : LANES);
        }
    }
};

void multiply_tiles(const Product& product, int64_t panel, int64_t width) {
    const int64_t rows = product.rows, most = MAX_TILE_ROWS[width - 1], tiles = (rows + most - 1) / most;
    const int64_t near = int_layout_of(product.m.format).cols == 64 ? AHEAD : AHEAD_SUPER;
    // A single tile of one panel prefetches a short distance ahead. Others prefetch the next panels while they compute on
    // these, if there are several each another one, so that all find theirs in the cache.
    const int64_t next = panel + width < product.last_panel ? width * product.bytes : 0;
    const int64_t ahead = tiles == 1 && width == 1 ? near : next;
    TileSums sums;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
        const Source from = product.source(panel, begin, t == 0 ? ahead : 0, t == 1 % tiles ? ahead : 0);
        tile_of(product.m.format, count, width)(sums, from);
        product.finish_rows(sums, begin, count, panel, width);
    }
}

#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)

void multiply_slabs(const Product& product, const Slabs& by, Slab& slab, int64_t panel) {
    const int64_t rows = product.rows, parts = (rows + SLAB_ROWS - 1) / SLAB_ROWS;
    const int64_t ahead = panel + 1 < product.last_panel ? product.bytes : 0;
    for (int64_t i = 0; i < parts; ++i) {
        const int64_t begin = rows * i / parts, count = rows * (i + 1) / parts - begin;
        add_slabs(slab, by, product.m, product.source(panel, begin, i == 0 ? ahead : 0), count);
        product.finish_rows(slab.sums, begin, count, panel, 1);
    }
}

#endif

}  // namespace

void linear_int(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const Product product = {m, activated, rows, last_panel, {out, bias, residual, out_stride, residual_stride},
                             int_panel_bytes(m), int_activated_bytes(m), int_blocks(m)};
    const bool pairs = in_pairs(m.format, rows) && tile_panels() == 2;
#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)
    if (const Slabs slabs = slabs_of(m.format, rows); slabs.unpack && !pairs) {
        Slab slab;
        for (int64_t panel = first_panel; panel < last_panel; ++panel) multiply_slabs(product, slabs, slab, panel);
        return;
    }
#endif
    for (int64_t panel = first_panel, width; panel < last_panel; panel += width) {
        width = pairs && last_panel - panel >= 2 ? 2 : 1;
        multiply_tiles(product, panel, width);
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
