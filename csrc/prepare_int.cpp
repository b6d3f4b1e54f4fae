// Converts rows to the activations of integer formats: int8 and a scale for each group, and the sums that zero points
// and minima need.
#include "input_rule.h"
#include "int_formats.h"
#include "linear.h"
#include "row_activation.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The largest magnitude of `count` values, a multiple of 16, and whether one of them is not finite.
struct Range {
    float largest;
    bool is_finite;
};

KVASIR_INLINE Range range_of(const float* x, int64_t count) {
    f32x16 largest = broadcast(0.0f), poison = broadcast(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 v = load(x + i);
        largest = max(abs(v), largest);
        poison = add(poison, mul(v, broadcast(0.0f)));
    }
    return {greatest(largest), !any(unordered(poison, poison))};
}

// Stores 16 levels, and returns their sum.
KVASIR_INLINE int32_t put_levels(int8_t* q, f32x16 level, float least) {
    const i32x16 levels = to_int(max(min(level, broadcast(127.0f)), broadcast(least)));
    store_i8(q, levels);
    return total(levels);
}

// Quantizes x to int8 by the range of the values that share a scale, and returns the scale: NaN if one of them is not
// finite, 0 if all are 0 or nearly so. sums: of each 16 levels.
template <int COUNT>
KVASIR_INLINE float quantize(int8_t* q, int32_t* sums, const float* x, Range range) {
    const float scale = range.largest / 127.0f;
    const bool empty = scale < 1.17549435e-38f;  // the least normal float
    const f32x16 factor = broadcast(empty ? 0.0f : 127.0f / range.largest);
    for (int i = 0; i < COUNT; i += LANES) sums[i / LANES] = put_levels(q + i, mul(load(x + i), factor), -127.0f);
    return range.is_finite ? empty ? 0.0f : scale : __builtin_nanf("");
}

// The same with a scale that is given.
template <int COUNT>
KVASIR_INLINE float quantize_by(int8_t* q, int32_t* sums, const float* x, float scale) {
    f32x16 poison = broadcast(0.0f);
    for (int i = 0; i < COUNT; i += LANES) {
        const f32x16 v = load(x + i);
        poison = add(poison, mul(v, broadcast(0.0f)));
        sums[i / LANES] = put_levels(q + i, div(v, broadcast(scale)), -128.0f);
    }
    return any(unordered(poison, poison)) ? __builtin_nanf("") : scale;
}

// The scale of a row of a multiple of 16 columns, 0 if it is all 0 or nearly so.
float scale_of_row(const float* x, int64_t cols) {
    f32x16 largest = broadcast(0.0f);
    for (int64_t k = 0; k < cols; k += LANES) largest = max(abs(load(x + k)), largest);
    const float scale = greatest(largest) / 127.5f;
    return scale < 1.17549435e-38f ? 0.0f : scale;
}

void add_sums(Group32& group, const int32_t (&sums)[2]) {
    group.start = -8 * (sums[0] + sums[1]);
    group.half_start = -8 * sums[0];
    group.scaled_sum = group.scale * static_cast<float>(sums[0] + sums[1]);
}

// scale: given, or 0.
void prepare_group(Group32& group, const float* x, float scale) {
    int32_t sums[2];
    group.scale = scale > 0.0f ? quantize_by<32>(group.q, sums, x, scale)
                               : quantize<32>(group.q, sums, x, range_of(x, 32));
    add_sums(group, sums);
}

void prepare_group(Group32& group, const float* x, Range range) {
    int32_t sums[2];
    group.scale = quantize<32>(group.q, sums, x, range);
    add_sums(group, sums);
}

