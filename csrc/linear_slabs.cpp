// Products on AVX2 with levels of 8 bits for many rows (slab_bytes.h), and with levels of more (slab_words.h). A slab
// is 512 columns of a panel: unpacked once, it stays in the first cache while all rows are multiplied, in tiles whose
// dots fill the registers. Each output element has the chain of operations of linear_int.cpp, so the same bits.
#include "linear_slabs.h"

#include "input_rule.h"
#include "put_sum.h"

#if defined(KVASIR_AVX2)

#include "slab_bytes.h"
#include "slab_words.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int MAX_SEGMENTS = 8;

template <class Levels>
struct Slab {
    typename Levels::Group groups[2 * SLAB_BLOCKS];
    alignas(64) float sums[MAX_SEGMENTS][SLAB_ROWS][LANES];
};

// A tile of `rows` rows, at most M. ahead: the distance in bytes at which it prefetches codes, or 0.
template <class Levels, bool UNPACKED, int M = UNPACKED ? Levels::ROWS : Levels::CODE_ROWS>
void add_tile(int64_t rows, float (*sums)[LANES], const typename Levels::Group* groups, const uint8_t* block,
              int64_t blocks, const uint8_t* x, int64_t x_stride, int64_t ahead) {
    if constexpr (M > 1) {
        if (rows < M) {
            return add_tile<Levels, UNPACKED, M - 1>(rows, sums, groups, block, blocks, x, x_stride, ahead);
        }
    }
    Levels::template multiply<M, UNPACKED>(sums, groups, block, blocks, x, x_stride, ahead);
}

// What is multiplied: some rows and a panel.
struct Part {
    const uint8_t* panel;
    const uint8_t* x;
    int64_t rows, x_stride, segments, blocks;
    int64_t ahead;  // from a block to the one that will be needed next, in bytes, or 0
};

// The sums of each segment of the part.
template <class Levels, bool UNPACKED>
void add_up(Slab<Levels>& slab, const Part& part) {
    constexpr IntLayout l = int_layout_of(Levels::FORMAT);
    constexpr int ROWS = UNPACKED ? Levels::ROWS : Levels::CODE_ROWS;
    const int64_t tiles = (part.rows + ROWS - 1) / ROWS;
    const uint8_t* block = part.panel;
    const uint8_t* x = part.x;
    for (int64_t s = 0; s < part.segments; ++s) {
        std::memset(slab.sums[s], 0, static_cast<size_t>(part.rows) * sizeof slab.sums[s][0]);
        for (int64_t first = 0; first < part.blocks; first += SLAB_BLOCKS) {
            const int64_t count = part.blocks - first < SLAB_BLOCKS ? part.blocks - first : SLAB_BLOCKS;
            for (int64_t b = 0; UNPACKED && b < count; ++b) {
                if (part.ahead) prefetch_block<l.bytes>(block + b * l.bytes + part.ahead);
                Levels::unpack(slab.groups + 2 * b, block + b * l.bytes);
            }
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t begin = part.rows * t / tiles, end = part.rows * (t + 1) / tiles;
                const int64_t ahead = t > 0 ? 0 : tiles == 1 ? SLAB_AHEAD : part.ahead;
                add_tile<Levels, UNPACKED>(end - begin, slab.sums[s] + begin, slab.groups, block, count,
                                           x + begin * part.x_stride, part.x_stride, ahead);
            }
            block += count * l.bytes;
            x += count * 2 * static_cast<int64_t>(sizeof(Group32));
        }
    }
}

// The sum of a row's segments, by a balanced tree.
template <class Levels>
f32x16 joined(Slab<Levels>& slab, int64_t segments, int64_t row) {
    for (int64_t width = 1; width < segments; width *= 2) {
        for (int64_t s = 0; s < segments; s += 2 * width) {
            float* sum = slab.sums[s][row];
            store(sum, add(load(sum), load(slab.sums[s + width][row])));
        }
    }
    return load(slab.sums[0][row]);
}

template <class Levels>
void product(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
             float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const int64_t bytes = int_panel_bytes(m), stride = int_activated_bytes(m);
    const int64_t parts = (rows + SLAB_ROWS - 1) / SLAB_ROWS;
    Slab<Levels> slab;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const int64_t col = panel * PANEL, left = m.rows - col, cols = left < LANES ? left : LANES;
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t begin = rows * p / parts, end = rows * (p + 1) / parts;
            const Part part = {m.data + panel * bytes, activated + begin * stride, end - begin, stride, m.segments,
                               int_blocks(m), p == 0 && panel + 1 < last_panel ? bytes : 0};
            if (rows < Levels::UNPACK_FROM) add_up<Levels, false>(slab, part);
            else add_up<Levels, true>(slab, part);
            for (int64_t row = begin; row < end; ++row) {
                put_sum(out + row * out_stride + col, joined(slab, m.segments, row - begin),
                        bias ? bias + col : nullptr, residual ? residual + row * residual_stride + col : nullptr, cols);
            }
        }
    }
}

}  // namespace

bool in_slabs(const Matrix& m, int64_t rows) {
    const InputRule* rule = input_rule(m);
    if (m.format == FORMAT_NF4 || (rule && rule->rounding == ROUND_INT8)) return true;
    return int_layout_of(m.format).low_bits == 8 && rows > 1;
}

void linear_slabs(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride) {
    const InputRule* rule = input_rule(m);
    const bool words = rule && rule->rounding == ROUND_INT8;
    const auto by = m.format == FORMAT_NF4         ? product<Words<FORMAT_NF4>>
                    : words                        ? product<Words<FORMAT_INT8>>
                    : m.format == FORMAT_Q8_0      ? product<Bytes<FORMAT_Q8_0>>
                    : m.format == FORMAT_INT8      ? product<Bytes<FORMAT_INT8>>
                    : m.format == FORMAT_INT8_ZP   ? product<Bytes<FORMAT_INT8_ZP>>
                                                   : product<Bytes<FORMAT_AFFINE8>>;
    by(m, activated, rows, first_panel, last_panel, out, out_stride, bias, residual, residual_stride);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir

#else

namespace kvasir {
namespace KVASIR_ISA {

bool in_slabs(const Matrix&, int64_t) { return false; }

void linear_slabs(const Matrix&, const uint8_t*, int64_t, int64_t, int64_t, float*, int64_t, const float*, const float*,
                  int64_t) {}

}  // namespace KVASIR_ISA
}  // namespace kvasir

#endif
