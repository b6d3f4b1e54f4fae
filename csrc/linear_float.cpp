// Products with float matrices. Each output element and segment is one chain of fused multiply-adds in ascending k,
// whatever the tile: a lane is a row of the matrix, and no sum crosses lanes.
//
//     tile    up to TILE_ROWS rows of activations x TILE_PANELS panels, with the accumulators in registers
//     order   a group of panels is multiplied by all rows before the next group. There is no software prefetch:
//             hardware prefetching handles this many streams, and both together are slower
#include <cstring>

#include "float_weights.h"
#include "linear.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

#if defined(KVASIR_AVX512)
constexpr int TILE_ROWS = 6, TILE_PANELS = 4;  // 24 accumulators in 32 registers
#elif defined(KVASIR_AVX2)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;  // 12 in 16
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 1;
#endif

struct WeightPairs {  // bfloat16 weights and activations
    using X = uint16_t;
    static constexpr int64_t COLUMNS = 2, BYTES = 64, GROUP = 0;
    u16x32 pairs;
    KVASIR_INLINE explicit WeightPairs(const uint8_t* from)
        : pairs(load_pairs(reinterpret_cast<const uint16_t*>(from))) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return dot_bf16(sum, pairs, pair);
    }
};

// E4M3 with a float32 scale per GROUP columns: part = the chain over the group, sum = fma(scale, part, sum).
struct WeightFP8 {
    using X = float;
    static constexpr int64_t COLUMNS = 2, BYTES = 32, GROUP = 128;
    u16x32 pairs;
    KVASIR_INLINE explicit WeightFP8(const uint8_t* from) : pairs(load_e4m3(from)) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const {
        return fma(odd_bf16(pairs), broadcast(x[1]), fma(even_bf16(pairs), broadcast(x[0]), sum));
    }
};

struct WeightFP8Pairs {  // with bfloat16 activations
    using X = uint16_t;
    static constexpr int64_t COLUMNS = 2, BYTES = 32, GROUP = 128;
    u16x32 pairs;
    KVASIR_INLINE explicit WeightFP8Pairs(const uint8_t* from) : pairs(load_e4m3(from)) {}
    KVASIR_INLINE f32x16 add_to(f32x16 sum, const X* x) const {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return dot_bf16(sum, pairs, pair);
    }
};

struct Product {
    const Matrix& m;
    const uint8_t* activated;
    int64_t activated_bytes, panel_bytes;
    float* out;
    int64_t out_stride;
    const float* bias;
    const float* residual;
    int64_t residual_stride;
};

template <int ROWS, int PANELS>
struct Tile {
    f32x16 sum[ROWS][PANELS];
};

// `steps` Weights of each panel, starting at `w`, times each row's activations, starting at `x`.
template <class Weight, int ROWS, int PANELS>
KVASIR_INLINE void multiply(Tile<ROWS, PANELS>& tile, const uint8_t* w, int64_t panel_bytes,
                            const typename Weight::X* x, int64_t x_stride, int64_t steps) {
    f32x16 sum[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) sum[r][p] = broadcast(0.0f);
    }
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            const Weight weight(w + p * panel_bytes);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) sum[r][p] = weight.add_to(sum[r][p], x + r * x_stride);
        }
        w += Weight::BYTES;
        x += Weight::COLUMNS;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) tile.sum[r][p] = sum[r][p];
    }
}

// Bytes of a segment of `cols` columns.
template <class Weight>
constexpr int64_t segment_bytes(int64_t cols) {
    const int64_t bytes = cols / Weight::COLUMNS * Weight::BYTES;
    if constexpr (Weight::GROUP > 0) return bytes + cols / Weight::GROUP * FP8_SCALES;
    return bytes;
}

// One segment of `cols` columns.
template <class Weight, int ROWS, int PANELS>
KVASIR_INLINE void multiply_segment(Tile<ROWS, PANELS>& tile, const uint8_t* w, int64_t panel_bytes,
                                    const typename Weight::X* x, int64_t x_stride, int64_t cols) {
    if constexpr (Weight::GROUP == 0) {
        multiply<Weight>(tile, w, panel_bytes, x, x_stride, cols / Weight::COLUMNS);
    } else {
        for (int r = 0; r < ROWS; ++r) {
            for (int p = 0; p < PANELS; ++p) tile.sum[r][p] = broadcast(0.0f);
        }
        for (int64_t k = 0; k < cols; k += Weight::GROUP, w += segment_bytes<Weight>(Weight::GROUP)) {
            Tile<ROWS, PANELS> part;
            multiply<Weight>(part, w + FP8_SCALES, panel_bytes, x + k, x_stride, Weight::GROUP / Weight::COLUMNS);
            for (int p = 0; p < PANELS; ++p) {
                const f32x16 scale = load(reinterpret_cast<const float*>(w + p * panel_bytes));
                for (int r = 0; r < ROWS; ++r) tile.sum[r][p] = fma(scale, part.sum[r][p], tile.sum[r][p]);
            }
        }
    }
}

