// The outliers of LLM.int8, each times a column of weights (outliers.h).
#include "outliers.h"

#include "int_formats.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The levels of column 4 j + `place` of a word of INT8, for the 16 rows of the panel.
KVASIR_INLINE i32x16 column_of(const uint8_t* word, int64_t place) {
    const i32x16 four = load(reinterpret_cast<const int32_t*>(word));
    const i32x16 moved = place == 0   ? four
                         : place == 1 ? shift_right<8>(four)
                         : place == 2 ? shift_right<16>(four)
                                      : shift_right<24>(four);
    return sub(bit_and(moved, broadcast_i32(255)), broadcast_i32(128));
}

// The sum for the 16 rows of a panel.
f32x16 sum_of_panel(const Matrix& m, const uint8_t* panel, const Outliers& row) {
    constexpr IntLayout l = int_layout_of(FORMAT_INT8);
    const int64_t cols = m.cols / m.segments, blocks = int_blocks(m);
    f32x16 sum = broadcast(0.0f);
    for (int64_t i = 0; i < row.count; ++i) {
        const int64_t column = row.of[i].column, place = column % cols;
        const uint8_t* block = panel + (column / cols * blocks + place / l.cols) * l.bytes;
        const i32x16 levels = column_of(block + l.low + place % l.cols / 4 * 4 * LANES, place % 4);
        const f32x16 weights = mul(to_float(levels), load(reinterpret_cast<const float*>(block + l.scales)));
        sum = fma(weights, broadcast(row.of[i].value), sum);
    }
    return sum;
}

}  // namespace

void add_outliers(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                  float* out, int64_t out_stride) {
    const int64_t bytes = int_panel_bytes(m), stride = int_activated_bytes(m), groups = stride - outliers_bytes(m);
    for (int64_t r = 0; r < rows; ++r) {
        const Outliers& row = *reinterpret_cast<const Outliers*>(activated + r * stride + groups);
        if (row.count == 0) continue;
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
            const f32x16 sum = sum_of_panel(m, m.data + panel * bytes, row);
            const int64_t col = panel * PANEL, left = m.rows - col;
            float* to = out + r * out_stride + col;
            if (left < LANES) store_first(to, add(load_first(to, left), sum), left);
            else store(to, add(load(to), sum));
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
