// One step of the walk: the rows of an item attend to 64 keys in up to four tiles. Scores, weights, weighted values.
//
// Rows share the loads. Keys that a row does not attend to are masked: their weight becomes 0 by selection, and their
// values are never multiplied into that row, since they may be NaN.
#pragma once

#include "attention_formats.h"
#include "simd_math.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t TILES = STEP_TOKENS / TILE_TOKENS;

// The rows and vectors that a kernel keeps in registers; they affect only the speed.
#if defined(KVASIR_AVX512)
constexpr int MOST_ROWS = 8, MOST_SUMS = 16;
#elif defined(KVASIR_AVX2)
constexpr int MOST_ROWS = 4, MOST_SUMS = 4;
#else
constexpr int MOST_ROWS = 1, MOST_SUMS = 1;
#endif
constexpr int vectors_for(int rows) { return MOST_SUMS / rows < 8 ? MOST_SUMS / rows : 8; }

#if defined(KVASIR_AVX512) || defined(KVASIR_AVX2)
#define KVASIR_UNROLL _Pragma("GCC unroll 16")
#else
#define KVASIR_UNROLL  // plain C++ gains nothing from unrolling, and would only grow
#endif

KVASIR_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
KVASIR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KVASIR_INLINE f32x16 lowest() { return broadcast(-__builtin_inff()); }

template <typename T>
KVASIR_INLINE T word_at(const uint8_t* from) {
    T word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

#if !defined(KVASIR_AVX512)
// Each by a load of its own: gcc would load both into an integer register, to part them there.
template <>
KVASIR_INLINE PairFactor word_at(const uint8_t* from) {
    return {word_at<float>(from), word_at<float>(from + sizeof(float))};
}
#endif

KVASIR_INLINE void prefetch(const uint8_t* from) { __builtin_prefetch(from, 0, 2); }

// e^a for a <= 0, to about one unit in the last place; 0 below -87.3, NaN for NaN. Like exp(), but n results from one
// multiply-add: a number this large has no room for a fraction, and its last bits are the exponent of 2^n (none for
// n = -127, which makes the factor 0).
KVASIR_INLINE f32x16 exp_down(f32x16 a) {
    const f32x16 large = broadcast(12582912.0f + 127.0f);
    const f32x16 x = max(broadcast(-88.0f), a);
    const f32x16 shifted = fma(x, broadcast(1.44269504088896341f), large), n = sub(shifted, large);
    const f32x16 r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    f32x16 p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), broadcast(1.0f));
    return mul(p, bits_to_float(shift_left<23>(float_to_bits(shifted))));
}

// --- an item, and its place in the cache ----------------------------------------------------------------------------

// Queries [query, query + queries) of a piece, each with the heads [head, head + heads) that share a KV head.
struct Item {
    const Piece* piece;
    int64_t kv_head, head, heads, query, queries;
    int64_t low, high;   // the keys that some of its rows attend to: [low, high)
    int64_t begin, end;  // those of them that this thread walks

    int64_t rows() const { return queries * heads; }
    int64_t position(int64_t row) const { return piece->start + query + row / heads; }
};

// The keys that one row attends to: [first, last).
KVASIR_INLINE int64_t first_seen(const AttentionArgs& args, int64_t position) {
    if (args.distance > 0) return larger(0, position - args.distance);
    return first_in_window(position, args.window);
}
KVASIR_INLINE int64_t last_seen(const AttentionArgs& args, const Piece& piece, int64_t position) {
    if (piece.causal() || args.causal) return position + 1;
    const int64_t end = piece.start + piece.count;
    return args.distance > 0 ? lesser(end, position + args.distance + 1) : end;
}

// The tiles of a step that some row of the item attends to: [first, last) of its four. The other entries repeat the
// address of one of these.
struct Step {
    int64_t begin;  // the position of its first key
    int64_t first, last;
    const uint8_t* keys[TILES];
    const uint8_t* values[TILES];

