// Gumbel-max sampling with counter-based noise (Philox). Float32 bounds rule out most tokens; exact float64 scores are
// computed for the few that may win.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t GROUP = 32;                   // tokens whose noise is generated together: 8 counters of 4 words
constexpr double LEAST_LOG_E = -22.8738569855;  // slightly below -33 ln 2, the least log(e) of any word
constexpr float SLACK = 1e-3f;                  // more than ten times the error of the float32 bounds

// The 32-bit noise words of the tokens 4 * first_block to 4 * first_block + 31, two in each int64.
KVASIR_INLINE void noise(int64_t* words, uint64_t seed, int64_t position, int64_t first_block, int64_t stream = 0) {
    static const int64_t STEPS[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const i64x8 by0 = broadcast_i64(0xd2511f53), by1 = broadcast_i64(0xcd9e8d57);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    i64x8 c0 = broadcast_i64(position), c1 = add(broadcast_i64(first_block), load(STEPS));
    i64x8 c2 = broadcast_i64(stream), c3 = broadcast_i64(0);
    for (int round = 0; round < 10; ++round) {  // the products ignore the high halves, which hold garbage
        const i64x8 product0 = multiply_words(by0, c0), product1 = multiply_words(by1, c2);
        c0 = bit_xor(bit_xor(shift_right<32>(product1), c1), broadcast_i64(k0));
        c2 = bit_xor(bit_xor(shift_right<32>(product0), c3), broadcast_i64(k1));
        c1 = product1;
        c3 = product0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    const i64x8 low = broadcast_i64(0xffffffff);
    store_pairs(words, bit_or(bit_and(c0, low), shift_left<32>(c1)), bit_or(bit_and(c2, low), shift_left<32>(c3)));
}

double log_exponential(uint32_t word) {
    const double one_minus_u = ((4294967296.0 - 0.5) - static_cast<double>(word)) * 0x1p-32;
    return log(-log(one_minus_u));
}

// A lower bound of log(e) of each word, up to rounding: e > u >= 2 * half / 2^32, and log2 is at least its piecewise
// linear interpolation, which the bits of a float give (Mitchell, 1962).
KVASIR_INLINE f32x16 lower_bound(i32x16 words) {
    const f32x16 half = to_float(shift_right<1>(words));
    const f32x16 log2_u = sub(mul(to_float(float_to_bits(half)), broadcast(0x1p-23f)), broadcast(127.0f + 31.0f));
    return mul(log2_u, broadcast(0.693147182f));
}

// The noise of 32 tokens, starting at a multiple of 32.
class Words {
  public:
    void fill(const SampleRow& spec, int64_t first, int64_t stream = 0) {
        noise(words_, spec.seed, spec.position & 0xffffffff, first / 4, stream);
    }
    uint32_t of(int64_t place) const {
        uint32_t one;
        std::memcpy(&one, reinterpret_cast<const char*>(words_) + 4 * place, sizeof one);
        return one;
    }
    f32x16 bounds(int64_t half) const {
        return lower_bound(load(reinterpret_cast<const int32_t*>(words_) + half * LANES));
    }

  private:
    alignas(64) int64_t words_[GROUP / 2];
};

// Finds the token with the least log(e) - z among those that the cut keeps; ties go to the lowest id. Starts with
// `top`, which is kept whatever the cut. Tokens that cannot reach the best score so far are skipped: first by z alone,
// then by lower_bound().
class Draw {
  public:
    Draw(const Logits& row, const Scale& scale, uint64_t cut, const SampleRow& spec)
        : row_(row),
          scale_(scale),
          cut_value_(value_of(cut)),
          cut_id_(id_of(cut)),
          spec_(spec),
          peak_(broadcast(row.peak < GREATEST ? row.peak : GREATEST)),
          factor_(broadcast(static_cast<float>(scale.factor))) {}

    int64_t from(int64_t top) {
        words_.fill(spec_, top / GROUP * GROUP);
        best_ = log_exponential(words_.of(top % GROUP)) - scale_.of(row_.x[top]);
        best_id_ = top;
        for (int64_t b = 0; b < row_.blocks; ++b) {
            const float block_max = row_.maxima[b];
            if (!(block_max >= cut_value_) || scale_.of(block_max) < LEAST_LOG_E - best_) continue;
            const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row_.vocab);
            for (int64_t i = begin; i < end; i += GROUP) group(i, end);
        }
        return best_id_;
    }

  private:
    void group(int64_t begin, int64_t end) {
        const f32x16 none = broadcast(-INFINITE);
        const f32x16 x0 = load_within(row_.x, begin, end);
        const f32x16 x1 = begin + LANES < end ? load_within(row_.x, begin + LANES, end) : none;
        const f32x16 z0 = z_of(x0), z1 = z_of(x1);
        const uint32_t within0 = kept(x0, z0), within1 = kept(x1, z1);
        if (!(within0 | within1)) return;
        words_.fill(spec_, begin);
        const f32x16 bar = broadcast(static_cast<float>(best_) + SLACK);
        const uint32_t open0 = within0 & lanes(less_equal(sub(words_.bounds(0), z0), bar));
        const uint32_t open1 = within1 & lanes(less_equal(sub(words_.bounds(1), z1), bar));
        for (uint32_t open = open0 | open1 << LANES; open; open &= open - 1) {
            const int64_t place = __builtin_ctz(open);
            consider(begin + place, words_.of(place));
        }
    }

    // Never NaN. At least the exact z, up to rounding, for all tokens that the cut keeps.
    f32x16 z_of(f32x16 x) const {
        return mul(max(min(sub(x, peak_), broadcast(0.0f)), broadcast(-GREATEST)), factor_);
    }

    uint32_t kept(f32x16 x, f32x16 z) const {
        const f32x16 reach = broadcast(static_cast<float>(LEAST_LOG_E - best_) - SLACK);
        return lanes(less_equal(broadcast(cut_value_), x)) & lanes(less_equal(reach, z));
    }

    void consider(int64_t id, uint32_t word) {
        const float x = row_.x[id];
        if (x == cut_value_ && id > cut_id_) return;
        const double score = log_exponential(word) - scale_.of(x);
        if (score < best_ || (score == best_ && id < best_id_)) {
            best_ = score;
            best_id_ = id;
        }
    }

    const Logits& row_;
    const Scale& scale_;
    const float cut_value_;
    const int64_t cut_id_;
    const SampleRow& spec_;
    const f32x16 peak_, factor_;
    Words words_;
    double best_;
    int64_t best_id_;
};

}  // namespace

