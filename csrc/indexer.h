// Sparse attention by an indexer (DeepSeek-V3.2, arXiv:2512.02556): each token attends to the `top_k` earlier tokens with
// the greatest scores, itself included; to all of them while there are no more.
//
//     score of a key = sum over heads of weight * relu(q k * scale)        equal scores: the earlier token
//
// A layer keeps the indexer's keys, one per token, in blocks of their own: float32 [block size][dim].
#pragma once

#include <cstdint>

#include "attention.h"
#include "piece.h"
#include "team.h"

namespace kvasir {

constexpr int64_t MAX_INDEX_DIM = 256, MAX_INDEX_HEADS = 1024, MAX_TOP_K = 1 << 16;

struct IndexArgs {
    int32_t heads, dim, top_k;
    int32_t block_size, group;  // tokens, a multiple of 16, and the index of the block table
    float scale;
    float* blocks;         // block 0
    const float* q;        // [tokens, heads, dim]
    const float* weights;  // [tokens, heads]
    const float* k;        // [tokens, dim], stored before any token is scored
    int32_t* out;          // [tokens, top_k] positions, ascending, then -1
    const Piece* pieces;
    int64_t num_pieces;
    uint8_t* scratch;  // `index_scratch(max_tokens)` bytes for each thread, one after the other
    int64_t max_tokens;  // of a sequence
};

// Attention of each row to the positions selected for it: of a row with no more than top_k, to all, with the bits of
// attention without a selection. attention: latent, without a window, sinks or relative positions.
struct SelectedArgs {
    AttentionArgs attention;  // scratch: `selected_scratch` bytes for each thread
    const int32_t* selected;  // [tokens, top_k], as IndexArgs.out
    int64_t top_k;
};

inline int64_t index_scratch(int64_t max_tokens) { return (max_tokens + 63) / 16 * 16 * 4; }
int64_t selected_scratch(const CacheLayout& layout, int32_t heads, int64_t top_k);

}  // namespace kvasir
