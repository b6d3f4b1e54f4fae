// Fuzzes attention: caches of arbitrary bits, block tables in any order, several pieces, windows, sinks. The bits of a
// row must not depend on threads, other pieces or the instruction set. Unsupported layouts must be rejected.
#include "../attention_layout.h"
#include "input.h"

KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout, int32_t values);
KVASIR_API int32_t kvasir_store_kv(const kvasir::StoreArgs* args);
KVASIR_API int32_t kvasir_attention(kvasir::AttentionArgs* args, int32_t threads);

namespace {

using namespace kvasir_fuzz;
using kvasir::AttentionArgs;
using kvasir::CacheLayout;
using kvasir::Piece;

constexpr int64_t MAX_BLOCKS = 24;
// Of dimensions times blocks, and of heads times dimensions times new tokens of a sequence: more takes seconds with
// sanitizers on a loaded machine.
constexpr int64_t MAX_ROW = 3'000;
constexpr int64_t MAX_WIDTH = 100'000;

void check_sizes(Input& in) {
    constexpr int32_t HARD[] = {0, -1, 1, 2, 16, 256, 257, 1 << 20, (1 << 20) + 16, 0x7ffffff0, 0x7fffffff};
    CacheLayout odd = {static_cast<int32_t>(in.between(-1, 4)), in.one_of(HARD), in.one_of(HARD),
                       in.one_of(HARD),                         in.one_of(HARD), in.flag()};
    for (int32_t values = 0; values < 2; ++values) {
        require(kvasir_cache_block_bytes(&odd, values) >= -1, "a block's bytes or -1");
        if (kvasir_cache_block_bytes(&odd, values) > 0) return;
    }
    kvasir::StoreArgs store{};
    store.layout = odd;
    AttentionArgs args{};
    args.layout = odd;
    require(kvasir_store_kv(&store) == -1 && kvasir_attention(&args, 1) == -1, "an unsupported layout is rejected");
}

struct Sequence {
    std::vector<int32_t> table;
    int64_t start, count;
    const int32_t* blocks;
};

std::vector<float> attend(AttentionArgs args, const std::vector<Piece>& pieces, int64_t rows, int32_t threads) {
    const int64_t width = args.heads * kvasir::value_dim(args.layout);
    Guarded<float> out((rows - 1) * args.out_stride + width);
    std::fill_n(out.data, (rows - 1) * args.out_stride + width, 5.0f);
    const int64_t scratch_bytes = kvasir::attention_scratch(args.layout, args.heads);
    Guarded<uint8_t> scratch(threads * scratch_bytes);
    Guarded<Piece> exact(static_cast<int64_t>(pieces.size()));
    std::copy(pieces.begin(), pieces.end(), exact.data);
    args.out = out.data;
    args.scratch = scratch.data;
    args.pieces = exact.data;
    args.num_pieces = static_cast<int64_t>(pieces.size());
    require(kvasir_attention(&args, threads) == 0, "attention accepts the layout");
    std::vector<float> found;
    for (int64_t r = 0; r < rows; ++r) {
        found.insert(found.end(), out.data + r * args.out_stride, out.data + r * args.out_stride + width);
    }
    return found;
}

}  // namespace

