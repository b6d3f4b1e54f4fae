// Functions on the vectors of simd.h: exp, tanh, erf and softplus of our own, with the same bits on every instruction set.
#pragma once

#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {

// e^a to about one unit in the last place: 2^n * e^r with |r| <= ln(2) / 2 and a polynomial for e^r - 1 - r
// (minimax, as in Cephes). 0 below -87.3 (results would be denormal), infinity above 88.7, NaN for NaN.
KVASIR_INLINE f32x16 exp(f32x16 a) {
    const f32x16 x = min(max(a, broadcast(-104.0f)), broadcast(89.0f));
    const f32x16 n = round(mul(x, broadcast(1.44269504088896341f)));
    const f32x16 r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    f32x16 p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), broadcast(1.0f));
    // Two factors, since 2^n alone may not fit even if the product does.
    const i32x16 k = to_int(n);
    const i32x16 half = shift_right<1>(add(k, broadcast_i32(256)));  // (k + 256) / 2, which is positive
    const i32x16 rest = sub(k, sub(half, broadcast_i32(128)));
    const f32x16 first_factor = bits_to_float(shift_left<23>(add(half, broadcast_i32(127 - 128))));
    const f32x16 second_factor = bits_to_float(shift_left<23>(add(rest, broadcast_i32(127))));
    const f32x16 result = mul(mul(p, first_factor), second_factor);
    const f32x16 clamped = select(less(a, broadcast(-87.3365402f)), broadcast(0.0f), result);
    return select(unordered(a, a), a, clamped);
}

// a with the sign of b; a must not be negative.
KVASIR_INLINE f32x16 with_sign(f32x16 a, f32x16 b) {
    const i32x16 sign = bit_and(float_to_bits(b), broadcast_i32(INT32_MIN));
    return bits_to_float(bit_or(float_to_bits(a), sign));
}

// tanh to 1.4 units in the last place, odd to the bit. Near 0 a minimax polynomial for (tanh x - x) / x^3,
// farther out 1 - 2 / (e^2x + 1). NaN for NaN.
KVASIR_INLINE f32x16 tanh(f32x16 a) {
    const f32x16 x = abs(a), square = mul(x, x);
    f32x16 p = broadcast(-5.717044696e-3f);
    p = fma(p, square, broadcast(2.065058611e-2f));
    p = fma(p, square, broadcast(-5.374349654e-2f));
    p = fma(p, square, broadcast(1.333149076e-1f));
    p = fma(p, square, broadcast(-3.333328366e-1f));
    const f32x16 near = fma(mul(p, square), x, x);
    const f32x16 far = sub(broadcast(1.0f), div(broadcast(2.0f), add(exp(add(x, x)), broadcast(1.0f))));
    return select(unordered(a, a), a, with_sign(select(less(x, broadcast(0.625f)), near, far), a));
}

// erf to 1.2 units in the last place, odd to the bit. Below 1 a minimax polynomial for erf(x) / x - 1, above it
// one for -log(1 - erf(x)). NaN for NaN.
KVASIR_INLINE f32x16 erf(f32x16 a) {
    const f32x16 x = abs(a), square = mul(x, x);
    f32x16 p = broadcast(7.889122935e-5f);
    p = fma(p, square, broadcast(-8.020842215e-4f));
    p = fma(p, square, broadcast(5.189535674e-3f));
    p = fma(p, square, broadcast(-2.685444430e-2f));
    p = fma(p, square, broadcast(1.128360033e-1f));
    p = fma(p, square, broadcast(-3.761262596e-1f));
    p = fma(p, square, broadcast(1.283791661e-1f));
    const f32x16 near = fma(p, x, x);
    const f32x16 t = min(x, broadcast(4.0f));  // where erf is already 1
    f32x16 q = broadcast(-1.855740702e-4f);
    q = fma(q, t, broadcast(2.939607948e-3f));
    q = fma(q, t, broadcast(-2.180531994e-2f));
    q = fma(q, t, broadcast(1.030373722e-1f));
    q = fma(q, t, broadcast(6.382256746e-1f));
    q = fma(q, t, broadcast(1.127040029f));
    q = fma(q, t, broadcast(3.537187586e-4f));
    const f32x16 far = sub(broadcast(1.0f), exp(sub(broadcast(0.0f), q)));
    return select(unordered(a, a), a, with_sign(select(less(x, broadcast(1.0f)), near, far), a));
}

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)), by its series.
KVASIR_INLINE f32x16 softplus(f32x16 x) {
    const f32x16 y = exp(sub(broadcast(0.0f), abs(x)));
    const f32x16 s = div(y, add(broadcast(2.0f), y)), square = mul(s, s);
    f32x16 p = broadcast(1.0f / 15.0f);
    p = fma(p, square, broadcast(1.0f / 13.0f));
    p = fma(p, square, broadcast(1.0f / 11.0f));
    p = fma(p, square, broadcast(1.0f / 9.0f));
    p = fma(p, square, broadcast(1.0f / 7.0f));
    p = fma(p, square, broadcast(1.0f / 5.0f));
    p = fma(p, square, broadcast(1.0f / 3.0f));
    p = fma(p, square, broadcast(1.0f));
    const f32x16 sum = fma(mul(s, broadcast(2.0f)), p, max(x, broadcast(0.0f)));
    return select(unordered(x, x), x, sum);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
