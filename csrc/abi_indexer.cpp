// The C ABI of sparse attention, for tests. A program calls the kernels directly.
#include "attention_layout.h"
#include "dispatch.h"
#include "indexer.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {

int64_t selected_scratch(const CacheLayout& layout, int32_t heads, int64_t top_k) {
    CacheLayout copies = layout;
    copies.block_size = static_cast<int32_t>((top_k + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS);
    return attention_scratch(layout, heads) + head_bytes(copies, false) + head_bytes(copies, true);
}

namespace {

constexpr int32_t LIMIT = 1 << 20;

// Whether the sizes are valid. They are bounded so that no arithmetic on them overflows.
bool is_sound(const IndexArgs& a) {
    return a.heads > 0 && a.heads <= MAX_INDEX_HEADS && a.dim > 0 && a.dim <= MAX_INDEX_DIM && a.top_k > 0 &&
           a.top_k <= MAX_TOP_K && a.block_size > 0 && a.block_size <= LIMIT && a.block_size % TILE_TOKENS == 0 &&
           a.max_tokens > 0;
}

bool is_sound(const SelectedArgs& a) {
    const CacheLayout& layout = a.attention.layout;
    if (layout.format < CACHE_F32 || layout.format > CACHE_INT8 || layout.kv_heads != 1) return false;
    if (layout.head_dim < 2 || layout.head_dim > MAX_HEAD_DIM || layout.head_dim % 2 != 0) return false;
    if (layout.value_dim < 0 || layout.value_dim > MAX_HEAD_DIM) return false;
    if (layout.block_size <= 0 || layout.block_size > LIMIT || layout.block_size % TILE_TOKENS != 0) return false;
    if (a.attention.heads <= 0 || a.attention.heads > LIMIT || a.top_k <= 0 || a.top_k > MAX_TOP_K) return false;
    return a.attention.window == 0 && a.attention.distance == 0 && !a.attention.sinks && !a.attention.alibi_slopes &&
           !a.attention.relative;
}

int32_t run(void (*body)(const Team&, void*), void* args, int32_t threads) {
    Pool* pool = pool_create(threads, false);
    if (pool == nullptr) return -1;
    pool_run(pool, body, args);
    pool_destroy(pool);
    return 0;
}

}  // namespace
}  // namespace kvasir

// Bytes of scratch memory per thread of attention to selected positions.
KVASIR_API int64_t kvasir_selected_scratch(const kvasir::CacheLayout* layout, int32_t heads, int64_t top_k) {
    return kvasir::selected_scratch(*layout, heads, top_k);
}

// Runs the indexer on `threads` threads, created for this call. Returns 0, or -1 and computes nothing if the kernels do
// not support the sizes, or if the threads cannot be created.
KVASIR_API int32_t kvasir_select_tokens(kvasir::IndexArgs* args, int32_t threads) {
    if (!kvasir::is_sound(*args)) return -1;
    return kvasir::run([](const kvasir::Team& team, void* context) {
        kvasir::kernels().select_tokens(*static_cast<const kvasir::IndexArgs*>(context), team);
    }, args, threads);
}

// Runs attention to selected positions; as above.
KVASIR_API int32_t kvasir_selected_attention(kvasir::SelectedArgs* args, int32_t threads) {
    if (!kvasir::is_sound(*args)) return -1;
    return kvasir::run([](const kvasir::Team& team, void* context) {
        kvasir::kernels().selected_attention(*static_cast<const kvasir::SelectedArgs*>(context), team);
    }, args, threads);
}