void fuzz_attention(const uint8_t* data, size_t size) {
    Input in(data, size);
    CacheLayout layout{};
    layout.format = in.between(0, 3);
    layout.kv_heads = in.between(1, 3);
    layout.head_dim = 2 * in.one_of({1, 4, 5, 8, 16, 20, 32, 64, 128, 288});
    layout.value_dim = in.one_of({0, 0, 1, 3, 16, 40, 512});
    layout.latent = in.flag() && layout.kv_heads == 1 && layout.value_dim <= layout.head_dim;
    layout.block_size = 16 * in.between(1, 3);
    const int64_t k_bytes = kvasir_cache_block_bytes(&layout, 0), v_bytes = kvasir_cache_block_bytes(&layout, 1);
    const int64_t blocks = in.between(1, std::clamp<int64_t>(MAX_ROW / layout.head_dim, 1, MAX_BLOCKS));
    AttentionArgs args{};
    args.layout = layout;
    args.heads = layout.kv_heads * static_cast<int32_t>(in.between(1, 18));
    args.window = in.flag() ? static_cast<int32_t>(in.between(1, 400)) : 0;
    if (args.window && in.flag()) args.window = -args.window;
    args.scale = in.number(true);
    args.softcap = in.one_of({0.0f, 0.0f, 5.0f, 50.0f});

    const int64_t most = std::clamp<int64_t>(MAX_WIDTH / (args.heads * layout.head_dim), 1, 20);
    std::vector<Sequence> sequences(static_cast<size_t>(in.between(1, 4)));
    int64_t rows = 0;
    std::vector<Piece> pieces;
    for (Sequence& s : sequences) {
        const int64_t length = in.between(0, blocks * layout.block_size);
        s.count = std::min(in.between(0, most), length);
        s.start = length - s.count;
        const int64_t low = kvasir::first_in_window(s.start, args.window);
        for (int64_t i = 0; i * layout.block_size < length; ++i) {
            const int64_t block = in.between(0, blocks - 1);
            const bool stale = (i + 1) * layout.block_size <= low;
            s.table.push_back(stale ? 1 << 30 : static_cast<int32_t>(block));
        }
        const bool causal = args.window || in.byte() % 4 != 0;
        s.blocks = s.table.data();
        pieces.push_back({0, causal ? 0 : kvasir::PIECE_BIDIRECTIONAL, s.start, s.count, 0, rows, &s.blocks});
        rows += s.count;
    }
    if (rows == 0) return check_sizes(in);
    const int64_t q_width = args.heads * layout.head_dim, width = args.heads * kvasir::value_dim(layout);
    const int64_t k_width = layout.kv_heads * layout.head_dim, v_width = layout.kv_heads * kvasir::value_dim(layout);
    args.q_stride = q_width + in.between(0, 3);
    args.out_stride = width + in.between(0, 3);
    Guarded<float> q((rows - 1) * args.q_stride + q_width), sinks(args.heads), slopes(args.heads);
    in.floats(q.data, (rows - 1) * args.q_stride + q_width);
    in.floats(sinks.data, args.heads);
    in.floats(slopes.data, args.heads);
    args.q = q.data;
    args.sinks = in.flag() ? sinks.data : nullptr;
    args.alibi_slopes = in.flag() ? slopes.data : nullptr;

    // The cache: written by store_kv, or partly arbitrary bits.
    const int64_t slots = blocks * layout.block_size;
    std::vector<float> k_rows(static_cast<size_t>(slots * k_width)), v_rows(static_cast<size_t>(slots * v_width));
    in.floats(k_rows.data(), slots * k_width);
    in.floats(v_rows.data(), slots * v_width);
    std::vector<int64_t> places(static_cast<size_t>(slots));
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int64_t>(i);
    const bool any_bits = in.byte() % 4 == 3;
    const uint8_t filling = in.byte();
    const int32_t threads = static_cast<int32_t>(in.between(1, 4));
    on_all(
        [&] {
            Guarded<uint8_t> k(blocks * k_bytes), v(blocks * v_bytes);
            std::memset(k.data, filling, static_cast<size_t>(blocks * k_bytes));
            std::memset(v.data, filling ^ 0x55, static_cast<size_t>(blocks * v_bytes));
            const bool latent = layout.latent != 0;
            const kvasir::StoreArgs store{layout, k.data, v.data, k_rows.data(), latent ? k_rows.data() : v_rows.data(),
                                          k_width, latent ? k_width : v_width, places.data(),
                                          any_bits ? slots / 2 : slots};
            require(kvasir_store_kv(&store) == 0, "store_kv accepts the layout");
            args.k = k.data;
            args.v = v.data;
            const std::vector<float> whole = attend(args, pieces, rows, 1);
            require(same(attend(args, pieces, rows, threads).data(), whole.data(), rows * width),
                    "attention: the bits do not depend on the threads");
            for (const Piece& piece : pieces) {  // the last row of each piece alone
                if (piece.count == 0 || !piece.causal()) continue;
                AttentionArgs one = args;
                const int64_t last = piece.first + piece.count - 1;
                one.q = args.q + last * args.q_stride;
                const Piece alone{0, piece.flags, piece.start + piece.count - 1, 1, 0, 0, piece.tables};
                require(same(attend(one, {alone}, 1, 1).data(), &whole[static_cast<size_t>(last * width)], width),
                        "attention: a row has the same bits alone");
            }
            return whole;
        },
        "attention: all instruction sets give the same bits");
    check_sizes(in);
}
