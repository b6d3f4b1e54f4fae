// Products with integer formats (int_formats.h). Every output element is one chain of float multiply-adds over groups
// in ascending order, each group's dot an exact integer, so that no micro-kernel can be told from another:
//
//     groups of 32:   acc = fma(ws * xs, dot, acc), then for formats with minima acc = fma(wmin, xs * sum(x), acc)
//     super-blocks:   part = fma(scale, dot, part) over the 16 or 32 columns of each scale, from 0;
//                     acc = fma(d * xs, part, acc), then acc = fma(-(dmin * xs), the sum of min * sum(x), acc)
//
// Segments start at 0 each and are joined by a balanced tree, then bias, then residual.
#include "int_formats.h"
#include "linear.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// gcc keeps arrays of vectors in registers only where every loop over them is unrolled.
#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)
#define KVASIR_UNROLL _Pragma("GCC unroll 16")
#else
#define KVASIR_UNROLL
#endif

// The most rows of a tile on one panel and on two, and the number of rows from which two panels go together.
#if defined(KVASIR_AVX512)
constexpr int MOST_ROWS[2] = {8, 6}, PAIR_FROM = 9;
#elif defined(KVASIR_AVX2)
constexpr int MOST_ROWS[2] = {4, 0}, PAIR_FROM = 1 << 30;
#else
constexpr int MOST_ROWS[2] = {2, 0}, PAIR_FROM = 1 << 30;
#endif
constexpr int MAX_ROWS = 8;
constexpr int MAX_SEGMENTS = 8;
constexpr int64_t AHEAD = 4096;  // bytes that few rows prefetch ahead

// Into the second cache: two pairs of panels are too much for the first.
KVASIR_INLINE void prefetch(const uint8_t* from) { __builtin_prefetch(from, 0, 2); }

KVASIR_INLINE int32_t word(const void* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// ---- Unpacking ------------------------------------------------------------------------------------------------------

// Levels of two formats are unpacked times a power of two, so that their zero points become Q6_K's.
constexpr int lift_of(int format) { return format == FORMAT_Q3_K ? 3 : format == FORMAT_TERNARY ? 5 : 0; }

constexpr int max_level(int format) {
    if (int_table_of(format) != nullptr) return format == FORMAT_MXFP4 ? 28 : 255;
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

// Columns 4 C to 4 C + 3 of the chunk of 32 whose planes begin at `low` and `high`.
template <int FORMAT, int C>
KVASIR_INLINE u8x64 levels(const uint8_t* low, const uint8_t* high) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int per_low = 8 / l.low_bits, lift = lift_of(FORMAT);
    u8x64 v = field<l.low_bits, C % per_low * l.low_bits, lift>(load(low + 64 * (C / per_low)));
    if constexpr (int_table_of(FORMAT) != nullptr) v = lookup(int_table_of(FORMAT), v);
    if constexpr (l.high_bits > 0) {
        constexpr int per_high = 8 / l.high_bits;
        const u8x64 upper = load(high + 64 * (C / per_high));
        v = bit_or(v, field<l.high_bits, C % per_high * l.high_bits, l.low_bits + lift>(upper));
    }
    return v;
}

// The planes of one chunk of 32 columns, for each panel.
template <int P>
struct Chunk {
    const uint8_t* low[P];
    const uint8_t* high[P];
};

template <int FORMAT, int P>
KVASIR_INLINE Chunk<P> chunk_of(const uint8_t* const (&block)[P], int chunk) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    Chunk<P> planes;
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        planes.low[p] = block[p] + l.low + 64 * l.low_bits * chunk;
        planes.high[p] = block[p] + l.high + 64 * l.high_bits * chunk;
    }
    return planes;
}