template <int ROWS, int PANELS>
KVASIR_INLINE void add_tile(Tile<ROWS, PANELS>& right, const Tile<ROWS, PANELS>& left) {
    for (int r = 0; r < ROWS; ++r) {
        for (int p = 0; p < PANELS; ++p) right.sum[r][p] = add(left.sum[r][p], right.sum[r][p]);
    }
}

// Adds bias and residual, and writes the output columns without the padding of the last panel.
template <int ROWS, int PANELS>
KVASIR_INLINE void finish(const Product& job, const Tile<ROWS, PANELS>& tile, int64_t first_row, int64_t panel) {
    for (int p = 0; p < PANELS; ++p) {
        const int64_t n = (panel + p) * PANEL, count = job.m.rows - n;
        const bool whole = count >= PANEL;
        for (int r = 0; r < ROWS; ++r) {
            f32x16 sum = tile.sum[r][p];
            if (job.bias) sum = add(sum, whole ? load(job.bias + n) : load_first(job.bias + n, count));
            if (job.residual) {
                const float* residual = job.residual + (first_row + r) * job.residual_stride + n;
                sum = add(whole ? load(residual) : load_first(residual, count), sum);
            }
            float* out = job.out + (first_row + r) * job.out_stride + n;
            if (whole) store(out, sum);
            else store_first(out, sum, count);
        }
    }
}

template <class Weight, int ROWS, int PANELS>
void tile_of(const Product& job, int64_t first_row, int64_t panel) {
    using X = typename Weight::X;
    const int64_t cols = segment_cols(job.m);
    const int64_t x_stride = job.activated_bytes / static_cast<int64_t>(sizeof(X));
    const X* x = reinterpret_cast<const X*>(job.activated) + first_row * x_stride;
    const uint8_t* w = job.m.data + panel * job.panel_bytes;
    Tile<ROWS, PANELS> part[4];  // pending sums of 1, 2, 4 and 8 segments of the balanced tree
    int level = 0;
    int32_t s = 0;
    do {  // there is a first segment
        Tile<ROWS, PANELS> sum;
        multiply_segment<Weight>(sum, w + s * segment_bytes<Weight>(cols), job.panel_bytes, x + s * cols, x_stride, cols);
        for (level = 0; s >> level & 1; ++level) add_tile(sum, part[level]);
        part[level] = sum;
    } while (++s < job.m.segments);
    finish(job, part[level], first_row, panel);
}

// A tile of `rows` rows; rows <= ROWS.
template <class Weight, int ROWS, int PANELS>
KVASIR_INLINE void tile_of_rows(const Product& job, int64_t rows, int64_t first_row, int64_t panel) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of_rows<Weight, ROWS - 1, PANELS>(job, rows, first_row, panel);
    }
    tile_of<Weight, ROWS, PANELS>(job, first_row, panel);
}

// Processes the panels [panel, last) in whole groups of PANELS, in tiles of at most ROWS rows. Returns the first panel
// that is left.
template <class Weight, int ROWS, int PANELS>
int64_t groups_of(const Product& job, int64_t rows, int64_t panel, int64_t last) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (; panel + PANELS <= last; panel += PANELS) {
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            tile_of_rows<Weight, ROWS, PANELS>(job, count, first, panel);
        }
    }
    return panel;
}

template <class Weight>
void product(const Product& job, int64_t rows, int64_t panel, int64_t last) {
    // A single row is bound by memory bandwidth, which is highest for one stream.
    if (rows > 1) panel = groups_of<Weight, TILE_ROWS, TILE_PANELS>(job, rows, panel, last);
    groups_of<Weight, TILE_ROWS, 1>(job, rows, panel, last);
}

// Copies a segment's activations: `count` columns, padded with zeros to `padded`.
void copy_as_f32(float* to, const float* from, int64_t count, int64_t padded) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    std::memset(to + count, 0, static_cast<size_t>(padded - count) * sizeof(float));
}