    KVASIR_INLINE void find(const AttentionArgs& args, const Item& item, int64_t at) {
        const CacheLayout& layout = args.layout;
        begin = at;
        first = larger(0, (item.low - at) / TILE_TOKENS);
        last = lesser(TILES, (item.high - at + TILE_TOKENS - 1) / TILE_TOKENS);
        const int32_t* table = item.piece->tables[args.group];
        const int32_t per_block = layout.block_size / static_cast<int32_t>(TILE_TOKENS);
        for (int64_t i = 0; i < TILES; ++i) {
            const int64_t place = i < first ? first : i < last ? i : last - 1;
            const int32_t tile = static_cast<int32_t>(at / TILE_TOKENS + place);
            const int64_t block = table[tile / per_block];
            const int64_t head = block * layout.kv_heads + item.kv_head;
            const int64_t in_block = tile % per_block;
            keys[i] = args.k + head * head_bytes(layout, false) + in_block * tile_bytes(layout, false);
            values[i] = args.v + head * head_bytes(layout, true) + in_block * tile_bytes(layout, true);
        }
    }
};

// --- the kernels ----------------------------------------------------------------------------------------------------

template <int N>
struct Number {
    static constexpr int value = N;
};

// Calls body(Number<R>, row) for runs of as many rows as the registers hold.
template <typename Body>
KVASIR_INLINE void in_runs(int64_t rows, Body body) {
    int64_t row = 0;
    if constexpr (MOST_ROWS >= 8) {
        for (; row + 8 <= rows; row += 8) body(Number<8>{}, row);
    }
    if constexpr (MOST_ROWS >= 4) {
        for (; row + 4 <= rows; row += 4) body(Number<4>{}, row);
        for (; row + 2 <= rows; row += 2) body(Number<2>{}, row);
    }
    for (; row < rows; ++row) body(Number<1>{}, row);
}

// Scores of R rows over V tiles from `tile` on. Lanes are keys; each adds its products in ascending order of dimension.
// Meanwhile the next step's keys at the same offsets are fetched, into the second cache: the first is full.
template <typename F, int R, int V>
void score_tiles(AttentionState& state, const Step& step, const Step& next, int64_t row, int64_t tile,
                 const CacheLayout& layout) {
    typename F::Sum sum[R][V];
    const uint8_t *keys[V], *ahead[V];
    KVASIR_UNROLL
    for (int v = 0; v < V; ++v) {
        keys[v] = step.keys[tile + v];
        ahead[v] = next.keys[tile + v];
        KVASIR_UNROLL
        for (int r = 0; r < R; ++r) sum[r][v] = F::start(state, row + r);
    }
    const uint8_t* query = state.query + row * QUERY_BYTES;
    const int64_t steps = (layout.head_dim + F::DIMS - 1) / F::DIMS;
    for (int64_t i = 0; i < steps; ++i) {
        typename F::Key key[V];
        KVASIR_UNROLL
        for (int v = 0; v < V; ++v) {
            key[v] = F::load_key(keys[v] + i * F::KEY_BYTES);
            prefetch(ahead[v] + i * F::KEY_BYTES);
        }
        KVASIR_UNROLL
        for (int r = 0; r < R; ++r) {
            const auto word = word_at<typename F::Query>(query + r * QUERY_BYTES + i * sizeof(typename F::Query));
            KVASIR_UNROLL
            for (int v = 0; v < V; ++v) sum[r][v] = F::dot(sum[r][v], key[v], word);
        }
    }
    const int64_t scales = tile_numbers(layout, false);
    KVASIR_UNROLL
    for (int r = 0; r < R; ++r) {
        float* out = state.score + (row + r) * STEP_TOKENS + tile * TILE_TOKENS;
        KVASIR_UNROLL
        for (int v = 0; v < V; ++v) store(out + v * LANES, F::score(sum[r][v], state, row + r, keys[v] + scales));
    }
}

template <typename F>
void score(AttentionState& state, const Step& step, const Step& next, int64_t rows, const CacheLayout& layout) {
    in_runs(rows, [&](auto number, int64_t row) {
        constexpr int R = decltype(number)::value, V = vectors_for(R) < 4 ? vectors_for(R) : 4;
        int64_t tile = step.first;
        for (; tile + V <= step.last; tile += V) score_tiles<F, R, V>(state, step, next, row, tile, layout);
        for (; tile < step.last; ++tile) score_tiles<F, R, 1>(state, step, next, row, tile, layout);
    });
}

