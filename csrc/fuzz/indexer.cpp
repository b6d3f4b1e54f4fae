// Fuzzes the indexer: whatever the scores, each row selects as many ascending positions as it can, and the same ones in
// one step, token by token and on every instruction set. Sizes that the kernel does not support must be rejected.
#include "../indexer.h"

#include <algorithm>

#include "input.h"

KVASIR_API int32_t kvasir_select_tokens(kvasir::IndexArgs* args, int32_t threads);

namespace {

using namespace kvasir_fuzz;

struct Sequence {
    int32_t heads, dim, top_k, block, threads;
    int64_t length;
    float scale;
    std::vector<float> q, weights, k;
};

void check_sizes(Input& in) {
    kvasir::IndexArgs args = {};  // without pieces: nothing is computed
    args.max_tokens = 1;
    for (int32_t* size : {&args.heads, &args.dim, &args.top_k, &args.block_size}) {
        *size = in.flag() ? static_cast<int32_t>(in.between(1, 32)) : in.any<int32_t>();
    }
    const int32_t found = kvasir_select_tokens(&args, static_cast<int32_t>(in.between(0, 2)));
    const bool fits = args.heads > 0 && args.heads <= kvasir::MAX_INDEX_HEADS && args.dim > 0 &&
                      args.dim <= kvasir::MAX_INDEX_DIM && args.top_k > 0 && args.top_k <= kvasir::MAX_TOP_K &&
                      args.block_size > 0 && args.block_size % 16 == 0;
    require(found == -1 || (found == 0 && fits), "unsupported sizes are rejected");
}

std::vector<float> select(const Sequence& s, int64_t step) {
    const int64_t blocks = (s.length + s.block - 1) / s.block, numbers = int64_t{s.block} * s.dim;
    Guarded<float> keys(blocks * numbers);
    std::memset(keys.data, 0xff, static_cast<size_t>(blocks * numbers) * sizeof(float));
    Guarded<int32_t> table(blocks), out(s.length * s.top_k);
    for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
    const int32_t* tables = table.data;
    Guarded<uint8_t> room(s.threads * kvasir::index_scratch(s.length));
    for (int64_t start = 0; start < s.length; start += step) {
        const kvasir::Piece piece = {0, 0, start, std::min(step, s.length - start), 0, 0, &tables};
        kvasir::IndexArgs args = {s.heads, s.dim, s.top_k, s.block, 0, s.scale, keys.data,
                                  s.q.data() + start * s.heads * s.dim, s.weights.data() + start * s.heads,
                                  s.k.data() + start * s.dim, out.data + start * s.top_k, &piece, 1, room.data, s.length};
        require(kvasir_select_tokens(&args, s.threads) == 0, "the indexer accepts the sizes");
    }
    for (int64_t row = 0; row < s.length; ++row) {
        for (int64_t i = 0, before = -1; i < s.top_k; ++i) {
            const int64_t at = out[row * s.top_k + i];
            require(i > row ? at == -1 : at > before && at <= row, "positions ascend up to the row's own");
            before = at;
        }
    }
    return std::vector<float>(out.data, out.data + s.length * s.top_k);
}

}  // namespace

void fuzz_indexer(const uint8_t* data, size_t size) {
    Input in(data, size);
    check_sizes(in);
    Sequence s;
    s.heads = static_cast<int32_t>(in.between(1, 9));
    s.dim = static_cast<int32_t>(in.between(1, 40));
    s.top_k = static_cast<int32_t>(in.between(1, 50));
    s.block = 16 * static_cast<int32_t>(in.between(1, 3));
    s.threads = static_cast<int32_t>(in.between(1, 3));
    s.length = in.between(1, 70);
    s.scale = in.number(true);
    s.q.resize(static_cast<size_t>(s.length * s.heads * s.dim));
    s.weights.resize(static_cast<size_t>(s.length * s.heads));
    s.k.resize(static_cast<size_t>(s.length * s.dim));
    for (std::vector<float>* all : {&s.q, &s.weights, &s.k}) in.floats(all->data(), static_cast<int64_t>(all->size()));
    const int64_t step = in.between(1, s.length);
    on_all([&] {
        const std::vector<float> whole = select(s, s.length);
        require(select(s, step) == whole, "the selection does not depend on the steps");
        return whole;
    }, "the selection is the same on every instruction set");
}