void prepare_group(Group256& group, const float* x, Range range) {
    int32_t sums[16];
    group.scale = quantize<256>(group.q, sums, x, range);
    for (int i = 0; i < 16; ++i) {
        group.start[i] = -32 * sums[i];
        group.sum16[i] = static_cast<int16_t>(sums[i]);
    }
    for (int i = 0; i < 8; ++i) group.sum32[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
    for (int32_t& word : group.reserved) word = 0;
}

void prepare_group(Group256& group, const float* x, float) { prepare_group(group, x, range_of(x, 256)); }

// ACT_Q8_ROW, for columns in whole groups: all share the range of the row, which counts as at least 1e-5 (BitLinear,
// arXiv:2402.17764).
void prepare_row(Group256* groups, const float* x, int64_t cols) {
    Range range = range_of(x, cols);
    range.largest = range.largest > 1e-5f ? range.largest : 1e-5f;
    for (int64_t g = 0; g < cols / 256; ++g) prepare_group(groups[g], x + 256 * g, range);
}

// ACT_OUTLIERS, for columns in whole groups: the other values share the range of them all.
void prepare_row(Group32* groups, Outliers& outliers, const float* x, int64_t cols, float threshold) {
    const auto is_outlier = [&](int64_t k) { return threshold > 0.0f && __builtin_fabsf(x[k]) >= threshold; };
    float* others = reinterpret_cast<float*>(outliers.of);  // until the outliers take their room
    for (int64_t k = 0; k < cols; ++k) others[k] = is_outlier(k) ? 0.0f : x[k];
    const Range range = range_of(others, cols);
    for (int64_t g = 0; g < cols / 32; ++g) prepare_group(groups[g], others + 32 * g, range);
    outliers.count = 0;
    for (int64_t k = 0; k < cols; ++k) {
        if (is_outlier(k)) outliers.of[outliers.count++] = {static_cast<int32_t>(k), x[k]};
    }
}

// Quantizes the `cols` columns of one segment to `count` groups of SIZE, padding them with zeros. order: of the columns
// in the row x, which is else the segment's; or null.
template <typename Group, int SIZE>
void prepare_segment(Group* groups, int64_t count, const float* x, int64_t cols, const int32_t* order, float scale) {
    for (int64_t g = 0; g < count; ++g, cols -= SIZE) {
        const float* from = x + g * SIZE;
        float gathered[SIZE] = {};
        if (order || cols < SIZE) {
            for (int64_t i = 0; i < SIZE && i < cols; ++i) gathered[i] = order ? x[order[g * SIZE + i]] : from[i];
            from = gathered;
        }
        prepare_group(groups[g], from, scale);
    }
}

}  // namespace

void prepare_int(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows) {
    const int64_t cols = m.cols / m.segments, blocks = int_blocks(m), bytes = int_activated_bytes(m);
    const InputRule* rule = input_rule(m);
    const int32_t* order = rule && rule->ordered ? reinterpret_cast<const int32_t*>(rule + 1) : nullptr;
    const bool by_row = rule && rule->rounding == ROUND_INT8;
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* to = out + r * bytes;
        const float* row = x + r * x_stride;
        if (m.activation == ACT_Q8_ROW && int_layout_of(m.format).cols == 256 && cols % 256 == 0) {
            prepare_row(reinterpret_cast<Group256*>(to), row, m.cols);
            continue;
        }
        if (m.activation & ACT_OUTLIERS) {
            Outliers& outliers = *reinterpret_cast<Outliers*>(to + bytes - outliers_bytes(m));
            prepare_row(reinterpret_cast<Group32*>(to), outliers, row, m.cols, rule->scale);
            continue;
        }
        const float scale = !by_row ? 0.0f : rule->scale > 0.0f ? rule->scale : scale_of_row(row, m.cols);
        for (int64_t s = 0; s < m.segments; ++s) {
            const float* from = order ? row : row + s * cols;
            const int32_t* places = order ? order + s * cols : nullptr;
            if (int_layout_of(m.format).cols == 64) {
                Group32* groups = reinterpret_cast<Group32*>(to) + 2 * s * blocks;
                prepare_segment<Group32, 32>(groups, 2 * blocks, from, cols, places, scale);
            } else {
                Group256* groups = reinterpret_cast<Group256*>(to) + s * blocks;
                prepare_segment<Group256, 256>(groups, blocks, from, cols, places, scale);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
