// e^z and ln x in float64 with the roundings of the reference (numerics.py), and sums of token weights.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int FRACTION_BITS = 40;  // of a weight
constexpr double NO_WEIGHT = -28.5;   // e^-28.5 is 0.46 units of 2^-40: this z and all below give 0
constexpr double ROUNDER = 0x1.8p52;  // adding it rounds to an integer, ties to even, in the low bits
constexpr double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33, LOG2_E = 0x1.71547652b82fep+0;

const double EXP_TERMS[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                            1.0 / 24,     1.0 / 6,     1.0 / 2,    1.0,       1.0};
const double LOG_TERMS[] = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0};
constexpr int TERMS = 10;

#define KVASIR_UNROLL _Pragma("GCC unroll 16")

// e^z for z <= 0 as integers in units of 2^-40. Each vector is one long dependency chain, so N are interleaved.
template <int N>
KVASIR_INLINE void weights(i64x8 (&to)[N], const f64x8 (&from)[N]) {
    const f64x8 rounder = broadcast_f64(ROUNDER);
    f64x8 r[N], p[N];
    KVASIR_UNROLL for (int j = 0; j < N; ++j) {
        const f64x8 z = max(from[j], broadcast_f64(-30.0));
        const f64x8 rounded = add(mul(z, broadcast_f64(LOG2_E)), rounder);
        const f64x8 n = sub(rounded, rounder);
        r[j] = sub(sub(z, mul(n, broadcast_f64(LN2_HIGH))), mul(n, broadcast_f64(LN2_LOW)));
        to[j] = add(float_to_bits(rounded), broadcast_i64(1023 + FRACTION_BITS));  // the exponent, in the low bits
        p[j] = mul(r[j], broadcast_f64(EXP_TERMS[0]));
    }
    KVASIR_UNROLL for (int i = 1; i < TERMS - 1; ++i) {
        KVASIR_UNROLL for (int j = 0; j < N; ++j) p[j] = mul(add(p[j], broadcast_f64(EXP_TERMS[i])), r[j]);
    }
    KVASIR_UNROLL for (int j = 0; j < N; ++j) {
        p[j] = mul(add(p[j], broadcast_f64(EXP_TERMS[TERMS - 1])), bits_to_float(shift_left<52>(to[j])));
        to[j] = sub(float_to_bits(add(p[j], rounder)), float_to_bits(rounder));
    }
}

// The weights of x[i] to x[i + 31]; 0 from index `end` on.
KVASIR_INLINE void weights_at(i64x8 (&to)[4], const Logits& row, int64_t i, int64_t end, const Scale& scale) {
    const f32x16 a = load_within(row.x, i, end);
    const f32x16 b = i + LANES < end ? load_within(row.x, i + LANES, end) : broadcast(-INFINITE);
    const f64x8 z[4] = {scale.of(low_to_double(a)), scale.of(high_to_double(a)), scale.of(low_to_double(b)),
                        scale.of(high_to_double(b))};
    weights(to, z);
}

// The first digit of the key of each value.
KVASIR_INLINE i32x16 first_digits(f32x16 x) {
    const f32x16 zero = broadcast(0.0f), canonical = add(x, zero);
    const i32x16 top = shift_right<32 - DIGIT_BITS>(float_to_bits(canonical));
    const i32x16 negative = sub(broadcast_i32(DIGITS - 1), top), positive = add(top, broadcast_i32(DIGITS / 2));
    return float_to_bits(select(less(canonical, zero), bits_to_float(negative), bits_to_float(positive)));
}

}  // namespace

double log(double x) {
    const uint64_t bits = bits_as<uint64_t>(x);
    const int64_t above = static_cast<int64_t>(bits - 0x3fe6a09e667f3bcdu);  // offset from the bits of sqrt(1/2)
    const int64_t exponent = above >> 52;
    const double f = bits_as<double>(bits - (static_cast<uint64_t>(exponent) << 52)) - 1.0;
    const double s = f / (f + 2.0), square = s * s;
    double series = square * LOG_TERMS[0];
    for (int i = 1; i < TERMS - 1; ++i) series = (series + LOG_TERMS[i]) * square;
    series = (series + LOG_TERMS[TERMS - 1]) * s * 2.0;
    const double n = static_cast<double>(exponent);
    return series + n * LN2_LOW + n * LN2_HIGH;
}

