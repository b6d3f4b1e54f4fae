// Converts rows of integer matrices to float32: the embedding lookup.
#include "int_formats.h"
#include "linear.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// The level of row r, column k of a block.
int32_t level_at(int32_t format, const uint8_t* block, int64_t r, int64_t k) {
    const IntLayout& l = int_layout_of(format);
    const auto bits = [&](int32_t plane, int32_t width) {
        const int64_t per = 8 / width, word = k / 4;
        return block[plane + 64 * (word / per) + 4 * r + k % 4] >> (word % per * width) & ((1 << width) - 1);
    };
    int32_t level = bits(l.low, l.low_bits);
    if (format == FORMAT_NF4) return (NF4_UPPER[level] << 7 | NF4_LOWER[level]) - l.zero;
    if (const uint8_t* table = int_table_of(format)) level = table[level];
    if (l.high_bits > 0) level |= bits(l.high, l.high_bits) << l.low_bits;
    return level - l.zero;
}

float lane_of(f32x16 v, int64_t lane) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[lane];
}

float f32_at(const uint8_t* from, int64_t i) {
    float value;
    std::memcpy(&value, from + 4 * i, sizeof value);
    return value;
}

// The scale and the minimum of group s of a block of 64 columns.
void read_scale(const IntLayout& l, const uint8_t* block, int64_t r, int64_t s, float& scale, float& minimum) {
    if (l.scale == SCALE_F32) {
        scale = f32_at(block + l.scales, r);
    } else if (l.scale == SCALE_E5M3) {
        const uint32_t bits = (block[l.scales + LANES * s + r] << 20) + (117u << 23);
        std::memcpy(&scale, &bits, sizeof scale);
        scale *= f32_at(block + l.d, r);
    } else {
        const auto number = [&](int32_t from) {
            const uint16_t* numbers = halves(block + from) + LANES * s;
            return lane_of(l.scale == SCALE_BF16 ? load_bf16(numbers) : load_f16(numbers), r);
        };
        scale = number(l.scales);
        if (l.minimum) minimum = l.zero_point ? -(number(l.minima) * scale) : number(l.minima);
    }
}

// Writes the first `cols` columns of row r of a block as float32. `l.sub` columns share a scale and a minimum.
void expand_block(int32_t format, const uint8_t* block, int64_t r, float* out, int64_t cols) {
    const IntLayout& l = int_layout_of(format);
    for (int64_t begin = 0; begin < cols; begin += l.sub) {
        const int64_t s = begin / l.sub, pair = 2 * LANES * (s / 2) + 2 * r + s % 2;
        const uint8_t* byte = block + l.scales + LANES * s + r;
        float scale, minimum = 0.0f;
        if (l.cols == 64) {
            read_scale(l, block, r, s, scale, minimum);
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
            const float value = static_cast<float>(level_at(format, block, r, k)) * scale;
            out[k] = l.minimum ? value + minimum : value;
        }
    }
}

}  // namespace

void lookup_int(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count) {
    const IntLayout& l = int_layout_of(m.format);
    const int64_t bytes = int_panel_bytes(m), blocks = int_blocks(m), cols = m.cols / m.segments;
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t* block = m.data + ids[i] / PANEL * bytes;
        for (int64_t s = 0; s < m.segments; ++s) {
            float* to = out + i * out_stride + s * cols;
            for (int64_t b = 0; b < blocks; ++b, block += l.bytes) {
                const int64_t left = cols - b * l.cols;
                expand_block(m.format, block, ids[i] % PANEL, to + b * l.cols, left < l.cols ? left : l.cols);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
