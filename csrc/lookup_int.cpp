// Converts rows of integer matrices to float32: the embedding lookup.
#include "int_formats.h"
#include "linear.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The level of row r, column k of a block.
int32_t level_at(const IntLayout& l, const uint8_t* block, const uint8_t* table, int64_t r, int64_t k) {
    const auto bits = [&](int32_t plane, int32_t width) {
        const int64_t per = 8 / width, word = k / 4;
        return block[plane + 64 * (word / per) + 4 * r + k % 4] >> (word % per * width) & ((1 << width) - 1);
    };
    int32_t level = bits(l.low, l.low_bits);
    if (table != nullptr) level = table[level];
    if (l.high_bits > 0) level |= bits(l.high, l.high_bits) << l.low_bits;
    return level - l.zero;
}

float lane_of(f32x16 v, int64_t lane) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[lane];
}

// Writes the first `cols` columns of row r of a block as float32. `l.sub` columns share a scale and a minimum.
void expand_block(const IntLayout& l, const uint8_t* table, const uint8_t* block, int64_t r, float* out, int64_t cols) {
    for (int64_t begin = 0; begin < cols; begin += l.sub) {
        const int64_t s = begin / l.sub, pair = 2 * LANES * (s / 2) + 2 * r + s % 2;
        const uint8_t* byte = block + l.scales + LANES * s + r;
        float scale, minimum = 0.0f;
        if (l.cols == 64) {
            const uint16_t* scales = halves(block + l.scales) + LANES * s;
            scale = lane_of(l.scale == SCALE_BF16 ? load_bf16(scales) : load_f16(scales), r);
            if (l.minimum) minimum = lane_of(load_f16(halves(block + l.minima) + LANES * s), r);
        } else {
            const int32_t factor = l.scale == SCALE_ONE    ? 1
                                   : l.scale == SCALE_U8   ? *byte
                                   : l.scale == SCALE_I8   ? static_cast<int8_t>(*byte)
                                                           : block[l.scales + pair] & 15;
            scale = lane_of(load_f16(halves(block + l.d)), r) * static_cast<float>(factor);
            if (l.minimum) {
                const int32_t steps = l.scale == SCALE_NIBBLES ? block[l.scales + pair] >> 4 : block[l.minima + pair];
                minimum = -(lane_of(load_f16(halves(block + l.dmin)), r) * static_cast<float>(steps));
            }
        }
        for (int64_t k = begin; k < begin + l.sub && k < cols; ++k) {
            const float value = static_cast<float>(level_at(l, block, table, r, k)) * scale;
            out[k] = l.minimum ? value + minimum : value;
        }
    }
}

}  // namespace

void lookup_int(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    const IntLayout& l = int_layout_of(m.format);
    const uint8_t* table = int_table_of(m.format);
    const int64_t bytes = int_panel_bytes(m), blocks = int_blocks(m), cols = m.cols / m.segments;
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t* block = m.data + ids[i] / PANEL * bytes;
        for (int64_t s = 0; s < m.segments; ++s) {
            float* to = out + i * out_stride + s * cols;
            for (int64_t b = 0; b < blocks; ++b, block += l.bytes) {
                const int64_t left = cols - b * l.cols;
                expand_block(l, table, block, ids[i] % PANEL, to + b * l.cols, left < l.cols ? left : l.cols);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