// The column of `relative` for the first of 16 keys from `key` on.
KVASIR_INLINE int64_t column_of(const Relative& relative, int64_t key, int64_t position) {
    const int64_t beyond = relative.reach + TILE_TOKENS;
    return lesser(relative.reach, larger(-beyond, key - position)) + beyond;
}

// The step's keys, float32 [d][64 tokens], from the rows that the step computed; zeros where there are none.
void turn_keys(const AttentionArgs& args, const Item& item, const Step& step, float* to) {
    const int64_t dim = args.layout.head_dim;
    const Piece& piece = *item.piece;
    for (int64_t i = 0; i < STEP_TOKENS; ++i) {
        const int64_t token = step.begin + i - piece.start;
        const bool exists = token >= 0 && token < piece.count;
        const float* from = args.relative->k_rows + (exists ? piece.first + token : 0) * args.relative->k_stride;
        for (int64_t d = 0; d < dim; ++d) to[d * STEP_TOKENS + i] = exists ? from[item.kv_head * dim + d] : 0.0f;
    }
}

// Adds to the dot products of all rows those with the tables' keys, and those of the step's keys with the tables'
// queries, each in ascending order of dimension: q k + (q keys + k queries).
void add_positions(const AttentionArgs& args, const Item& item, AttentionState& state, const Step& step) {
    const Relative& relative = *args.relative;
    const int64_t dim = args.layout.head_dim, columns = relative.columns(), rows = item.rows();
    float keys[MAX_HEAD_DIM * STEP_TOKENS];
    if (relative.queries) turn_keys(args, item, step, keys);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = item.head + row % item.heads, token = item.piece->first + item.query + row / item.heads;
        const float* query = args.q + token * args.q_stride + head * dim;
        int64_t column[TILES];
        f32x16 sum[TILES], other[TILES];
        KVASIR_UNROLL
        for (int64_t i = 0; i < TILES; ++i) {
            column[i] = head * dim * columns + column_of(relative, step.begin + i * LANES, item.position(row));
            sum[i] = other[i] = broadcast(0.0f);
        }
        for (int64_t d = 0; relative.keys && d < dim; ++d) {
            const f32x16 q = broadcast(query[d]);
            KVASIR_UNROLL
            for (int64_t i = 0; i < TILES; ++i) {
                sum[i] = fma(q, load(relative.keys + d * columns + column[i]), sum[i]);
            }
        }
        for (int64_t d = 0; relative.queries && d < dim; ++d) {
            KVASIR_UNROLL
            for (int64_t i = 0; i < TILES; ++i) {
                const f32x16 k = load(keys + d * STEP_TOKENS + i * LANES);
                other[i] = fma(k, load(relative.queries + d * columns + column[i]), other[i]);
            }
        }
        float* scores = state.score + row * STEP_TOKENS;
        KVASIR_UNROLL
        for (int64_t i = 0; i < TILES; ++i) {
            store(scores + i * LANES, add(load(scores + i * LANES), add(sum[i], other[i])));
        }
    }
}

// Turns dot products into scores, -inf for keys that the row does not attend to, and returns their maximum.
float finish_scores(const AttentionArgs& args, const Item& item, AttentionState& state, const Step& step, int64_t row) {
    static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float* scores = state.score + row * STEP_TOKENS;
    const int64_t head = item.head + row % item.heads;
    const int64_t first = state.first[row] - step.begin, last = state.last[row] - step.begin;
    const bool whole = first <= 0 && last >= STEP_TOKENS;
    const f32x16 scale = broadcast(args.scale);
    f32x16 top = lowest();
    KVASIR_UNROLL
    for (int64_t i = 0; i < STEP_TOKENS; i += LANES) {
        f32x16 x = mul(load(scores + i), scale);
        if (args.softcap > 0.0f) x = mul(tanh(div(x, broadcast(args.softcap))), broadcast(args.softcap));
        if (args.alibi_slopes) {
            const int32_t away = static_cast<int32_t>(step.begin + i - item.position(row));
            x = fma(to_float(add(load(lanes), broadcast_i32(away))), broadcast(args.alibi_slopes[head]), x);
        }
        if (args.relative && args.relative->bias) {
            const int64_t column = column_of(*args.relative, step.begin + i, item.position(row));
            x = add(x, load(args.relative->bias + head * args.relative->columns() + column));
        }
        if (!whole) {
            x = select(first_lanes(larger(0, lesser(LANES, last - i))), x, lowest());
            x = select(first_lanes(larger(0, lesser(LANES, first - i))), lowest(), x);
        }
        store(scores + i, x);
        top = max(top, x);
    }
    return greatest(top);
}