// dots += columns 4 C to 4 C + 3 of the chunk for all rows, whose quantized values begin at q. Going through the rows
// inside a column keeps M * P sums on their way, which do not wait for each other.
template <int FORMAT, int C, int M, int P>
KVASIR_INLINE void add_word(i32x16 (&dots)[M][P], const Chunk<P>& chunk, const uint8_t* q, int64_t x_stride) {
    u8x64 w[P];
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) w[p] = levels<FORMAT, C>(chunk.low[p], chunk.high[p]);
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const int32_t x = word(q + m * x_stride + 4 * C);
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) dots[m][p] = dot<max_level(FORMAT)>(dots[m][p], w[p], x);
    }
}

// Half a chunk: columns 16 HALF to 16 HALF + 15.
template <int FORMAT, int HALF, int M, int P>
KVASIR_INLINE void add_half(i32x16 (&dots)[M][P], const Chunk<P>& chunk, const uint8_t* q, int64_t x_stride) {
    add_word<FORMAT, 4 * HALF>(dots, chunk, q, x_stride);
    add_word<FORMAT, 4 * HALF + 1>(dots, chunk, q, x_stride);
    add_word<FORMAT, 4 * HALF + 2>(dots, chunk, q, x_stride);
    add_word<FORMAT, 4 * HALF + 3>(dots, chunk, q, x_stride);
}

KVASIR_INLINE const uint16_t* halves(const uint8_t* from) { return reinterpret_cast<const uint16_t*>(from); }

// ---- Groups of 32 ---------------------------------------------------------------------------------------------------

template <int FORMAT>
KVASIR_INLINE f32x16 group_scale(const uint8_t* block, int chunk) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    const uint16_t* from = halves(block + l.scales) + LANES * chunk;
    return l.scale == SCALE_BF16 ? load_bf16(from) : load_f16(from);
}

// -zero times the sum of the group.
template <int FORMAT>
KVASIR_INLINE i32x16 group_start(const Group32& x) {
    constexpr int zero = int_layout_of(FORMAT).zero;
    if constexpr (zero == 0) return broadcast_i32(0);
    const i32x16 eight = broadcast_i32(x.start);
    return zero == 128 ? shift_left<4>(eight) : zero == 16 ? shift_left<1>(eight) : eight;
}

template <int FORMAT, int M, int P>
KVASIR_INLINE void add_groups(f32x16 (&acc)[M][P], const uint8_t* const (&block)[P], const uint8_t* x,
                              int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    for (int chunk = 0; chunk < 2; ++chunk, x += sizeof(Group32)) {
        i32x16 dots[M][P];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const i32x16 start = group_start<FORMAT>(*reinterpret_cast<const Group32*>(x + m * x_stride));
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) dots[m][p] = start;
        }
        const Chunk<P> planes = chunk_of<FORMAT>(block, chunk);
        add_half<FORMAT, 0>(dots, planes, x, x_stride);
        add_half<FORMAT, 1>(dots, planes, x, x_stride);
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) {
            const f32x16 scale = group_scale<FORMAT>(block[p], chunk);
            f32x16 minimum = scale;
            if constexpr (l.minimum) minimum = load_f16(halves(block[p] + l.minima) + LANES * chunk);
            KVASIR_UNROLL
            for (int m = 0; m < M; ++m) {
                const Group32& group = *reinterpret_cast<const Group32*>(x + m * x_stride);
                acc[m][p] = fma(mul(scale, broadcast(group.scale)), to_float(dots[m][p]), acc[m][p]);
                if constexpr (l.minimum) acc[m][p] = fma(minimum, broadcast(group.scaled_sum), acc[m][p]);
            }
        }
    }
}

// ---- Super-blocks of 256 --------------------------------------------------------------------------------------------

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

// -zero times the sum of the columns of scale `sub`, the zero lifted as the levels are.
template <int FORMAT>
KVASIR_INLINE i32x16 sub_start(const Group256& x, int sub) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    if constexpr (l.zero == 0) return broadcast_i32(0);
    if constexpr (l.sub == 16) return broadcast_i32(x.start[sub]);
    const i32x16 both = broadcast_i32(x.start[2 * sub] + x.start[2 * sub + 1]);
    return l.zero == 128 ? shift_left<2>(both) : both;
}

