// The vectors of simd.h in plain C++, lane by lane. Included there alone.
#pragma once

namespace kvasir {
namespace KVASIR_ISA {

struct f32x16 {
    float v[LANES];
};
struct i32x16 {
    int32_t v[LANES];
};
struct u8x64 {
    uint8_t v[64];
};
struct u16x32 {
    uint16_t v[32];
};
struct mask16 {
    bool v[LANES];
};

#define KVASIR_EACH for (int64_t i = 0; i < LANES; ++i)

KVASIR_INLINE f32x16 broadcast(float value) {
    f32x16 a;
    KVASIR_EACH a.v[i] = value;
    return a;
}
KVASIR_INLINE f32x16 load(const float* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
KVASIR_INLINE void store(float* to, f32x16 a) { KVASIR_EACH to[i] = a.v[i]; }
KVASIR_INLINE f32x16 add(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] += b.v[i];
    return a;
}
KVASIR_INLINE f32x16 sub(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] -= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 mul(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] *= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 div(f32x16 a, f32x16 b) {
    KVASIR_EACH a.v[i] /= b.v[i];
    return a;
}
KVASIR_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    KVASIR_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}
// Where denormals are flushed, products are, but a comparison and a choice are not, unlike the instructions that some
// compilers make of them. The compiler must not see that the factor is 1.
KVASIR_INLINE f32x16 flushed(f32x16 a) {
    float one = 1.0f;
    __asm__("" : "+m"(one));
    KVASIR_EACH a.v[i] *= one;
    return a;
}
KVASIR_INLINE f32x16 min(f32x16 a, f32x16 b) {
    KVASIR_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return flushed(b);
}
KVASIR_INLINE f32x16 max(f32x16 a, f32x16 b) {
    KVASIR_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return flushed(b);
}
KVASIR_INLINE f32x16 sqrt(f32x16 a) {
    KVASIR_EACH a.v[i] = __builtin_sqrtf(a.v[i]);
    return a;
}
KVASIR_INLINE f32x16 abs(f32x16 a) {
    KVASIR_EACH a.v[i] = __builtin_fabsf(a.v[i]);
    return a;
}
KVASIR_INLINE f32x16 round(f32x16 a) {  // to the nearest integer, halves to even
    KVASIR_EACH a.v[i] = __builtin_rintf(a.v[i]);
    return a;
}
KVASIR_INLINE mask16 less(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] < b.v[i];
    return m;
}
KVASIR_INLINE mask16 less_equal(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] <= b.v[i];
    return m;
}
KVASIR_INLINE mask16 unordered(f32x16 a, f32x16 b) {
    mask16 m;
    KVASIR_EACH m.v[i] = a.v[i] != a.v[i] || b.v[i] != b.v[i];
    return m;
}
KVASIR_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
    KVASIR_EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
    return no;
}
KVASIR_INLINE bool any(mask16 m) {
    bool found = false;
    KVASIR_EACH found = found || m.v[i];
    return found;
}
// Lanes 0 to count - 1, count in 0 to 16.
KVASIR_INLINE mask16 first_lanes(int64_t count) {
    mask16 m;
    KVASIR_EACH m.v[i] = i < count;
    return m;
}
// The first `count` (1 to 15) floats, zeros in the other lanes; memory after them is not touched.
KVASIR_INLINE f32x16 load_first(const float* from, int64_t count) {
    f32x16 a = broadcast(0.0f);
    for (int64_t i = 0; i < count; ++i) a.v[i] = from[i];
    return a;
}
KVASIR_INLINE void store_first(float* to, f32x16 a, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = a.v[i];
}