// The weights e^(score - top), their sum, and the rescaling of the chunk's results so far. For a row that attends to
// nothing, or only to scores of -inf, top counts as 0 and the weights are 0.
template <typename F>
void weigh(const AttentionArgs& args, const Item& item, AttentionState& state, const Step& step) {
    const int64_t rows = item.rows(), width = mixed_dim(args.layout), scales = tile_numbers(args.layout, true);
    float tops[ATTENTION_ROWS];
    store(tops, lowest());
    if (args.relative && (args.relative->keys || args.relative->queries)) add_positions(args, item, state, step);
    for (int64_t row = 0; row < rows; ++row) tops[row] = finish_scores(args, item, state, step, row);
    const f32x16 before = load(state.top), top = max(load(tops), before);  // a NaN leaves `before`
    const f32x16 base = select(less(lowest(), top), top, broadcast(0.0f));
    store(state.top, top);
    store(state.factor, exp_down(sub(before, base)));
    store(tops, base);
    for (int64_t row = 0; row < rows; ++row) {
        const f32x16 row_top = broadcast(tops[row]), factor = broadcast(state.factor[row]);
        f32x16 weight[TILES];
        KVASIR_UNROLL
        for (int64_t i = 0; i < TILES; ++i) {
            weight[i] = exp_down(sub(load(state.score + row * STEP_TOKENS + i * LANES), row_top));
            uint8_t* to = state.weight + row * WEIGHT_BYTES + i * (TILE_TOKENS / F::TOKENS * sizeof(typename F::Weight));
            F::store_weights(to, weight[i], step.values[i] + scales);
        }
        float* sum = state.sum + row * LANES;
        const f32x16 added = add(add(weight[0], weight[1]), add(weight[2], weight[3]));
        store(sum, fma(load(sum), factor, added));
        if (state.factor[row] == 1.0f) continue;
        float* mixed = state.mixed + row * MAX_HEAD_DIM;
        for (int64_t i = 0; i < width; i += LANES) store(mixed + i, mul(load(mixed + i), factor));
    }
}

// Adds the weighted values of the steps [from, to) of TOKENS keys to V vectors of R rows, which all attend to all of
// them. Meanwhile the next step's values at the same offsets are fetched.
template <typename F, int R, int V>
void mix_vectors(AttentionState& state, const Step& step, const Step& next, int64_t row, int64_t from, int64_t to,
                 int64_t column, int64_t width) {
    constexpr int64_t PER_TILE = TILE_TOKENS / F::TOKENS, WORD = sizeof(typename F::Weight);
    f32x16 sum[R][V];
    float* mixed = state.mixed + row * MAX_HEAD_DIM + column;
    KVASIR_UNROLL
    for (int r = 0; r < R; ++r) {
        KVASIR_UNROLL
        for (int v = 0; v < V; ++v) sum[r][v] = load(mixed + r * MAX_HEAD_DIM + v * LANES);
    }
    const int64_t line = width / LANES * F::VALUE_BYTES, start = column / LANES * F::VALUE_BYTES;
    for (int64_t tile = from / PER_TILE; tile * PER_TILE < to; ++tile) {
        const int64_t first = larger(0, from - tile * PER_TILE), last = lesser(PER_TILE, to - tile * PER_TILE);
        const uint8_t* values = step.values[tile] + start;
        const uint8_t* ahead = next.values[tile] + start;
        const uint8_t* weights = state.weight + row * WEIGHT_BYTES + tile * PER_TILE * WORD;
        for (int64_t i = first; i < last; ++i) {
            typename F::Value value[V];
            KVASIR_UNROLL
            for (int v = 0; v < V; ++v) value[v] = F::load_value(values + i * line + v * F::VALUE_BYTES);
            KVASIR_UNROLL
            for (int64_t byte = 0; byte < V * F::VALUE_BYTES; byte += 64) prefetch(ahead + i * line + byte);
            KVASIR_UNROLL
            for (int r = 0; r < R; ++r) {
                const auto weight = word_at<typename F::Weight>(weights + r * WEIGHT_BYTES + i * WORD);
                KVASIR_UNROLL
                for (int v = 0; v < V; ++v) sum[r][v] = F::mix(sum[r][v], value[v], weight);
            }
        }
    }
    KVASIR_UNROLL
    for (int r = 0; r < R; ++r) {
        KVASIR_UNROLL
        for (int v = 0; v < V; ++v) store(mixed + r * MAX_HEAD_DIM + v * LANES, sum[r][v]);
    }
}

