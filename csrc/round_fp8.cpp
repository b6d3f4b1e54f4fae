// Rows rounded to E4M3 with the scales of a checkpoint, as compressed-tensors does it: x / scale, clamped, to the nearest
// number with halves to even, times scale. A value that is not finite becomes NaN.
#include "input_rule.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr float GREATEST = 448.0f;

// v in [-448, 448].
KVASIR_INLINE f32x16 nearest_e4m3(f32x16 v) {
    const f32x16 size = abs(v);
    const i32x16 bits = float_to_bits(size), odd = bit_and(shift_right<20>(bits), broadcast_i32(1));
    const i32x16 up = add(bits, add(odd, broadcast_i32(0x7ffff)));
    const f32x16 normal = bits_to_float(bit_and(up, broadcast_i32(~0xfffff)));
    const f32x16 small = mul(round(mul(size, broadcast(512.0f))), broadcast(1.0f / 512.0f));  // multiples of 2^-9
    const f32x16 number = select(less(size, broadcast(0x1p-6f)), small, normal);
    const i32x16 sign = bit_and(float_to_bits(v), broadcast_i32(INT32_MIN));
    return bits_to_float(bit_or(float_to_bits(number), sign));
}

// cols is a multiple of 16.
void round_columns(float* x, int64_t cols, float scale) {
    if (scale == 0.0f) {
        f32x16 largest = broadcast(0.0f);
        for (int64_t k = 0; k < cols; k += LANES) largest = max(abs(load(x + k)), largest);
        scale = greatest(largest) / GREATEST;
    }
    const bool empty = scale < 1.17549435e-38f;  // the least normal float
    const f32x16 divisor = broadcast(empty ? 1.0f : scale), factor = broadcast(empty ? 0.0f : scale);
    for (int64_t k = 0; k < cols; k += LANES) {
        const f32x16 v = load(x + k), poison = mul(v, broadcast(0.0f));
        const f32x16 clamped = max(min(div(v, divisor), broadcast(GREATEST)), broadcast(-GREATEST));
        store(x + k, add(mul(nearest_e4m3(clamped), factor), poison));
    }
}

}  // namespace

void round_fp8(const Matrix& m, const InputRule& rule, uint8_t* activated, int64_t rows) {
    const int64_t bytes = activated_bytes(m), cols = padded_cols(m), group = rule.group > 0 ? rule.group : cols;
    for (int64_t r = 0; r < rows; ++r) {
        float* row = reinterpret_cast<float*>(activated + r * bytes);
        for (int64_t k = 0; k < cols; k += group) {
            round_columns(row + k, cols - k < group ? cols - k : group, rule.scale);
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