int64_t draw(const Logits& row, const Scale& scale, uint64_t cut, const SampleRow& spec, int64_t top) {
    return Draw(row, scale, cut, spec).from(top);
}

// Processes up to 16 listed tokens of one group at a time, since a group's noise is generated together. Tokens are
// skipped as in Draw.
int64_t draw_left(const Left& left, const SampleRow& spec) {
    Words words;
    float bounds[GROUP];
    double best = __builtin_inf();
    int64_t best_id = 0, filled = -1;
    for (int64_t i = 0; i < left.count;) {
        const int32_t first = static_cast<int32_t>(left.ids[i] / GROUP * GROUP);
        const i32x16 places = sub(load(left.ids + i), broadcast_i32(first));
        const f32x16 z = to_single(load_f64(left.z + i), load_f64(left.z + i + 8));
        const uint32_t here = lanes(less(to_float(places), broadcast(GROUP))) & within(left.count - i);
        const f32x16 reach = broadcast(static_cast<float>(LEAST_LOG_E - best) - SLACK);
        uint32_t open = here & lanes(less_equal(reach, z));
        if (open && filled != first) {
            filled = first;
            words.fill(spec, first);
            store(bounds, words.bounds(0));
            store(bounds + LANES, words.bounds(1));
        }
        const f32x16 bar = broadcast(static_cast<float>(best) + SLACK);
        if (open) open &= lanes(less_equal(sub(pick32(bounds, places), z), bar));
        for (; open; open &= open - 1) {
            const int64_t place = i + __builtin_ctz(open);
            const double score = log_exponential(words.of(left.ids[place] - first)) - left.z[place];
            if (score < best) {  // ids ascend, so ties go to the lowest id
                best = score;
                best_id = left.ids[place];
            }
        }
        i += __builtin_popcount(here);
    }
    return best_id;
}

uint32_t xtc_word(const SampleRow& spec) {
    Words words;
    words.fill(spec, 0, 1);
    return words.of(0);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
