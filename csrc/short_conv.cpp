// The gated short convolution; see short_conv.h. A thread computes some channels of every token. Lanes are channels and
// taps are added in ascending order, so neither the step nor the instruction set changes a bit.
#include "short_conv.h"

#include "kernels.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {

namespace {

// The channels [first, first + count) of one piece.
class Channels {
public:
    Channels(const ShortConvArgs& args, const Piece& piece, int64_t first, int64_t count)
        : a(args), piece(piece), first(first), count(count), table(piece.tables[args.group]) {}

    void run() const {
        for (int64_t i = 0; i < piece.count; ++i) {
            const int64_t token = piece.start + i, place = token % a.block_size;
            float* const rows = block(token / a.block_size);
            if (place == 0) open(rows, token);
            compute(rows + place * a.width, (piece.first + i) * a.width);
        }
    }

private:
    const ShortConvArgs& a;
    const Piece& piece;
    const int64_t first, count;
    const int32_t* table;

    // These channels of a block's rows, of which the first are those before the block.
    float* block(int64_t index) const { return a.blocks + table[index] * a.block_stride + first; }

    // Copies what a block keeps of the tokens before it from the end of the previous block.
    void open(float* rows, int64_t token) const {
        const float* last = token > 0 ? block(token / a.block_size - 1) + a.block_size * a.width : nullptr;
        const size_t bytes = static_cast<size_t>(count) * sizeof *rows;
        for (int64_t i = 0; i < a.taps - 1; ++i) {
            if (last) std::memcpy(rows + i * a.width, last + i * a.width, bytes);
            else std::memset(rows + i * a.width, 0, bytes);
        }
    }

    // One token. taps: the inputs of the first tap; the token's own row is the last one. row: offset of its row.
    void compute(float* taps, int64_t row) const {
        const float *b = a.b + row + first, *c = a.c + row + first, *x = a.x + row + first;
        float *own = taps + (a.taps - 1) * a.width, *out = a.out + row + first;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            KVASIR_ISA::store(own + i, mul(load(b + i), load(x + i)));
            KVASIR_ISA::store(out + i, mul(load(c + i), sum(i, [&](const float* from) { return load(from); }, taps)));
        }
        if (i == count) return;
        const int64_t rest = count - i;
        const auto get = [&](const float* from) { return load_first(from, rest); };
        store_first(own + i, mul(get(b + i), get(x + i)), rest);
        store_first(out + i, mul(get(c + i), sum(i, get, taps)), rest);
    }

    template <typename Get>
    KVASIR_INLINE f32x16 sum(int64_t i, Get get, const float* taps) const {
        f32x16 total = broadcast(0.0f);
        for (int64_t t = 0; t < a.taps; ++t) {
            total = fma(get(taps + t * a.width + i), get(a.kernel + t * a.width + first + i), total);
        }
        return a.bias ? add(total, get(a.bias + first + i)) : total;
    }
};

}  // namespace

void short_conv(const ShortConvArgs& args, const Team& team) {
    const int64_t vectors = (args.width + LANES - 1) / LANES;
    const Range mine = share(team, vectors);
    const int64_t first = mine.begin * LANES, end = mine.end * LANES < args.width ? mine.end * LANES : args.width;
    if (first >= end) return;
    for (int64_t i = 0; i < args.num_pieces; ++i) Channels(args, args.pieces[i], first, end - first).run();
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
