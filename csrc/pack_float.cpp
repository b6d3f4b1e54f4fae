// Packs float matrices. A panel interleaves 16 rows: for each group of columns, the numbers of all rows are adjacent.
//
//     F32, F16    [k][row]           4 or 2 bytes each
//     BF16        [k / 2][row][2]    pairs
//     FP8         groups of 128 columns: scales [row] of 4 bytes, and [k / 2][row][2] of 1 byte
#include <cstring>

#include "pack.h"

namespace kvasir {
namespace {

constexpr int64_t LINE = 64;

// GGML's tensor types, and one of our own: blocks of a float32 scale and 128 E4M3.
enum Source : int32_t { SOURCE_F32 = 0, SOURCE_F16 = 1, SOURCE_BF16 = 30, SOURCE_FP8 = 1000 };

int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

template <typename To, typename From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "To and From have the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Conversions work on bits, so that they depend neither on flushed denormals nor on quiet versus signaling NaNs.
uint32_t f16_to_f32(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u) return sign | ((magnitude << 13) + 0x38000000u);
    return sign | same_bits<uint32_t>(static_cast<float>(magnitude) * 5.9604644775390625e-8f);  // denormal: exact
}

uint16_t f32_to_bf16(uint32_t bits) {  // to nearest, ties to even
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <int32_t FROM, int32_t TO>
struct Convert;

template <>
struct Convert<SOURCE_F32, FORMAT_F32> {
    using From = uint32_t;
    using To = uint32_t;
    static To of(From bits) { return bits; }
};
template <>
struct Convert<SOURCE_F16, FORMAT_F32> {
    using From = uint16_t;
    using To = uint32_t;
    static To of(From bits) { return f16_to_f32(bits); }
};
template <>
struct Convert<SOURCE_BF16, FORMAT_F32> {
    using From = uint16_t;
    using To = uint32_t;
    static To of(From bits) { return static_cast<uint32_t>(bits) << 16; }
};
template <>
struct Convert<SOURCE_F16, FORMAT_F16> {
    using From = uint16_t;
    using To = uint16_t;
    static To of(From bits) { return bits; }
};
template <>
struct Convert<SOURCE_F32, FORMAT_BF16> {
    using From = uint32_t;
    using To = uint16_t;
    static To of(From bits) { return f32_to_bf16(bits); }
};
template <>
struct Convert<SOURCE_F16, FORMAT_BF16> {
    using From = uint16_t;
    using To = uint16_t;
    static To of(From bits) { return f32_to_bf16(f16_to_f32(bits)); }
};
template <>
struct Convert<SOURCE_BF16, FORMAT_BF16> {
    using From = uint16_t;
    using To = uint16_t;
    static To of(From bits) { return bits; }
};

// Writes one row's segment into its lane of a panel. The source is a file's row and may be unaligned.
template <typename C, int64_t GROUP>
void spread(typename C::To* lane, const uint8_t* row, int64_t cols) {
    for (int64_t k = 0; k < cols; ++k) {
        typename C::From value;
        std::memcpy(&value, row + k * static_cast<int64_t>(sizeof value), sizeof value);
        lane[k / GROUP * GROUP * PANEL + k % GROUP] = C::of(value);
    }
}

template <int32_t FROM, int32_t TO>
void pack_panels(const Matrix& m, const uint8_t* rows, int64_t row_bytes, int64_t first_row, int64_t num_rows) {
    using C = Convert<FROM, TO>;
    constexpr int64_t GROUP = TO == FORMAT_BF16 ? 2 : 1;
    constexpr int64_t BLOCK = 64;  // columns; the output of one block stays in L1 until it is complete
    const int64_t bytes = panel_bytes(m), cols = m.cols / m.segments;
    uint8_t* data = const_cast<uint8_t*>(m.data) + first_row / PANEL * bytes;
    for (int64_t first = 0; first < num_rows; first += PANEL, data += bytes) {
        const int64_t count = num_rows - first < PANEL ? num_rows - first : PANEL;
        if (count < PANEL || cols % GROUP != 0) std::memset(data, 0, static_cast<size_t>(bytes));
        for (int64_t s = 0; s < m.segments; ++s) {
            auto* to = reinterpret_cast<typename C::To*>(data) + s * segment_cols(m) * PANEL;
            const uint8_t* from = rows + first * row_bytes + s * cols * static_cast<int64_t>(sizeof(typename C::From));
            for (int64_t k = 0; k < cols; k += BLOCK) {
                const int64_t width = cols - k < BLOCK ? cols - k : BLOCK;
                for (int64_t r = 0; r < count; ++r) {
                    spread<C, GROUP>(to + k * PANEL + r * GROUP,
                                     from + r * row_bytes + k * static_cast<int64_t>(sizeof(typename C::From)), width);
                }
            }
        }
    }
}

// Blocks of 4 + 128 bytes.
void pack_fp8(const Matrix& m, const uint8_t* rows, int64_t row_bytes, int64_t first_row, int64_t num_rows) {
    const int64_t group = group_of(FORMAT_FP8), bytes = panel_bytes(m), groups = m.cols / group;
    uint8_t* data = const_cast<uint8_t*>(m.data) + first_row / PANEL * bytes;
    for (int64_t first = 0; first < num_rows; first += PANEL, data += bytes) {
        const int64_t count = num_rows - first < PANEL ? num_rows - first : PANEL;
        if (count < PANEL) std::memset(data, 0, static_cast<size_t>(bytes));
        for (int64_t r = 0; r < count; ++r) {
            const uint8_t* from = rows + (first + r) * row_bytes;
            uint8_t* to = data;
            for (int64_t g = 0; g < groups; ++g, from += 4 + group, to += FP8_SCALES + group * PANEL) {
                std::memcpy(to + 4 * r, from, 4);
                for (int64_t k = 0; k < group; k += 2) {
                    std::memcpy(to + FP8_SCALES + k * PANEL + 2 * r, from + 4 + k, 2);
                }
            }
        }
    }
}

}  // namespace

int64_t panel_bytes_float(const Matrix& m) {
    if (m.format == FORMAT_FP8) {
        return padded_cols(m) / group_of(FORMAT_FP8) * (FP8_SCALES + group_of(FORMAT_FP8) * PANEL);
    }
    return whole_lines(padded_cols(m) * PANEL * (m.format == FORMAT_F32 ? 4 : 2));
}

int64_t activated_bytes_float(const Matrix& m) {
    return whole_lines(padded_cols(m) * (m.activation == ACT_BF16 ? 2 : 4));
}

int32_t format_of_float(int32_t ggml_type) {
    switch (ggml_type) {
        case SOURCE_F32: return FORMAT_F32;
        case SOURCE_F16: return FORMAT_F16;
        case SOURCE_BF16: return FORMAT_BF16;
        case SOURCE_FP8: return FORMAT_FP8;
        default: return -1;
    }
}

int32_t pack_float(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
                   int64_t num_rows) {
    if (source == SOURCE_FP8 && m.format == FORMAT_FP8) {
        if (m.cols % (m.segments * group_of(FORMAT_FP8)) != 0) return -1;
        pack_fp8(m, rows, row_bytes, first_row, num_rows);
        return 0;
    }
    if (source == SOURCE_BF16 && m.format == FORMAT_BF16 && m.cols / m.segments % 2 == 0) {
        // Pairs of bfloat16 have the layout of half as many float32 columns; moving whole pairs is twice as fast.
        const Matrix pairs = {FORMAT_F32, m.activation, m.segments, 0, m.rows, m.cols / 2, m.data};
        pack_panels<SOURCE_F32, FORMAT_F32>(pairs, rows, row_bytes, first_row, num_rows);
        return 0;
    }
#define KVASIR_PACK(FROM, TO)                                            \
    if (source == FROM && m.format == TO) {                              \
        pack_panels<FROM, TO>(m, rows, row_bytes, first_row, num_rows); \
        return 0;                                                        \
    }
    KVASIR_PACK(SOURCE_F32, FORMAT_F32)
    KVASIR_PACK(SOURCE_F16, FORMAT_F32)
    KVASIR_PACK(SOURCE_BF16, FORMAT_F32)
    KVASIR_PACK(SOURCE_F16, FORMAT_F16)
    KVASIR_PACK(SOURCE_F32, FORMAT_BF16)
    KVASIR_PACK(SOURCE_F16, FORMAT_BF16)
    KVASIR_PACK(SOURCE_BF16, FORMAT_BF16)
#undef KVASIR_PACK
    return -1;
}

}  // namespace kvasir
