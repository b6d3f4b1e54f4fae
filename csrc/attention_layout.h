// The memory layout of a layer's cache, and a thread's state during attention.
//
//     format   keys of a tile                 values of a tile             after both
//     F32      [d][16 tokens]                 [16 tokens][D]
//     F16      the same                       the same
//     BF16     [d / 2][16 tokens][2]          [16 / 2 tokens][D][2]
//     INT8     [d / 4][16 tokens][4], + 128   [16 tokens][D]               a float32 scale per token
//
// D is the values' d rounded up to 16, so that a vector of values stays within its token; keys take as many bytes as
// values of their d would. Padding is never initialised and never reaches a result.
#pragma once

#include "attention.h"

namespace kvasir {

constexpr int64_t MAX_HEAD_DIM = 576;
constexpr int64_t STEP_TOKENS = 64;     // the softmax is rescaled between aligned runs of this many keys,
constexpr int64_t CHUNK_TOKENS = 1024;  // and starts anew in aligned runs of this many, merged in ascending order
constexpr int64_t ATTENTION_ROWS = 16;  // query tokens times heads that walk the cache together

#define KVASIR_LAYOUT static inline __attribute__((always_inline))

KVASIR_LAYOUT int64_t value_dim(const CacheLayout& layout) {
    return layout.value_dim ? layout.value_dim : layout.head_dim;
}
KVASIR_LAYOUT int64_t padded_dim(const CacheLayout& layout, bool values) {
    return ((values ? value_dim(layout) : layout.head_dim) + 15) / 16 * 16;
}
// The width of values and of sums of them.
KVASIR_LAYOUT int64_t mixed_dim(const CacheLayout& layout) { return padded_dim(layout, true); }

// Bytes of the numbers of a tile of keys or values, and of the tile.
KVASIR_LAYOUT int64_t tile_numbers(const CacheLayout& layout, bool values) {
    const int64_t size = layout.format == CACHE_F32 ? 4 : layout.format == CACHE_INT8 ? 1 : 2;
    return TILE_TOKENS * padded_dim(layout, values) * size;
}
KVASIR_LAYOUT int64_t tile_bytes(const CacheLayout& layout, bool values) {
    const int64_t scales = layout.format == CACHE_INT8 ? TILE_TOKENS * 4 : 0;
    return tile_numbers(layout, values) + scales;
}
// One KV head's part of a block.
KVASIR_LAYOUT int64_t head_bytes(const CacheLayout& layout, bool values) {
    return layout.block_size / TILE_TOKENS * tile_bytes(layout, values);
}

// Rows have a fixed stride, whatever the width: MAX_HEAD_DIM words of queries, 64 scores, 64 words of weights.
constexpr int64_t QUERY_BYTES = MAX_HEAD_DIM * 4;
constexpr int64_t WEIGHT_BYTES = STEP_TOKENS * 4;

struct AttentionState {
    uint8_t query[ATTENTION_ROWS * QUERY_BYTES];    // in the format that is multiplied by the keys
    uint8_t weight[ATTENTION_ROWS * WEIGHT_BYTES];  // of a step's keys, in the format that is multiplied by the values
    float score[ATTENTION_ROWS * STEP_TOKENS];
    float mixed[ATTENTION_ROWS * MAX_HEAD_DIM];  // weighted values of the chunk, relative to `top`
    float total[ATTENTION_ROWS * MAX_HEAD_DIM];  // of the previous chunks
    float sum[ATTENTION_ROWS * 16];              // weights of the chunk, by key modulo 16
    float top[ATTENTION_ROWS], factor[ATTENTION_ROWS];
    float total_top[ATTENTION_ROWS], total_sum[ATTENTION_ROWS];
    float query_scale[ATTENTION_ROWS];                          // int8 only
    int32_t query_sum[ATTENTION_ROWS];                          // int8 only
    int64_t first[ATTENTION_ROWS], last[ATTENTION_ROWS];        // the keys that a row attends to: [first, last)
    int64_t kept_end;                                           // of the chunks kept after this, 0 for none
    int64_t reserved[7];
};
static_assert(sizeof(AttentionState) % 64 == 0, "threads do not share a line");

// After the state, a thread keeps chunks of an item whose first keys another thread has: their maxima, sums and values.
// This many chunks of a full item fit: 131,072 keys with 16 rows, and more with fewer rows.
constexpr int64_t KEPT_CHUNKS = 128;

KVASIR_LAYOUT int64_t kept_floats(int64_t rows, int64_t width) { return 2 * ATTENTION_ROWS + rows * width; }
KVASIR_LAYOUT int64_t kept_room(const CacheLayout& layout) {
    return KEPT_CHUNKS * kept_floats(ATTENTION_ROWS, mixed_dim(layout));
}

}  // namespace kvasir
