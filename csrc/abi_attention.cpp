// Attention and its cache, alone: for tests, and for those who size the cache. The program calls the kernels itself.
#include "attention_layout.h"
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {

int64_t cache_block_bytes(const CacheLayout& layout) { return layout.kv_heads * head_bytes(layout); }

int64_t attention_scratch(const CacheLayout& layout, int32_t) {
    return static_cast<int64_t>(sizeof(AttentionState)) + kept_room(layout) * static_cast<int64_t>(sizeof(float));
}

namespace {

// Bounded so that no size overflows.
bool is_sound(const CacheLayout& layout) {
    constexpr int32_t most = 1 << 20;
    if (layout.kv_heads > most || layout.block_size > most) return false;
    return layout.format >= CACHE_F32 && layout.format <= CACHE_INT8 && layout.kv_heads > 0 && layout.head_dim >= 2 &&
           layout.head_dim <= MAX_HEAD_DIM && layout.head_dim % 2 == 0 && layout.block_size > 0 &&
           layout.block_size % TILE_TOKENS == 0;
}

void attend(const Team& team, void* args) { kernels().attention(*static_cast<const AttentionArgs*>(args), team); }

}  // namespace
}  // namespace kvasir

// Bytes of one block of one layer's keys, and of its values; -1 for a layout that the kernels do not have.
KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout) {
    return kvasir::is_sound(*layout) ? kvasir::cache_block_bytes(*layout) : -1;
}

// Writes all rows into their slots, which lie in the cache, each slot once. -1, and nothing done, for such a layout.
KVASIR_API int32_t kvasir_store_kv(const kvasir::StoreArgs* args) {
    if (!kvasir::is_sound(args->layout)) return -1;
    const kvasir::FloatMode mode;
    kvasir::kernels().store_kv(*args, 0, args->rows);
    return 0;
}

// Computed by a team of so many threads, which live for this call. -1, and nothing done, for such a layout, for heads
// that are not a multiple of its KV heads, and where there is no such team.
KVASIR_API int32_t kvasir_attention(kvasir::AttentionArgs* args, int32_t threads) {
    if (!kvasir::is_sound(args->layout) || args->heads <= 0 || args->heads % args->layout.kv_heads != 0) return -1;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, kvasir::attend, args);
    kvasir::pool_destroy(pool);
    return 0;
}