template <int FORMAT, int M, int P>
KVASIR_INLINE void start_dots(i32x16 (&dots)[M][P], int sub, const uint8_t* x, int64_t x_stride) {
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        const i32x16 start = sub_start<FORMAT>(*reinterpret_cast<const Group256*>(x + m * x_stride), sub);
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) dots[m][p] = start;
    }
}

// part = fma(scale, dot, part) for the columns of scale `sub`.
template <int FORMAT, int M, int P>
KVASIR_INLINE void add_dots(f32x16 (&part)[M][P], const i32x16 (&dots)[M][P], const uint8_t* const (&block)[P],
                            int sub) {
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        const f32x16 scale = sub_scale<FORMAT>(block[p], sub);
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) part[m][p] = fma(scale, to_float(dots[m][p]), part[m][p]);
    }
}

// acc = fma(-(dmin * xs), the sum of min * sum(x), acc): the sum is one exact integer.
template <int FORMAT, int M, int P>
KVASIR_INLINE void add_minima(f32x16 (&acc)[M][P], const uint8_t* const (&block)[P], const uint8_t* x,
                              int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int pairs = 128 / l.sub;
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        i32x16 minima[pairs];
        KVASIR_UNROLL
        for (int j = 0; j < pairs; ++j) minima[j] = minimum_pair<FORMAT>(block[p], j);
        const f32x16 dmin = sub(broadcast(0.0f), load_f16(halves(block[p] + l.dmin)));
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const Group256& group = *reinterpret_cast<const Group256*>(x + m * x_stride);
            const int16_t* sums = l.sub == 16 ? group.sum16 : group.sum32;
            i32x16 total = broadcast_i32(0);
            KVASIR_UNROLL
            for (int j = 0; j < pairs; ++j) total = dot_i16(total, minima[j], word(sums + 2 * j));
            acc[m][p] = fma(mul(dmin, broadcast(group.scale)), to_float(total), acc[m][p]);
        }
    }
}

template <int FORMAT, int M, int P>
KVASIR_INLINE void add_super_block(f32x16 (&acc)[M][P], const uint8_t* const (&block)[P], const uint8_t* x,
                                   int64_t x_stride) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    f32x16 part[M][P];
    KVASIR_UNROLL
    for (int m = 0; m < M; ++m) {
        KVASIR_UNROLL
        for (int p = 0; p < P; ++p) part[m][p] = broadcast(0.0f);
    }
    for (int chunk = 0; chunk < 8; ++chunk) {
        const Chunk<P> planes = chunk_of<FORMAT>(block, chunk);
        const uint8_t* q = x + 32 * chunk;
        i32x16 dots[M][P];
        if constexpr (l.sub == 32) {
            start_dots<FORMAT>(dots, chunk, x, x_stride);
            add_half<FORMAT, 0>(dots, planes, q, x_stride);
            add_half<FORMAT, 1>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, chunk);
        } else {
            start_dots<FORMAT>(dots, 2 * chunk, x, x_stride);
            add_half<FORMAT, 0>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, 2 * chunk);
            start_dots<FORMAT>(dots, 2 * chunk + 1, x, x_stride);
            add_half<FORMAT, 1>(dots, planes, q, x_stride);
            add_dots<FORMAT>(part, dots, block, 2 * chunk + 1);
        }
    }
    KVASIR_UNROLL
    for (int p = 0; p < P; ++p) {
        f32x16 d = load_f16(halves(block[p] + l.d));
        if constexpr (lift_of(FORMAT) > 0) d = mul(d, broadcast(1.0f / (1 << lift_of(FORMAT))));  // exact
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            const Group256& group = *reinterpret_cast<const Group256*>(x + m * x_stride);
            acc[m][p] = fma(mul(d, broadcast(group.scale)), part[m][p], acc[m][p]);
        }
    }
    if constexpr (l.minimum) add_minima<FORMAT>(acc, block, x, x_stride);
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