KVASIR_INLINE i32x16 broadcast_i32(int32_t value) {
    i32x16 a;
    KVASIR_EACH a.v[i] = value;
    return a;
}
KVASIR_INLINE i32x16 load(const int32_t* from) {
    i32x16 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
KVASIR_INLINE void store(int32_t* to, i32x16 a) { std::memcpy(to, a.v, sizeof a.v); }
KVASIR_INLINE i32x16 add(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 sub(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 mul(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i]));
    return a;
}
KVASIR_INLINE i32x16 bit_and(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] &= b.v[i];
    return a;
}
KVASIR_INLINE i32x16 bit_or(i32x16 a, i32x16 b) {
    KVASIR_EACH a.v[i] |= b.v[i];
    return a;
}
template <int N>
KVASIR_INLINE i32x16 shift_left(i32x16 a) {
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
    return a;
}
template <int N>
KVASIR_INLINE i32x16 shift_right(i32x16 a) {  // of unsigned words
    KVASIR_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N);
    return a;
}
KVASIR_INLINE f32x16 to_float(i32x16 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = static_cast<float>(a.v[i]);
    return b;
}
// The nearest integers, halves to even; INT32_MIN for what does not fit and for NaN.
KVASIR_INLINE i32x16 to_int(f32x16 a) {
    i32x16 b;
    KVASIR_EACH {
        const float r = __builtin_rintf(a.v[i]);
        b.v[i] = r >= -2147483648.0f && r < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
    }
    return b;
}
KVASIR_INLINE f32x16 bits_to_float(i32x16 a) {
    f32x16 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}
KVASIR_INLINE i32x16 float_to_bits(f32x16 a) {
    i32x16 b;
    std::memcpy(b.v, a.v, sizeof b.v);
    return b;
}
// 16 bytes to words.
KVASIR_INLINE i32x16 load_u8(const uint8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
KVASIR_INLINE i32x16 load_i8(const int8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[i];
    return a;
}
// 32 bytes to pairs of int16 in words.
KVASIR_INLINE i32x16 load_u8_pairs(const uint8_t* from) {
    i32x16 a;
    KVASIR_EACH a.v[i] = from[2 * i] | from[2 * i + 1] << 16;
    return a;
}
// Words in [-128, 127] to 16 bytes.
KVASIR_INLINE void store_i8(int8_t* to, i32x16 a) { KVASIR_EACH to[i] = static_cast<int8_t>(a.v[i]); }

KVASIR_INLINE float f32_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
KVASIR_INLINE uint32_t bits_of_f32(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
// Half precision by integers and one exact product, so that flushed denormals do not matter.
KVASIR_INLINE float f16_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return f32_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return f32_of_bits(sign | ((magnitude << 13) + 0x38000000u));
    return f32_of_bits(sign | bits_of_f32(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}
KVASIR_INLINE uint16_t float_to_f16(float value) {  // to the nearest, halves to even
    const uint32_t bits = bits_of_f32(value);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {
        const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
        return static_cast<uint16_t>(sign | (rounded >> 13));
    }
    const float scaled = f32_of_bits(magnitude) * 16777216.0f;  // in units of the least denormal
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(scaled)));
}
KVASIR_INLINE f32x16 load_bf16(const uint16_t* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = f32_of_bits(static_cast<uint32_t>(from[i]) << 16);
    return a;
}
KVASIR_INLINE f32x16 load_f16(const uint16_t* from) {
    f32x16 a;
    KVASIR_EACH a.v[i] = f16_to_float(from[i]);
    return a;
}
KVASIR_INLINE void store_f16(uint16_t* to, f32x16 a) { KVASIR_EACH to[i] = float_to_f16(a.v[i]); }
// The low halves of 16 words, as 16-bit numbers.
KVASIR_INLINE void store_low16(uint16_t* to, i32x16 a) { KVASIR_EACH to[i] = static_cast<uint16_t>(a.v[i]); }

KVASIR_INLINE u8x64 load(const uint8_t* from) {
    u8x64 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
KVASIR_INLINE u8x64 broadcast_u8(uint8_t value) {
    u8x64 a;
    std::memset(a.v, value, sizeof a.v);
    return a;
}
KVASIR_INLINE u8x64 bit_and(u8x64 a, u8x64 b) {
    for (int i = 0; i < 64; ++i) a.v[i] &= b.v[i];
    return a;
}
KVASIR_INLINE u8x64 bit_or(u8x64 a, u8x64 b) {
    for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
    return a;
}
// Shifts of 16-bit units: bits cross between the two bytes of a unit, so mask before or after.
template <int N>
KVASIR_INLINE u8x64 shift_left16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        const unsigned unit = (a.v[i] | a.v[i + 1] << 8) << N;
        a.v[i] = static_cast<uint8_t>(unit);
        a.v[i + 1] = static_cast<uint8_t>(unit >> 8);
    }
    return a;
}
template <int N>
KVASIR_INLINE u8x64 shift_right16(u8x64 a) {
    for (int i = 0; i < 64; i += 2) {
        const unsigned unit = static_cast<unsigned>(a.v[i] | a.v[i + 1] << 8) >> N;
        a.v[i] = static_cast<uint8_t>(unit);
        a.v[i + 1] = static_cast<uint8_t>(unit >> 8);
    }
    return a;
}
// table[a & 15] for each byte, which must be below 128.
KVASIR_INLINE u8x64 lookup(const uint8_t* table16, u8x64 a) {
    for (int i = 0; i < 64; ++i) a.v[i] = table16[a.v[i] & 15];
    return a;
}
// acc[row] + the sum over c of w[row][c] * x[c], x: four int8 in one word. Exact. MAX_WEIGHT bounds w.
template <int MAX_WEIGHT>
KVASIR_INLINE i32x16 dot(i32x16 acc, u8x64 w, int32_t x) {
    int8_t xs[4];
    std::memcpy(xs, &x, sizeof xs);
    KVASIR_EACH {
        for (int c = 0; c < 4; ++c) acc.v[i] += w.v[4 * i + c] * xs[c];
    }
    return acc;
}
// acc[row] + w[row][0] * x[0] + w[row][1] * x[1] of int16 pairs in words. Exact where it fits.
KVASIR_INLINE i32x16 dot_i16(i32x16 acc, i32x16 w, int32_t x) {
    int16_t xs[2], ws[2];
    std::memcpy(xs, &x, sizeof xs);
    KVASIR_EACH {
        std::memcpy(ws, &w.v[i], sizeof ws);
        acc.v[i] += ws[0] * xs[0] + ws[1] * xs[1];
    }
    return acc;
}

