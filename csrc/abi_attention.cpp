// The C ABI of attention and its cache: for tests, and for sizing the cache. A program calls the kernels directly.
#include "attention_layout.h"
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {

int64_t cache_block_bytes(const CacheLayout& layout, bool values) {
    return layout.kv_heads * head_bytes(layout, values);
}

int64_t attention_scratch(const CacheLayout& layout, int32_t) {
    return static_cast<int64_t>(sizeof(AttentionState)) + kept_room(layout) * static_cast<int64_t>(sizeof(float));
}

namespace {

// Whether the layout is valid. Sizes are bounded so that no arithmetic on them overflows.
bool is_sound(const CacheLayout& layout) {
    constexpr int32_t limit = 1 << 20;
    if (layout.kv_heads > limit || layout.block_size > limit) return false;
    if (layout.value_dim < 0 || layout.value_dim > MAX_HEAD_DIM) return false;
    if (layout.latent && (layout.kv_heads != 1 || layout.value_dim > layout.head_dim)) return false;
    return layout.format >= CACHE_F32 && layout.format <= CACHE_INT8 && layout.kv_heads > 0 && layout.head_dim >= 2 &&
           layout.head_dim <= MAX_HEAD_DIM && layout.head_dim % 2 == 0 && layout.block_size > 0 &&
           layout.block_size % TILE_TOKENS == 0;
}

// As above. Without columns for the positions, or with queries but without keys, nothing is computed.
bool is_sound(const Relative* relative) {
    if (relative == nullptr) return true;
    return relative->reach >= 0 && relative->reach <= (int64_t{1} << 26) && (!relative->queries || relative->k_rows);
}

void attend(const Team& team, void* args) { kernels().attention(*static_cast<const AttentionArgs*>(args), team); }

}  // namespace
}  // namespace kvasir

// Bytes of one KV block of one layer's keys or, with `values`, of its values. -1 if the kernels do not support the
// layout.
KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout, int32_t values) {
    return kvasir::is_sound(*layout) ? kvasir::cache_block_bytes(*layout, values != 0) : -1;
}

// Writes all rows into their slots. Slots must lie within the cache and be distinct. Returns 0, or -1 and writes
// nothing if the kernels do not support the layout.
KVASIR_API int32_t kvasir_store_kv(const kvasir::StoreArgs* args) {
    if (!kvasir::is_sound(args->layout)) return -1;
    const kvasir::FloatMode mode;
    kvasir::kernels().store_kv(*args, 0, args->rows);
    return 0;
}

// Runs attention on `threads` threads, created for this call. Returns 0, or -1 and computes nothing if the kernels do
// not support the layout or the relative positions, if the heads are not a multiple of the KV heads, or if the threads
// cannot be created.
KVASIR_API int32_t kvasir_attention(kvasir::AttentionArgs* args, int32_t threads) {
    if (!kvasir::is_sound(args->layout) || args->heads <= 0 || args->heads % args->layout.kv_heads != 0) return -1;
    if (!kvasir::is_sound(args->relative)) return -1;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, kvasir::attend, args);
    kvasir::pool_destroy(pool);
    return 0;
}

// Runs the gated delta rule on `threads` threads, created for this call; states and blocks as in delta.h. Returns 0, or
// -1 and computes nothing if the kernels do not support the sizes, or if the threads cannot be created.
KVASIR_API int32_t kvasir_gated_delta(kvasir::DeltaArgs* args, int32_t threads) {
    const kvasir::DeltaArgs& a = *args;
    const bool is_sound = a.qk_heads > 0 && a.v_heads > 0 && a.v_heads % a.qk_heads == 0 && a.dim > 0 &&
                          a.dim <= kvasir::MAX_DELTA_DIM && a.v_dim > 0 && a.v_dim <= kvasir::MAX_DELTA_DIM &&
                          a.taps > 0 && a.taps <= kvasir::MAX_TAPS && a.block_size >= a.taps &&
                          (a.decays == 1 || a.decays == a.dim);
    if (!is_sound) return -1;
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    if (pool == nullptr) return -1;
    kvasir::pool_run(pool, [](const kvasir::Team& team, void* context) {
        kvasir::kernels().gated_delta(*static_cast<const kvasir::DeltaArgs*>(context), team);
    }, args);
    kvasir::pool_destroy(pool);
    return 0;
}