struct Sums {
    f32x16 of[MAX_SEGMENTS][MAX_ROWS][2];  // segment, row, panel
};

struct Source {
    const uint8_t* panel;
    const uint8_t* x;
    int64_t panel_bytes, x_stride, segments, blocks;
    int64_t ahead;  // bytes to prefetch ahead, 0 for nothing
};

// The sums of each segment, for M rows and P panels.
template <int FORMAT, int M, int P>
__attribute__((noinline)) void add_tile(Sums& sums, const Source& from) {
    constexpr IntLayout l = int_layout_of(FORMAT);
    constexpr int64_t x_block = l.cols == 64 ? 2 * sizeof(Group32) : sizeof(Group256);
    const int64_t panel_bytes = from.panel_bytes, x_stride = from.x_stride, ahead = from.ahead;
    const uint8_t* w = from.panel;
    const uint8_t* x = from.x;
    for (int64_t s = 0; s < from.segments; ++s) {
        f32x16 acc[M][P];
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) acc[m][p] = broadcast(0.0f);
        }
        for (int64_t b = 0; b < from.blocks; ++b, w += l.bytes, x += x_block) {
            if (ahead != 0) {
                for (int p = 0; p < P; ++p) {
                    for (int i = 0; i < l.bytes; i += 64) prefetch(w + ahead + p * panel_bytes + i);
                }
            }
            const uint8_t* block[P];
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) block[p] = w + p * panel_bytes;
            if constexpr (l.cols == 64) add_groups<FORMAT>(acc, block, x, x_stride);
            else add_super_block<FORMAT>(acc, block, x, x_stride);
        }
        KVASIR_UNROLL
        for (int m = 0; m < M; ++m) {
            KVASIR_UNROLL
            for (int p = 0; p < P; ++p) sums.of[s][m][p] = acc[m][p];
        }
    }
}

using Tile = void (*)(Sums&, const Source&);

// By panels of a tile less one, and by rows less one.
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

Tile tile_of(int32_t format, int64_t rows, int64_t panels) {
#define KVASIR_TILE(name) \
    case FORMAT_##name: return TILES<FORMAT_##name>[panels - 1][rows - 1];
    switch (format) {
        KVASIR_TILE(Q4_0)
        KVASIR_TILE(Q4_1)
        KVASIR_TILE(Q5_0)
        KVASIR_TILE(Q5_1)
        KVASIR_TILE(Q8_0)
        KVASIR_TILE(IQ4_NL)
        KVASIR_TILE(MXFP4)
        KVASIR_TILE(Q2_K)
        KVASIR_TILE(Q3_K)
        KVASIR_TILE(Q4_K)
        KVASIR_TILE(Q5_K)
        KVASIR_TILE(Q6_K)
        KVASIR_TILE(IQ4_XS)
        KVASIR_TILE(TERNARY)
        default: return nullptr;
    }
#undef KVASIR_TILE
}

struct Target {
    float* out;
    const float* bias;
    const float* residual;
    int64_t out_stride, residual_stride;
};

// out = residual + (bias + the segments' sums joined by neighbours) for `rows` rows and the `cols` columns of a panel.
void finish(const Target& to, Sums& sums, int64_t segments, int64_t rows, int panel, int64_t cols) {
    const bool whole = cols == LANES;
    for (int64_t m = 0; m < rows; ++m) {
        for (int64_t width = 1; width < segments; width *= 2) {
            for (int64_t s = 0; s < segments; s += 2 * width) {
                sums.of[s][m][panel] = add(sums.of[s][m][panel], sums.of[s + width][m][panel]);
            }
        }
        f32x16 sum = sums.of[0][m][panel];
        if (to.bias) sum = add(sum, whole ? load(to.bias) : load_first(to.bias, cols));
        if (to.residual) {
            const float* residual = to.residual + m * to.residual_stride;
            sum = add(whole ? load(residual) : load_first(residual, cols), sum);
        }
        float* out = to.out + m * to.out_stride;
        if (whole) store(out, sum);
        else store_first(out, sum, cols);
    }
}