KVASIR_INLINE u16x32 load_pairs(const uint16_t* from) {
    u16x32 a;
    std::memcpy(a.v, from, sizeof a.v);
    return a;
}
// 32 E4M3 as bfloat16, exact; 480 for NaN.
KVASIR_INLINE u16x32 load_e4m3(const uint8_t* from) {
    u16x32 a;
    for (int i = 0; i < 32; ++i) {
        const int size = from[i] & 0x7f, number = size < 8 ? E4M3_DENORMALS[size] : (size << 4) + 0x3c00;
        a.v[i] = static_cast<uint16_t>((from[i] & 0x80) << 8 | number);
    }
    return a;
}
// The even (x[0]) and the odd (x[1]) bfloat16 of each pair as float32.
KVASIR_INLINE f32x16 even_bf16(u16x32 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = f32_of_bits(static_cast<uint32_t>(a.v[2 * i]) << 16);
    return b;
}
KVASIR_INLINE f32x16 odd_bf16(u16x32 a) {
    f32x16 b;
    KVASIR_EACH b.v[i] = f32_of_bits(static_cast<uint32_t>(a.v[2 * i + 1]) << 16);
    return b;
}

// The greatest lane; unspecified where a lane is NaN.
KVASIR_INLINE float greatest(f32x16 a) {
    float most = a.v[0];
    for (int64_t i = 1; i < LANES; ++i) most = most > a.v[i] ? most : a.v[i];
    return most;
}
// The sum of all lanes.
KVASIR_INLINE int32_t total(i32x16 a) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < LANES; ++i) sum += static_cast<uint32_t>(a.v[i]);
    return static_cast<int32_t>(sum);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
