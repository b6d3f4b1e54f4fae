// Keys and values in the paged cache, and attention over them.
//
//     cache of a layer    [blocks][kv head][block size / 16 tiles of 16 tokens]; keys and values separately
//     tile of keys        bf16: [d / 2][16 tokens][2]     (pairs of dimensions, so that q k needs no sum across lanes)
//     tile of values      bf16: [16 / 2 tokens][d][2]     (pairs of tokens, so that p v needs no transposition)
#pragma once

#include <cstdint>

#include "piece.h"
#include "team.h"

namespace kvasir {

enum CacheFormat : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_F16 = 2, CACHE_INT8 = 3 };

constexpr int64_t TILE_TOKENS = 16;

struct CacheLayout {
    int32_t format;
    int32_t kv_heads;
    int32_t head_dim;    // of keys: 2 to 576, even
    int32_t block_size;  // a multiple of 16
    int32_t value_dim;   // 1 to 576; 0 for head_dim
    int32_t latent;      // whether a value is the beginning of its key, with the key's scale if it has one
};

// Bytes of one block of one layer's keys or values.
int64_t cache_block_bytes(const CacheLayout& layout, bool values);

struct StoreArgs {
    CacheLayout layout;
    uint8_t* k;  // the layer's block 0
    uint8_t* v;
    const float* k_rows;  // [rows, kv heads, d], row stride in floats
    const float* v_rows;  // [rows, kv heads, value dim]; if latent, the rows of the keys
    int64_t k_stride, v_stride;
    const int64_t* slots;  // per row: block * block size + place
    int64_t rows;
};

// Scores by relative position: tables with a column for each key position - query position, from -(reach + 16) to
// reach + 15; a position beyond the reach has the values of the reach. They may add to the scaled scores a number for
// each head and, to q k, q keys and k queries of the relative position (arXiv:2006.03654).
struct Relative {
    const float* bias;     // [heads][columns], or null
    const float* keys;     // [heads][d][columns], or null
    const float* queries;  // the same
    const float* k_rows;   // with `queries`: [rows, kv heads, d], the keys of the step, which are all that a row sees
    int64_t k_stride;      // in floats
    int64_t reach;

    int64_t columns() const { return 2 * (reach + TILE_TOKENS); }
};

struct AttentionArgs {
    CacheLayout layout;
    const uint8_t* k;
    const uint8_t* v;
    const float* q;  // [rows, heads, d]
    float* out;      // [rows, heads, value dim]
    int64_t q_stride, out_stride;
    int32_t heads;   // a multiple of kv heads
    int32_t window;  // keys that a row attends to, its own included; 0 for all; -n for those in its chunk of n tokens
    float scale;
    float softcap;              // 0 for none: scores become cap * tanh(score / cap)
    int32_t distance;  // of the keys before and after a row of an indivisible piece; 0 for all
    int32_t causal;    // whether a row attends to earlier keys only, also in an indivisible piece
    const float* sinks;         // an additional score per head, without a value, or null
    const float* alibi_slopes;  // per head: slope * (key position - query position) is added to the score, or null
    const Piece* pieces;
    int64_t num_pieces;
    int64_t group;      // index into the pieces' tables
    uint8_t* scratch;   // `attention_scratch` bytes for each thread, one after the other; free at the next barrier
    const Relative* relative;  // or null
};

int64_t attention_scratch(const CacheLayout& layout, int32_t heads);

}  // namespace kvasir