// ---- Activations ----------------------------------------------------------------------------------------------------

// x as int8 times the scale that is returned: NaN where a value is not finite, 0 where all are (nearly) 0.
template <int COUNT>
KVASIR_INLINE float quantize(int8_t* q, const float* x) {
    f32x16 largest = broadcast(0.0f), poison = broadcast(0.0f);
    for (int i = 0; i < COUNT; i += LANES) {
        const f32x16 v = load(x + i);
        largest = max(abs(v), largest);
        poison = add(poison, mul(v, broadcast(0.0f)));
    }
    const float most = greatest(largest), scale = most / 127.0f;
    const bool empty = scale < 1.17549435e-38f;  // the least that is not flushed to 0
    const f32x16 factor = broadcast(empty ? 0.0f : 127.0f / most);
    for (int i = 0; i < COUNT; i += LANES) {
        const f32x16 level = mul(load(x + i), factor);
        store_i8(q + i, to_int(max(min(level, broadcast(127.0f)), broadcast(-127.0f))));
    }
    return any(unordered(poison, poison)) ? __builtin_nanf("") : empty ? 0.0f : scale;
}

template <int COUNT>
KVASIR_INLINE int32_t sum_of(const int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < COUNT; ++i) sum += q[i];
    return sum;
}

void prepare_group(Group32& group, const float* x) {
    group.scale = quantize<32>(group.q, x);
    const int32_t sum = sum_of<32>(group.q);
    group.start = -8 * sum;
    group.scaled_sum = group.scale * static_cast<float>(sum);
}

void prepare_group(Group256& group, const float* x) {
    group.scale = quantize<256>(group.q, x);
    for (int i = 0; i < 16; ++i) {
        const int32_t sum = sum_of<16>(group.q + 16 * i);
        group.start[i] = -32 * sum;
        group.sum16[i] = static_cast<int16_t>(sum);
    }
    for (int i = 0; i < 8; ++i) group.sum32[i] = static_cast<int16_t>(group.sum16[2 * i] + group.sum16[2 * i + 1]);
    for (int32_t& word : group.reserved) word = 0;
}

// `cols` columns of one segment as `count` groups of SIZE, zeros behind them.
template <typename Group, int SIZE>
void prepare_segment(Group* groups, int64_t count, const float* x, int64_t cols) {
    for (int64_t g = 0; g < count; ++g, x += SIZE, cols -= SIZE) {
        if (cols >= SIZE) {
            prepare_group(groups[g], x);
        } else {
            float padded[SIZE] = {};
            for (int64_t i = 0; i < cols; ++i) padded[i] = x[i];
            prepare_group(groups[g], padded);
        }
    }
}

// ---- Lookup ---------------------------------------------------------------------------------------------------------

// The level of row r, column k of a block.
int32_t level_at(const IntLayout& l, const uint8_t* block, const uint8_t* table, int64_t r, int64_t k) {
    const auto bits = [&](int32_t plane, int32_t width) {
        const int64_t per = 8 / width, word = k / 4;
        return block[plane + 64 * (word / per) + 4 * r + k % 4] >> (word % per * width) & ((1 << width) - 1);
    };
    int32_t level = bits(l.low, l.low_bits);
    if (table != nullptr) level = table[level];
    if (l.high_bits > 0) level |= bits(l.high, l.high_bits) << l.low_bits;
    return level - l.zero;
}

float lane_of(f32x16 v, int64_t lane) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[lane];
}