double log_weight(int64_t weight) { return log(static_cast<double>(weight) * 0x1p-40); }

int64_t total_weight(const Logits& row, Range blocks, const Scale& scale) {
    i64x8 total = broadcast_i64(0);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        if (scale.of(row.maxima[b]) < NO_WEIGHT) continue;
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        for (int64_t i = begin; i < end; i += 2 * LANES) {
            i64x8 weight[4];
            weights_at(weight, row, i, end, scale);
            total = add(total, add(add(weight[0], weight[1]), add(weight[2], weight[3])));
        }
    }
    return sum(total);
}

Weighed weigh(int64_t* to, const double* z, int64_t count) {
    const f64x8 rounder = broadcast_f64(ROUNDER), least = broadcast_f64(-30.0);  // its weight is 0
    i64x8 total = broadcast_i64(0), surprise = broadcast_i64(0);
    for (int64_t i = 0; i < count; i += 32) {
        double padded[32];
        for (int64_t j = 0; count - i < 32 && j < 32; ++j) padded[j] = i + j < count ? z[i + j] : -30.0;
        const double* part = count - i < 32 ? padded : z + i;
        const f64x8 from[4] = {load_f64(part), load_f64(part + 8), load_f64(part + 16), load_f64(part + 24)};
        i64x8 weight[4];
        weights(weight, from);
        for (int j = 0; j < 4; ++j) {
            const f64x8 rounded = add(mul(to_double(weight[j]), sub(broadcast_f64(0.0), max(from[j], least))), rounder);
            total = add(total, weight[j]);
            surprise = add(surprise, sub(float_to_bits(rounded), float_to_bits(rounder)));
            store(to + i + 8 * j, weight[j]);
        }
    }
    return {sum(total), sum(surprise)};
}

int64_t weight_of(double z) {
    const f64x8 from[1] = {broadcast_f64(z)};
    i64x8 to[1];
    int64_t lane[8];
    weights(to, from);
    store(lane, to[0]);
    return lane[0];
}

double tree_sum(const double* x, int64_t count, double* work) {
    int64_t half = 1;
    while (2 * half < count) half *= 2;
    if (count < 2) return x[0];
    for (int64_t i = 0; i < half; ++i) work[i] = x[i] + (i + half < count ? x[i + half] : 0.0);
    for (half /= 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) work[i] += work[i + half];
    }
    return work[0];
}

int64_t weigh(Candidate* list, int64_t count, const Scale& scale) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t part = lesser(8, count - i);
        float x[LANES];
        for (int64_t j = 0; j < LANES; ++j) x[j] = j < part ? value_of(list[i + j].key) : -INFINITE;
        const f64x8 z[1] = {scale.of(low_to_double(load(x)))};
        i64x8 weight[1];
        weights(weight, z);
        int64_t lane[8];
        store(lane, weight[0]);
        for (int64_t j = 0; j < part; ++j) total += list[i + j].weight = lane[j];
    }
    return total;
}

void weigh_by_digit(int64_t (&sums)[DIGITS], const Logits& row, const Scale& scale) {
    constexpr int WAYS = 4;  // separate sums, since additions to the same digit depend on each other
    int64_t ways[WAYS][DIGITS] = {};
    for (int64_t b = 0; b < row.blocks; ++b) {
        if (scale.of(row.maxima[b]) < NO_WEIGHT) continue;
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        for (int64_t i = begin; i < end; i += 2 * LANES) {
            i64x8 weight[4];
            weights_at(weight, row, i, end, scale);
            int32_t digit[2 * LANES] = {};
            int64_t lane[2 * LANES];
            store(digit, first_digits(load_within(row.x, i, end)));
            if (i + LANES < end) store(digit + LANES, first_digits(load_within(row.x, i + LANES, end)));
            for (int j = 0; j < 4; ++j) store(lane + 8 * j, weight[j]);
            for (int j = 0; j < 2 * LANES; ++j) ways[j % WAYS][digit[j]] += lane[j];
        }
    }
    for (uint64_t d = 0; d < DIGITS; ++d) sums[d] = ways[0][d] + ways[1][d] + ways[2][d] + ways[3][d];
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
