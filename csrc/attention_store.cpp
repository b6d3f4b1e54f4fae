// Stores rows of keys and values in the paged cache.
#include "attention_formats.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

template <typename F>
void store_rows(const StoreArgs& args, int64_t first_row, int64_t last_row) {
    const CacheLayout& layout = args.layout;
    for (int64_t row = first_row; row < last_row; ++row) {
        const int64_t block = args.slots[row] / layout.block_size, place = args.slots[row] % layout.block_size;
        const int64_t tile = place / TILE_TOKENS, token = place % TILE_TOKENS;
        for (int64_t head = 0; head < layout.kv_heads; ++head) {
            const int64_t part = block * layout.kv_heads + head;
            uint8_t* keys = args.k + part * head_bytes(layout, false) + tile * tile_bytes(layout, false);
            uint8_t* values = args.v + part * head_bytes(layout, true) + tile * tile_bytes(layout, true);
            F::store_key(layout, keys, token, args.k_rows + row * args.k_stride + head * layout.head_dim);
            F::store_value(layout, values, token, args.v_rows + row * args.v_stride + head * value_dim(layout));
        }
    }
}

}  // namespace

void store_kv(const StoreArgs& args, int64_t first_row, int64_t last_row) {
    switch (args.layout.format) {
        case CACHE_F32: return store_rows<Float32>(args, first_row, last_row);
        case CACHE_F16: return store_rows<Float16>(args, first_row, last_row);
        case CACHE_INT8: return store_rows<Int8>(args, first_row, last_row);
        default: return store_rows<Bfloat16>(args, first_row, last_row);
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