// Row r of a block as float32: the scale and the minimum of `l.sub` columns at a time.
void expand_block(const IntLayout& l, const uint8_t* table, const uint8_t* block, int64_t r, float* out, int64_t cols) {
    for (int64_t begin = 0; begin < cols; begin += l.sub) {
        const int64_t s = begin / l.sub, pair = 2 * LANES * (s / 2) + 2 * r + s % 2;
        const uint8_t* byte = block + l.scales + LANES * s + r;
        float scale, minimum = 0.0f;
        if (l.cols == 64) {
            const uint16_t* scales = halves(block + l.scales) + LANES * s;
            scale = lane_of(l.scale == SCALE_BF16 ? load_bf16(scales) : load_f16(scales), r);
            if (l.minimum) minimum = lane_of(load_f16(halves(block + l.minima) + LANES * s), r);
        } else {
            const int32_t factor = l.scale == SCALE_ONE    ? 1
                                   : l.scale == SCALE_U8   ? *byte
                                   : l.scale == SCALE_I8   ? static_cast<int8_t>(*byte)
                                                           : block[l.scales + pair] & 15;
            scale = lane_of(load_f16(halves(block + l.d)), r) * static_cast<float>(factor);
            if (l.minimum) {
                const int32_t steps = l.scale == SCALE_NIBBLES ? block[l.scales + pair] >> 4 : block[l.minima + pair];
                minimum = -(lane_of(load_f16(halves(block + l.dmin)), r) * static_cast<float>(steps));
            }
        }
        for (int64_t k = begin; k < begin + l.sub && k < cols; ++k) {
            const float value = static_cast<float>(level_at(l, block, table, r, k)) * scale;
            out[k] = l.minimum ? value + minimum : value;
        }
    }
}

}  // namespace

void prepare_int(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    const int64_t cols = m.cols / m.segments, blocks = int_blocks(m), bytes = int_activated_bytes(m);
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* to = out + r * bytes;
        for (int64_t s = 0; s < m.segments; ++s) {
            const float* from = x + r * x_stride + s * cols;
            if (group_of(m.format) == 32) {
                prepare_segment<Group32, 32>(reinterpret_cast<Group32*>(to) + 2 * s * blocks, 2 * blocks, from, cols);
            } else {
                prepare_segment<Group256, 256>(reinterpret_cast<Group256*>(to) + s * blocks, blocks, from, cols);
            }
        }
    }
}

void linear_int(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const int64_t bytes = int_panel_bytes(m), stride = int_activated_bytes(m), blocks = int_blocks(m);
    Sums sums;
    for (int64_t panel = first_panel, width; panel < last_panel; panel += width) {
        width = rows >= PAIR_FROM && last_panel - panel >= 2 ? 2 : 1;
        const int64_t most = MOST_ROWS[width - 1], tiles = (rows + most - 1) / most;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin;
            // Few rows stay a little ahead in the stream of panels. With more rows the first tile fetches the next
            // panels while it computes with these, and the other tiles find them in the cache.
            const int64_t step = rows < PAIR_FROM ? AHEAD : panel + width < last_panel ? width * bytes : 0;
            const Source source = {m.data + panel * bytes, activated + begin * stride, bytes,
                                   stride, m.segments, blocks, t == 0 ? step : 0};
            tile_of(m.format, count, width)(sums, source);
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

void lookup_int(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    const IntLayout& l = int_layout_of(m.format);
    const uint8_t* table = int_table_of(m.format);
    const int64_t bytes = int_panel_bytes(m), blocks = int_blocks(m), cols = m.cols / m.segments;
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t* block = m.data + ids[i] / PANEL * bytes;
        for (int64_t s = 0; s < m.segments; ++s) {
            float* to = out + i * out_stride + s * cols;
            for (int64_t b = 0; b < blocks; ++b, block += l.bytes) {
                const int64_t left = cols - b * l.cols;
                expand_block(l, table, block, ids[i] % PANEL, to + b * l.cols, left < l.cols ? left : l.cols);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
