// What the parts of the sampler share: a row of logits, its weights, and the order of its tokens.
//
//     sampler.cpp              the walk over rows, their maxima
//     sampler_processors.cpp   mask, bias, penalties           (processors.py of kvasir/sampling)
//     sampler_dry.cpp          DRY                             (dry.py)
//     sampler_filters.cpp      top-k, top-p, min-p             (filters.py)
//     sampler_chain.cpp        all other filters               (chain.py)
//     sampler_nucleus.cpp      heads of the lists they leave   (chain.py)
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

// x[i] to x[i + 15], -inf from `end` on, which is after i.
KVASIR_INLINE f32x16 load_within(const float* x, int64_t i, int64_t end) {
    if (end - i >= LANES) return load(x + i);
    return select(first_lanes(end - i), load_first(x + i, end - i), broadcast(-INFINITE));
}

// ---- keys ----

// The greater key comes first in the list. No two keys of a row are equal, and -0 counts as 0.
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
    int64_t weight;  // 1 if tokens are counted
};

// The key of a head's last token. rest: the part of the weight to reach that the tokens before this key lack.
struct Cut {
    uint64_t key;
    int64_t rest;
};

// The tokens that may still be drawn, by ascending id. z: logarithms of their probabilities up to a constant; the
// greatest is 0. The arrays have room for the whole vocabulary, up to a multiple of 32; weights and list are scratch.
struct Left {
    const float* x;  // the row's, by id
    int32_t* ids;
    double* z;
    int64_t count;
    int64_t* weights;
    Candidate* list;

    float logit(int64_t place) const { return x[ids[place]]; }
};

// A set of ids, to process each once. Ids without a logit are never in it.
class Ids {
  public:
    Ids(uint64_t* words, int64_t vocab) : words_(words), vocab_(vocab) {
        std::memset(words, 0, static_cast<size_t>((vocab + 63) / 64) * sizeof *words);
    }
    bool has(int32_t id) const { return id >= 0 && id < vocab_ && (words_[id / 64] >> (id % 64) & 1u); }
    bool add(int32_t id) {  // whether it is new
        if (id < 0 || id >= vocab_ || has(id)) return false;
        words_[id / 64] |= uint64_t{1} << (id % 64);
        return true;
    }
    void remove(int32_t id) { words_[id / 64] &= ~(uint64_t{1} << (id % 64)); }

  private:
    uint64_t* words_;
    int64_t vocab_;
};

// ---- sampler_weights.cpp ----

double log(double x);  // of a positive normal number
double log_weight(int64_t weight);  // ln of a positive weight
int64_t weight_of(double z);
// The sums of weights, and of weight * -z, each rounded to an integer.
struct Weighed {
    int64_t total, surprise;
};
// The weights of z <= 0. Both arrays have room up to a multiple of 32.
Weighed weigh(int64_t* weights, const double* z, int64_t count);
// By a fixed tree: halves of the next power of two are added until one is left. work: [count]; x is not changed.
double tree_sum(const double* x, int64_t count, double* work);
int64_t total_weight(const Logits& row, Range blocks, const Scale& scale);
// Computes each candidate's weight; returns their sum.
int64_t weigh(Candidate* list, int64_t count, const Scale& scale);
// The weights of all tokens by the first digit of their keys.
void weigh_by_digit(int64_t (&sums)[DIGITS], const Logits& row, const Scale& scale);

// ---- sampler_filters.cpp: scratch has room for all tokens ----

// The end of the shortest head by descending key whose weights reach `target`, as the sum of all does. Equal keys keep
// their order. Leaves the list only partly ordered.
Cut head_end(Candidate* list, int64_t count, int64_t target);
// The share p of a weight, rounded up, at least 1.
int64_t mass_of(int64_t total, double p);
// The cut before the tokens whose z is below the bound, which the peak reaches.
uint64_t cut_at_bound(float peak, const Scale& scale, double bound);
// The cut after the best `count` tokens, at most all.
uint64_t cut_at_count(const Logits& row, int64_t count, Candidate* scratch);
// The cut of top-k, top-p and min-p together.
uint64_t cut_of(const Logits& row, const SampleRow& spec, const Scale& scale, Candidate* scratch);
// The best `count` tokens in order, at most all; returns how many.
int64_t best_in_order(const Logits& row, int64_t count, Candidate* to);