void copy_as_bf16(uint16_t* to, const float* from, int64_t count, int64_t padded) {
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) store_bf16(to + k, load(from + k));
    if (k == padded) return;
    uint16_t rest[LANES] = {};
    if (k < count) store_bf16(rest, load_first(from + k, count - k));
    const int64_t last = padded - k < LANES ? padded - k : LANES;
    std::memcpy(to + k, rest, static_cast<size_t>(last) * sizeof(uint16_t));
    std::memset(to + k + last, 0, static_cast<size_t>(padded - k - last) * sizeof(uint16_t));
}

// One row of the matrix as float32 [cols].
template <class Weight>
void widen_row(const Matrix& m, float* out, int64_t row) {
    using Number = typename Weight::Number;
    constexpr int64_t GROUP = Weight::COLUMNS;
    const int64_t cols = m.cols / m.segments;
    const uint8_t* panel = m.data + row / PANEL * panel_bytes(m);
    const Number* lane = reinterpret_cast<const Number*>(panel) + row % PANEL * GROUP;
    for (int32_t s = 0; s < m.segments; ++s, lane += segment_cols(m) * PANEL, out += cols) {
        for (int64_t k = 0; k < cols; k += LANES) {
            const int64_t count = cols - k < LANES ? cols - k : LANES;
            Number numbers[LANES] = {};
            for (int64_t i = 0; i < count; ++i) {
                numbers[i] = lane[(k + i) / GROUP * GROUP * PANEL + (k + i) % GROUP];
            }
            if (count == LANES) store(out + k, Weight::widen(numbers));
            else store_first(out + k, Weight::widen(numbers), count);
        }
    }
}

void widen_fp8_row(const Matrix& m, float* out, int64_t row) {
    constexpr int64_t GROUP = WeightFP8::GROUP;
    const int64_t cols = m.cols / m.segments, lane = row % PANEL;
    const uint8_t* from = m.data + row / PANEL * panel_bytes(m);
    for (int32_t s = 0; s < m.segments; ++s, from += segment_bytes<WeightFP8>(segment_cols(m)), out += cols) {
        for (int64_t k = 0; k < cols; ++k) {
            const uint8_t* group = from + k / GROUP * segment_bytes<WeightFP8>(GROUP);
            const int64_t i = k % GROUP;
            uint8_t code[2 * PANEL] = {group[FP8_SCALES + i / 2 * 2 * PANEL + 2 * lane + i % 2]};
            float scale, number[LANES];
            std::memcpy(&scale, group + 4 * lane, sizeof scale);
            store(number, even_bf16(load_e4m3(code)));
            out[k] = number[0] * scale;
        }
    }
}

}  // namespace

void prepare_float(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    const int64_t bytes = activated_bytes(m), cols = m.cols / m.segments, padded = segment_cols(m);
    const bool narrow = m.activation == ACT_BF16;
    for (int64_t row = 0; row < rows; ++row, out += bytes, x += x_stride) {
        for (int64_t s = 0; s < m.segments; ++s) {
            if (narrow) copy_as_bf16(reinterpret_cast<uint16_t*>(out) + s * padded, x + s * cols, cols, padded);
            else copy_as_f32(reinterpret_cast<float*>(out) + s * padded, x + s * cols, cols, padded);
        }
    }
}

void linear_float(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const Product job = {m,          activated, activated_bytes(m), panel_bytes(m), out,
                         out_stride, bias,      residual,           residual_stride};
    switch (m.format) {
        case FORMAT_F32: return product<WeightF32>(job, rows, first_panel, last_panel);
        case FORMAT_F16: return product<WeightF16>(job, rows, first_panel, last_panel);
        case FORMAT_FP8:
            if (m.activation == ACT_BF16) return product<WeightFP8Pairs>(job, rows, first_panel, last_panel);
            return product<WeightFP8>(job, rows, first_panel, last_panel);
        default: break;
    }
    if (m.activation == ACT_BF16) return product<WeightPairs>(job, rows, first_panel, last_panel);
    product<WeightBF16>(job, rows, first_panel, last_panel);
}

void lookup_float(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i, out += out_stride) {
        switch (m.format) {
            case FORMAT_F32: widen_row<WeightF32>(m, out, ids[i]); break;
            case FORMAT_F16: widen_row<WeightF16>(m, out, ids[i]); break;
            case FORMAT_FP8: widen_fp8_row(m, out, ids[i]); break;
            default: widen_row<WeightBF16>(m, out, ids[i]); break;
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
