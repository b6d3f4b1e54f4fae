// What the parts of the sampler share: a row of logits, its weights, and the order of its tokens.
//
//     sampler.cpp              the walk over rows, their maxima
//     sampler_processors.cpp   mask, bias, penalties           (processors.py of kvasir/sampling)
//     sampler_filters.cpp      top-k, top-p, min-p             (filters.py)
//     sampler_draw.cpp         noise, the chosen token         (gumbel.py, philox.py)
//     sampler_logprobs.cpp     log-probabilities, ranks        (logprobs.py)
//     sampler_weights.cpp      exp and log, sums of weights    (numerics.py)
#pragma once

#include "sampler.h"
#include "simd64.h"

namespace kvasir {
namespace KVASIR_ISA {

constexpr float INFINITE = __builtin_inff();
constexpr float GREATEST = 3.40282347e+38f;  // finite float32

KVASIR_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
KVASIR_INLINE uint64_t greater(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <typename To, typename From>
KVASIR_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are neither added nor lost");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A row to choose from, with the maxima of its blocks.
struct Logits {
    const float* x;
    int64_t vocab, blocks;
    const float* maxima;
    float peak;  // NaN if there is one in the row
};

// z = (logit - peak) / temperature in float64, at most 0; a peak at +inf counts as 1e300 (numerics.centred).
struct Scale {
    double peak, factor;

    Scale(float row_peak, double by) : peak(row_peak < INFINITE ? static_cast<double>(row_peak) : 1e300), factor(by) {}

    double of(float x) const {
        const double centred = static_cast<double>(x) - peak;
        return (centred < 0.0 ? centred : 0.0) * factor;
    }
    f64x8 of(f64x8 x) const {
        return mul(min(sub(x, broadcast_f64(peak)), broadcast_f64(0.0)), broadcast_f64(factor));
    }
};

KVASIR_INLINE uint32_t within(int64_t count) { return count >= LANES ? 0xffffu : (1u << count) - 1u; }

// x[i] to x[i + 15], -inf from `end` on, which is behind i.
KVASIR_INLINE f32x16 load_within(const float* x, int64_t i, int64_t end) {
    if (end - i >= LANES) return load(x + i);
    return select(first_lanes(end - i), load_first(x + i, end - i), broadcast(-INFINITE));
}

// ---- keys ----

// The greater key comes first in the list. No two of a row are equal, and -0 counts as 0.
KVASIR_INLINE uint64_t key_of(float x, int64_t id) {
    const uint32_t bits = bits_as<uint32_t>(x + 0.0f);
    const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ascending) << 32 | static_cast<uint64_t>(0x7fffffff - id);
}
KVASIR_INLINE float value_of(uint64_t key) {
    const uint32_t ascending = static_cast<uint32_t>(key >> 32);
    return bits_as<float>(ascending >> 31 ? ascending & 0x7fffffffu : ~ascending);
}
KVASIR_INLINE int64_t id_of(uint64_t key) { return 0x7fffffff - static_cast<int64_t>(key & 0xffffffffu); }

constexpr int DIGIT_BITS = 11;
constexpr uint64_t DIGITS = 1 << DIGIT_BITS;
constexpr uint64_t FIRST_KEY = 0xff8000007fffffffu;  // +inf of token 0

struct Candidate {
    uint64_t key;
    int64_t weight;  // 1 where tokens are counted
};

// ---- sampler_weights.cpp ----

double log(double x);  // of a positive normal number
int64_t total_weight(const Logits& row, Range blocks, const Scale& scale);
// Gives each candidate its weight; returns their sum.
int64_t weigh(Candidate* list, int64_t count, const Scale& scale);
// The weights of all tokens by the first digit of their keys.
void weigh_by_digit(int64_t (&sums)[DIGITS], const Logits& row, const Scale& scale);

// ---- sampler_filters.cpp: scratch has room for all tokens ----

// The cut of top-k, top-p and min-p together.
uint64_t cut_of(const Logits& row, const SampleRow& spec, const Scale& scale, Candidate* scratch);
// The best `count` tokens in order, at most all; returns how many.
int64_t best_in_order(const Logits& row, int64_t count, Candidate* to);

// ---- the others ----

bool changes_logits(const SampleRow& spec);
// x: the row after mask, min_tokens, bias and penalties, with room up to a multiple of 16. `scratch`: as much as the
// candidates take, 16 bytes for each token. Returns a SampleError.
int32_t process(float* x, const float* row, int64_t vocab, const SampleRow& spec, uint8_t* scratch);

// The token with the least log(e) - z of those that the cut keeps, ties to the lowest id. `top` is the first at the
// peak, which is kept whatever the cut.
int64_t draw(const Logits& row, const Scale& scale, uint64_t cut, const SampleRow& spec, int64_t top);

// Log-probability and rank of the result's token, and of the best `count`. total: the weight of the whole row at a
// temperature of 1.
void describe(Sampled& result, const Logits& row, int64_t total, int64_t count, Candidate* scratch);

}  // namespace KVASIR_ISA
}  // namespace kvasir