// ---- sampler_nucleus.cpp ----

// Keep the shortest head whose probability reaches p: by logit, or by how near the surprise is to the entropy.
void keep_nucleus(Left& left, double p);
void keep_typical(Left& left, double p);
KVASIR_INLINE double greatest(const double* z, int64_t count) {
    f64x8 most = broadcast_f64(z[0]);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) most = max(load_f64(z + i), most);
    double found[8];
    store_f64(found, most);
    for (int j = 1; j < 8; ++j) found[0] = found[j] > found[0] ? found[j] : found[0];
    for (; i < count; ++i) found[0] = z[i] > found[0] ? z[i] : found[0];
    return found[0];
}

// Keeps the tokens that stay, at least one, and shifts z so that the greatest is 0. `stays(place, low, high)` returns a
// bit for each of 16 places, given their z in two halves; bits beyond the end of the list are ignored.
template <typename Stays>
void keep(Left& left, Stays stays) {
    int64_t kept = 0;
    uint32_t peaks = 0;
    for (int64_t i = 0; i < left.count; i += LANES) {
        const i32x16 ids = load(left.ids + i);
        const f64x8 low = load_f64(left.z + i), high = load_f64(left.z + i + 8), peak = broadcast_f64(0.0);
        const uint32_t here = stays(i, low, high) & within(left.count - i);
        peaks |= here & (at_least(low, peak) | at_least(high, peak) << 8);
        if (here == 0) continue;
        const int64_t lower = __builtin_popcount(here & 0xffu);
        pack(left.ids + kept, ids, here);
        pack(left.z + kept, low, here & 0xffu);
        pack(left.z + kept + lower, high, here >> 8);
        kept += lower + __builtin_popcount(here >> 8);
    }
    left.count = kept;
    if (peaks) return;
    const double most = greatest(left.z, kept);
    for (int64_t i = 0; i < kept; ++i) left.z[i] -= most;
}

// ---- sampler_chain.cpp ----

// Whether the row uses more than top-k, top-p and min-p.
bool needs_chain(const SampleRow& spec);
// The token of such a row. room: memory for the remaining tokens. carry: input and output.
int64_t choose_by_chain(const Logits& row, const SampleRow& spec, Left room, double* carry);

// ---- the others ----

// Whether DRY can penalize a token of the row (dry.is_on).
bool uses_dry(const SampleRow& spec);

// Penalizes in x the tokens that would continue a repetition. scratch: 16 bytes for each token. room: a number for each
// considered id.
void penalize_again(float* x, int64_t vocab, const SampleRow& spec, uint8_t* scratch, int32_t* room);

bool changes_logits(const SampleRow& spec);
// x: the row after mask, min_tokens, bias and penalties, with room up to a multiple of 16. `scratch`: as much as the
// candidates take, 16 bytes for each token. dry_room: as penalize_again's. Returns a SampleError.
int32_t process(float* x, const float* row, int64_t vocab, const SampleRow& spec, uint8_t* scratch, int32_t* dry_room);

// The token with the least log(e) - z of those that the cut keeps, ties to the lowest id. `top` is the first at the
// peak, which is kept whatever the cut.
int64_t draw(const Logits& row, const Scale& scale, uint64_t cut, const SampleRow& spec, int64_t top);

// The same among the remaining tokens: the token whose log(e) - z is the least.
int64_t draw_left(const Left& left, const SampleRow& spec);
// The noise of XTC: whether XTC applies at this position.
uint32_t xtc_word(const SampleRow& spec);

// Log-probability and rank of the result's token, and of the best `count`. total: the weight of the whole row at a
// temperature of 1.
void describe(Sampled& result, const Logits& row, int64_t total, int64_t count, Candidate* scratch);

}  // namespace KVASIR_ISA
}  // namespace kvasir