// All columns from `column` on, V vectors at a time, then half as many.
template <typename F, int R, int V>
KVASIR_INLINE void mix_columns(AttentionState& state, const Step& step, const Step& next, int64_t row, int64_t from,
                               int64_t to, int64_t column, int64_t width) {
    for (; column + V * LANES <= width; column += V * LANES) {
        mix_vectors<F, R, V>(state, step, next, row, from, to, column, width);
    }
    if constexpr (V > 1) mix_columns<F, R, V / 2>(state, step, next, row, from, to, column, width);
}

template <typename F, int R>
void mix_rows(AttentionState& state, const Step& step, const Step& next, int64_t row, int64_t from, int64_t to,
              int64_t width) {
    mix_columns<F, R, vectors_for(R)>(state, step, next, row, from, to, 0, width);
}

// One token of a pair into one row.
template <typename F>
void mix_half(AttentionState& state, const Step& step, int64_t row, int64_t token, int64_t width) {
    const int64_t pair = token % TILE_TOKENS / 2;
    const uint8_t* values = step.values[token / TILE_TOKENS] + pair * (width / LANES * F::VALUE_BYTES);
    const int64_t place = token / 2 * static_cast<int64_t>(sizeof(typename F::Weight));
    const auto weight = word_at<typename F::Weight>(state.weight + row * WEIGHT_BYTES + place);
    float* mixed = state.mixed + row * MAX_HEAD_DIM;
    for (int64_t i = 0; i < width; i += LANES) {
        const typename F::Value value = F::load_value(values + i / LANES * F::VALUE_BYTES);
        store(mixed + i, F::mix_half(load(mixed + i), value, weight, token % 2 != 0));
    }
}

// The values of the keys [from, to) of the step into one row: whole pairs, and halves at the ends.
template <typename F>
void mix_row(AttentionState& state, const Step& step, const Step& next, int64_t row, int64_t from, int64_t to,
             int64_t width) {
    if (from >= to) return;
    if (from % F::TOKENS) mix_half<F>(state, step, row, from++, width);
    if (from < to / F::TOKENS * F::TOKENS) {
        mix_rows<F, 1>(state, step, next, row, from / F::TOKENS, to / F::TOKENS, width);
    }
    if (to % F::TOKENS && from < to) mix_half<F>(state, step, row, to - 1, width);
}

// The values into all rows: together where all rows attend to them, and row by row at the edges.
template <typename F>
void mix(const AttentionArgs& args, AttentionState& state, const Step& step, const Step& next, int64_t rows) {
    const int64_t width = mixed_dim(args.layout);
    in_runs(rows, [&](auto number, int64_t row) {
        constexpr int R = decltype(number)::value;
        int64_t from[R], to[R], common_from = 0, common_to = STEP_TOKENS;
        for (int r = 0; r < R; ++r) {
            from[r] = larger(0, state.first[row + r] - step.begin);
            to[r] = lesser(STEP_TOKENS, state.last[row + r] - step.begin);
            common_from = larger(common_from, (from[r] + F::TOKENS - 1) / F::TOKENS * F::TOKENS);
            common_to = lesser(common_to, to[r] / F::TOKENS * F::TOKENS);
        }
        if (common_from < common_to) {
            for (int r = 0; r < R; ++r) mix_row<F>(state, step, next, row + r, from[r], common_from, width);
            mix_rows<F, R>(state, step, next, row, common_from / F::TOKENS, common_to / F::TOKENS, width);
            for (int r = 0; r < R; ++r) mix_row<F>(state, step, next, row + r, common_to, to[r], width);
        } else {
            for (int r = 0; r < R; ++r) mix_row<F>(state, step, next, row + r, from[r], to[r], width);
        }
    });
}

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
