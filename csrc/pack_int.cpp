// Packs blocks of GGML files, or float rows, into the panels of int_formats.h. The numbers of GGML blocks are not
// changed, only reordered.
//
// Reference for the file formats: block_* in ggml-common.h and dequantize_row_* in ggml-quants.c of the ggml project.
#include "int_formats.h"
#include "pack.h"

#include <cmath>
#include <cstring>

namespace kvasir {
namespace {

// GGML's tensor types and their numbers in files.
enum GgmlType : int32_t {
    GGML_F32 = 0,
    GGML_F16 = 1,
    GGML_Q4_0 = 2,
    GGML_Q4_1 = 3,
    GGML_Q5_0 = 6,
    GGML_Q5_1 = 7,
    GGML_Q8_0 = 8,
    GGML_Q2_K = 10,
    GGML_Q3_K = 11,
    GGML_Q4_K = 12,
    GGML_Q5_K = 13,
    GGML_Q6_K = 14,
    GGML_IQ4_NL = 20,
    GGML_IQ4_XS = 23,
    GGML_BF16 = 30,
    GGML_TQ1_0 = 34,
    GGML_TQ2_0 = 35,
    GGML_MXFP4 = 39,
    GGML_NVFP4 = 40,
};

// This engine's own types, blocks of 64 weights of formats that checkpoints of safetensors have. A block is four bytes
// (a float32 scale, or a scale and a zero point or bias of 16 bits each) and 64 levels of a byte; of NVFP4 a float32
// scale, four E4M3 scales and 64 codes. Their numbers are in the order of the formats from FORMAT_INT4 on.
enum OwnType : int32_t {
    OWN_INT4 = 1001,
    OWN_NVFP4 = OWN_INT4 + FORMAT_NVFP4 - FORMAT_INT4,
};

// The 32 or 256 weights of one block of a row.
struct Weights {
    uint8_t level[256];
    uint8_t scale[16], minimum[16];  // super-blocks only
    uint16_t d, m;                   // float16 or bfloat16 bits: the scale, and the minimum or its scale
    uint8_t own[4];                  // groups of 64 only: the same as in the file
};

uint16_t half_at(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

// level |= field << shift. Each run of `width` bytes holds 8 / bits runs of `width` weights, the first in the lowest
// `bits` bits of each byte.
void add_fields(uint8_t* level, const uint8_t* packed, int bytes, int width, int bits, int shift) {
    const int mask = (1 << bits) - 1;
    for (int begin = 0; begin < bytes; begin += width) {
        for (int at = 0; at < 8; at += bits, level += width) {
            for (int i = 0; i < width; ++i) {
                level[i] = static_cast<uint8_t>(level[i] | (packed[begin + i] >> at & mask) << shift);
            }
        }
    }
}

void add_bits(uint8_t* level, const uint8_t* packed, int count, int shift) {
    for (int i = 0; i < count; ++i) {
        level[i] = static_cast<uint8_t>(level[i] | (packed[i / 8] >> i % 8 & 1) << shift);
    }
}

void read_32(Weights& w, int32_t type, const uint8_t* from) {
    if (type == GGML_MXFP4) {
        // Half of the E8M0 scale, 2^(e - 128), as bfloat16; it is denormal for e = 0 and 1.
        const int e = *from++;
        w.d = static_cast<uint16_t>(e >= 2 ? (e - 1) << 7 : 0x20 << e);
    } else {
        w.d = half_at(from);
        from += 2;
    }
    if (type == GGML_Q4_1 || type == GGML_Q5_1) {
        w.m = half_at(from);
        from += 2;
    }
    if (type == GGML_Q8_0) {
        for (int i = 0; i < 32; ++i) w.level[i] = from[i] ^ 0x80;
        return;
    }
    if (type == GGML_Q5_0 || type == GGML_Q5_1) {
        add_bits(w.level, from, 32, 4);
        from += 4;
    }
    add_fields(w.level, from, 16, 16, 4, 0);
}

// The size of an E4M3 number, with 5 bits of exponent instead of denormals.
uint8_t to_e5m3(uint8_t e4m3) {
    static const uint8_t denormal[8] = {0, 1 << 3, 2 << 3, 2 << 3 | 4, 3 << 3, 3 << 3 | 2, 3 << 3 | 4, 3 << 3 | 6};
    const uint8_t size = e4m3 & 0x7f;
    return size < 8 ? denormal[size] : static_cast<uint8_t>(size + (3 << 3));
}

// The scales of NVFP4: NaN means 0, and GGML ignores the sign. A negative scale changes the signs of the codes; with a
// scale of 0 they are zeros.
void read_fp4_scales(Weights& w, const uint8_t* scales, bool has_sign) {
    for (int s = 0; s < 4; ++s) {
        const bool is_nan = scales[s] == 0x7f || (has_sign && scales[s] == 0xff);
        const int sign = has_sign ? scales[s] >> 4 & 8 : 0;
        w.scale[s] = is_nan ? 0 : to_e5m3(scales[s]);
        for (int i = 16 * s; i < 16 * s + 16; ++i) {
            w.level[i] = w.scale[s] == 0 ? 0 : static_cast<uint8_t>(w.level[i] ^ sign);
        }
    }
}

void read_64(Weights& w, int32_t type, const uint8_t* from) {
    if (type == GGML_NVFP4) {
        const float half = 0.5f;
        std::memcpy(w.own, &half, sizeof half);
        add_fields(w.level, from + 4, 32, 8, 4, 0);
        return read_fp4_scales(w, from, false);
    }
    std::memcpy(w.own, from, sizeof w.own);
    std::memcpy(w.level, from + (type == OWN_NVFP4 ? 8 : 4), 64);
    if (type == OWN_NVFP4) {
        float scale;
        std::memcpy(&scale, from, sizeof scale);
        scale *= 0.5f;
        std::memcpy(w.own, &scale, sizeof scale);
        read_fp4_scales(w, from + 4, true);
    }
}

// The 8 scales and 8 minima of Q4_K and Q5_K, 6 bits each. The upper two bits of the last four of each are stored
// separately.
void read_six_bits(Weights& w, const uint8_t* from) {
    for (int i = 0; i < 4; ++i) {
        w.scale[i] = from[i] & 63;
        w.minimum[i] = from[4 + i] & 63;
        w.scale[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 2 & 48));
        w.minimum[4 + i] = static_cast<uint8_t>(from[8 + i] >> 4 | (from[4 + i] >> 2 & 48));
    }
}

void read_q2_k(Weights& w, const uint8_t* from) {
    for (int i = 0; i < 16; ++i) {
        w.scale[i] = from[i] & 15;
        w.minimum[i] = from[i] >> 4;
    }
    add_fields(w.level, from + 16, 64, 32, 2, 0);
    w.d = half_at(from + 80);
    w.m = half_at(from + 82);
}

void read_q3_k(Weights& w, const uint8_t* from) {
    add_fields(w.level, from, 32, 32, 1, 2);
    add_fields(w.level, from + 32, 64, 32, 2, 0);
    const uint8_t* scales = from + 96;
    for (int i = 0; i < 16; ++i) {
        const int low = scales[i % 8] >> (i / 8 * 4) & 15, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        w.scale[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    w.d = half_at(from + 108);
}

void read_q4_k(Weights& w, const uint8_t* from) {
    w.d = half_at(from);
    w.m = half_at(from + 2);
    read_six_bits(w, from + 4);
    add_fields(w.level, from + 16, 128, 32, 4, 0);
}

void read_q5_k(Weights& w, const uint8_t* from) {
    w.d = half_at(from);
    w.m = half_at(from + 2);
    read_six_bits(w, from + 4);
    add_fields(w.level, from + 16, 32, 32, 1, 4);
    add_fields(w.level, from + 48, 128, 32, 4, 0);
}

void read_q6_k(Weights& w, const uint8_t* from) {
    add_fields(w.level, from, 128, 64, 4, 0);
    add_fields(w.level, from + 128, 64, 32, 2, 4);
    std::memcpy(w.scale, from + 192, 16);
    w.d = half_at(from + 208);
}

void read_iq4_xs(Weights& w, const uint8_t* from) {
    w.d = half_at(from);
    const int high = half_at(from + 2);
    for (int i = 0; i < 8; ++i) {
        const int low = from[4 + i / 2] >> (i % 2 * 4) & 15;
        w.scale[i] = static_cast<uint8_t>((low | (high >> 2 * i & 3) << 4) - 32);
    }
    add_fields(w.level, from + 8, 128, 16, 4, 0);
}

// A byte holds five ternary digits as a base-3 fraction. Digit k of adjacent bytes belongs to adjacent weights.
void read_tq1_0(Weights& w, const uint8_t* from) {
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    uint8_t* level = w.level;
    const auto digits = [&](const uint8_t* packed, int bytes, int count) {
        for (int k = 0; k < count; ++k) {
            for (int i = 0; i < bytes; ++i) {
                *level++ = static_cast<uint8_t>((packed[i] * power[k] & 255) * 3 >> 8);
            }
        }
    };
    digits(from, 32, 5);
    digits(from + 32, 16, 5);
    digits(from + 48, 4, 4);
    w.d = half_at(from + 52);
}

// Two-bit codes. Code 3, which no encoder writes and which means +2, is not a ternary digit but fits the two-bit level.
void read_tq2_0(Weights& w, const uint8_t* from) {
    add_fields(w.level, from, 64, 32, 2, 0);
    w.d = half_at(from + 64);
}

void read_256(Weights& w, int32_t type, const uint8_t* from) {
    switch (type) {
        case GGML_Q2_K: return read_q2_k(w, from);
        case GGML_Q3_K: return read_q3_k(w, from);
        case GGML_Q4_K: return read_q4_k(w, from);
        case GGML_Q5_K: return read_q5_k(w, from);
        case GGML_Q6_K: return read_q6_k(w, from);
        case GGML_IQ4_XS: return read_iq4_xs(w, from);
        case GGML_TQ1_0: return read_tq1_0(w, from);
        default: return read_tq2_0(w, from);
    }
}

int64_t block_bytes_of(int32_t type) {
    switch (type) {
        case GGML_Q4_0: return 18;
        case GGML_Q4_1: return 20;
        case GGML_Q5_0: return 22;
        case GGML_Q5_1: return 24;
        case GGML_Q8_0: return 34;
        case GGML_Q2_K: return 84;
        case GGML_Q3_K: return 110;
        case GGML_Q4_K: return 144;
        case GGML_Q5_K: return 176;
        case GGML_Q6_K: return 210;
        case GGML_IQ4_NL: return 18;
        case GGML_IQ4_XS: return 136;
        case GGML_TQ1_0: return 54;
        case GGML_TQ2_0: return 66;
        case GGML_MXFP4: return 17;
        case GGML_NVFP4: return 36;
        case OWN_NVFP4: return 72;
        default: return 68;  // our own
    }
}

// ---- Float rows -----------------------------------------------------------------------------------------------------

float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x400u) return float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
    return float_of_bits(sign | bits_of_float(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

uint16_t half_of_float(float value) {  // to nearest, ties to even
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {
        return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
    }
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(float_of_bits(magnitude) * 16777216.0f)));
}

float float_at(int32_t type, const uint8_t* from, int64_t i) {
    if (type == GGML_F32) {
        float value;
        std::memcpy(&value, from + 4 * i, sizeof value);
        return value;
    }
    const uint16_t half = half_at(from + 2 * i);
    return type == GGML_F16 ? float_of_half(half) : float_of_bits(static_cast<uint32_t>(half) << 16);
}

// The value clamped to [low, high] and truncated to an integer; `low` for NaN.
uint8_t level_of(float value, float low, float high) {
    const float level = value > low ? value < high ? value : high : low;
    return static_cast<uint8_t>(static_cast<int32_t>(level));
}

// The same as GGML: the largest magnitude becomes 127, ties round away from 0.
void quantize_q8_0(Weights& w, const float* x) {
    float max_abs = 0.0f;
    for (int i = 0; i < 32; ++i) max_abs = std::fabs(x[i]) > max_abs ? std::fabs(x[i]) : max_abs;
    const float d = max_abs / 127.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    w.d = half_of_float(d);
    for (int i = 0; i < 32; ++i) w.level[i] = level_of(std::round(x[i] * inverse) + 128.0f, 0.0f, 255.0f);
}

// The same as GGML: the weight of largest magnitude becomes level 0, which means -8.
void quantize_q4_0(Weights& w, const float* x) {
    float extreme = 0.0f;
    for (int i = 0; i < 32; ++i) extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme;
    const float d = extreme / -8.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    w.d = half_of_float(d);
    for (int i = 0; i < 32; ++i) w.level[i] = level_of(x[i] * inverse + 8.5f, 0.0f, 15.0f);
}

bool is_float(int32_t type) { return type == GGML_F32 || type == GGML_F16 || type == GGML_BF16; }

// ---- Blocks of panels -----------------------------------------------------------------------------------------------

// Writes bits [shift, shift + bits) of a row's levels to a plane.
void place_plane(uint8_t* plane, const uint8_t* level, int cols, int row, int bits, int shift) {
    if (bits == 0) return;
    const int per = 8 / bits;
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1u);
    for (int first = 0; first < cols; first += 4 * per, plane += 64) {
        uint32_t packed = 0;
        for (int j = 0; j < per; ++j) {
            uint32_t four;
            std::memcpy(&four, level + first + 4 * j, sizeof four);
            packed |= (four >> shift & mask) << j * bits;
        }
        std::memcpy(plane + 4 * row, &packed, sizeof packed);
    }
}

void place_half(uint8_t* to, uint16_t half) { std::memcpy(to, &half, sizeof half); }

// The scales of a group of 64.
void place_own(const IntLayout& l, uint8_t* block, int row, const Weights& w) {
    if (l.scale == SCALE_E5M3) {
        for (int s = 0; s < 4; ++s) block[l.scales + 16 * s + row] = w.scale[s];
        std::memcpy(block + l.d + 4 * row, w.own, 4);
    } else if (l.scale == SCALE_F32) {
        std::memcpy(block + l.scales + 4 * row, w.own, 4);
    } else {
        std::memcpy(block + l.scales + 2 * row, w.own, 2);
        std::memcpy(block + l.minima + 2 * row, w.own + 2, 2);
    }
}

// Writes one row's weights, a group of `cols`, to a block, from column `first` on. In both planes, a group of 32 starts
// at a multiple of 64 bytes.
void place(const IntLayout& l, uint8_t* block, int row, int first, int cols, const Weights& w) {
    place_plane(block + l.low + 2 * first * l.low_bits, w.level, cols, row, l.low_bits, 0);
    place_plane(block + l.high + 2 * first * l.high_bits, w.level, cols, row, l.high_bits, l.low_bits);
    if (cols == 64) return place_own(l, block, row, w);
    if (cols == 32) {
        place_half(block + l.scales + first + 2 * row, w.d);
        if (l.minimum) place_half(block + l.minima + first + 2 * row, w.m);
        return;
    }
    place_half(block + l.d + 2 * row, w.d);
    if (l.minimum) place_half(block + l.dmin + 2 * row, w.m);
    for (int s = 0; s < 256 / l.sub && l.scale != SCALE_ONE; ++s) {
        const int pair = 32 * (s / 2) + 2 * row + s % 2;
        if (l.scale == SCALE_NIBBLES) {
            block[l.scales + pair] = static_cast<uint8_t>(w.scale[s] | w.minimum[s] << 4);
        } else {
            block[l.scales + 16 * s + row] = w.scale[s];
            if (l.minimum) block[l.minima + pair] = w.minimum[s];
        }
    }
}

// Packs one row of a panel from a file's blocks.
void pack_blocks(const Matrix& m, const IntLayout& l, int32_t source, const uint8_t* from, uint8_t* panel, int row) {
    const int64_t group = group_of(m.format), groups = m.cols / m.segments / group, per = l.cols / group;
    for (int64_t s = 0; s < m.segments; ++s, panel += int_blocks(m) * l.bytes) {
        for (int64_t g = 0; g < groups; ++g, from += block_bytes_of(source)) {
            Weights w = {};
            if (group == 32) read_32(w, source, from);
            else if (group == 64) read_64(w, source, from);
            else read_256(w, source, from);
            place(l, panel + g / per * l.bytes, row, static_cast<int>(g % per * group), static_cast<int>(group), w);
        }
    }
}

// Packs one row of a panel from floats, padding each segment with zeros.
void pack_floats(const Matrix& m, const IntLayout& l, int32_t source, const uint8_t* from, uint8_t* panel, int row) {
    const int64_t cols = m.cols / m.segments;
    for (int64_t s = 0; s < m.segments; ++s, panel += int_blocks(m) * l.bytes) {
        for (int64_t first = 0; first < cols; first += 32) {
            float x[32] = {};
            for (int64_t i = 0; i < 32 && first + i < cols; ++i) x[i] = float_at(source, from, s * cols + first + i);
            Weights w = {};
            if (m.format == FORMAT_Q8_0) quantize_q8_0(w, x);
            else quantize_q4_0(w, x);
            place(l, panel + first / 64 * l.bytes, row, static_cast<int>(first % 64), 32, w);
        }
    }
}

bool fits(const Matrix& m, int32_t source) {
    if (is_float(source)) return m.format == FORMAT_Q8_0 || m.format == FORMAT_Q4_0;
    return format_of_int(source) == m.format && m.cols % (m.segments * group_of(m.format)) == 0;
}

}  // namespace

int64_t panel_bytes_int(const Matrix& m) { return int_panel_bytes(m); }

int64_t activated_bytes_int(const Matrix& m) { return int_activated_bytes(m); }

int32_t format_of_int(int32_t ggml_type) {
    if (ggml_type >= OWN_INT4 && ggml_type <= OWN_NVFP4) return FORMAT_INT4 + ggml_type - OWN_INT4;
    switch (ggml_type) {
        case GGML_Q4_0: return FORMAT_Q4_0;
        case GGML_Q4_1: return FORMAT_Q4_1;
        case GGML_Q5_0: return FORMAT_Q5_0;
        case GGML_Q5_1: return FORMAT_Q5_1;
        case GGML_Q8_0: return FORMAT_Q8_0;
        case GGML_Q2_K: return FORMAT_Q2_K;
        case GGML_Q3_K: return FORMAT_Q3_K;
        case GGML_Q4_K: return FORMAT_Q4_K;
        case GGML_Q5_K: return FORMAT_Q5_K;
        case GGML_Q6_K: return FORMAT_Q6_K;
        case GGML_IQ4_NL: return FORMAT_IQ4_NL;
        case GGML_IQ4_XS: return FORMAT_IQ4_XS;
        case GGML_TQ1_0: return FORMAT_TERNARY;
        case GGML_TQ2_0: return FORMAT_TERNARY;
        case GGML_MXFP4: return FORMAT_MXFP4;
        case GGML_NVFP4: return FORMAT_NVFP4;
        default: return -1;
    }
}

int32_t pack_int(const Matrix& m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
                 int64_t num_rows) {
    if (!fits(m, source)) return -1;
    const IntLayout& l = int_layout_of(m.format);
    const int64_t bytes = int_panel_bytes(m);
    uint8_t* panel = const_cast<uint8_t*>(m.data) + first_row / PANEL * bytes;
    for (int64_t r = 0; r < num_rows; ++r) {
        uint8_t* to = panel + r / PANEL * bytes;
        if (r % PANEL == 0) std::memset(to, 0, static_cast<size_t>(bytes));
        (is_float(source) ? pack_floats : pack_blocks)(m, l, source, rows + r * row_bytes, to,
                                                       static_cast<int>(r % PANEL));
    }
    return 0;
}

}  // namespace kvasir
