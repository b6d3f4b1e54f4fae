// Top-k, top-p and min-p. Each keeps a head of the tokens ordered by descending logit and ascending id. A head is given
// by its cut, the key of its last token, so no full sort is needed; several filters combine as the maximum of their
// cuts.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t FEW = 64;          // lists of up to this length are sorted by insertion
constexpr int64_t FIRST_LIST = 256;  // tokens in the first attempt of top-p

// Lists the tokens with logits in [low, high], each with a weight of 1. `to` has room for all tokens.
int64_t collect(const Logits& row, float low, float high, Candidate* to) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks; ++b) {
        if (!(row.maxima[b] >= low)) continue;
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        for (int64_t i = begin; i < end; i += LANES) {
            const f32x16 x = load_within(row.x, i, end);
            uint32_t found = lanes(less_equal(broadcast(low), x)) & lanes(less_equal(x, broadcast(high)));
            for (found &= within(end - i); found; found &= found - 1) {
                const int64_t id = i + __builtin_ctz(found);
                to[count++] = {key_of(row.x[id], id), 1};
            }
        }
    }
    return count;
}

void put_in_order(Candidate* list, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const Candidate one = list[i];
        int64_t place = i;
        for (; place > 0 && list[place - 1].key < one.key; --place) list[place] = list[place - 1];
        list[place] = one;
    }
}

uint64_t cut_at(Candidate* list, int64_t count, int64_t target) { return head_end(list, count, target).key; }

// A value that at least min(count, blocks) tokens reach: one in each of the blocks with the greatest maxima.
float value_reached_by(const Logits& row, int64_t count, Candidate* scratch) {
    for (int64_t b = 0; b < row.blocks; ++b) scratch[b] = {key_of(row.maxima[b], b), 1};
    return value_of(cut_at(scratch, row.blocks, lesser(count, row.blocks)));
}

// Lists the tokens from the key `first` down to the key `last`.
int64_t list_between(const Logits& row, uint64_t first, uint64_t last, Candidate* to) {
    const int64_t count = collect(row, value_of(last), value_of(first), to);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Candidate one = to[i];
        to[kept] = one;
        kept += one.key >= last && one.key <= first;
    }
    return kept;
}

// The cut of top-p among the tokens that top-k kept. If the total does not reach the mass, which is rounded up, nothing
// is cut.
uint64_t cut_at_mass_within(const Logits& row, uint64_t cut, const Scale& scale, double p, Candidate* scratch) {
    const int64_t count = list_between(row, FIRST_KEY, cut, scratch);
    const int64_t total = weigh(scratch, count, scale), mass = mass_of(total, p);
    return total >= mass ? cut_at(scratch, count, mass) : 0;
}

// The cut of top-p among all tokens. The nucleus usually ends within the first FIRST_LIST tokens; otherwise the first
// digit of the cut is found from the weights of all tokens by digit.
uint64_t cut_at_mass(const Logits& row, const Scale& scale, double p, Candidate* scratch) {
    int64_t mass = mass_of(total_weight(row, {0, row.blocks}, scale), p);
    int64_t count = collect(row, value_reached_by(row, FIRST_LIST, scratch), INFINITE, scratch);
    if (weigh(scratch, count, scale) >= mass) return cut_at(scratch, count, mass);
    int64_t sums[DIGITS];
    weigh_by_digit(sums, row, scale);
    uint64_t digit = DIGITS - 1;
    for (; mass > sums[digit]; --digit) {
        mass -= sums[digit];
        if (digit == 0) return 0;
    }
    const uint64_t last = digit << (64 - DIGIT_BITS), first = last + ((uint64_t{1} << (64 - DIGIT_BITS)) - 1);
    count = list_between(row, first < FIRST_KEY ? first : FIRST_KEY, last, scratch);
    weigh(scratch, count, scale);
    return cut_at(scratch, count, mass);
}

}  // namespace

// Radix selection, from the highest digit down. Each pass keeps only the candidates whose digit is the one in which the
// target is reached. After the last digit, the remaining candidates have the same key.
Cut head_end(Candidate* list, int64_t count, int64_t target) {
    for (int shift = 64 - DIGIT_BITS; count > FEW; shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0) {
        int64_t sums[DIGITS] = {};
        const auto digit = [shift](const Candidate& c) { return c.key >> shift & (DIGITS - 1); };
        for (int64_t i = 0; i < count; ++i) sums[digit(list[i])] += list[i].weight;
        uint64_t reached = DIGITS - 1;
        while (target > sums[reached]) target -= sums[reached--];
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const Candidate one = list[i];
            list[kept] = one;
            kept += digit(one) == reached;
        }
        count = kept;
        if (shift == 0) return {list[0].key, target};
    }
    put_in_order(list, count);
    int64_t last = 0;
    while (target > list[last].weight) target -= list[last++].weight;
    for (; last > 0 && list[last - 1].key == list[last].key; --last) target += list[last - 1].weight;
    return {list[last].key, target};
}

int64_t mass_of(int64_t total, double p) {
    const double share = static_cast<double>(total) * p;
    const int64_t below = static_cast<int64_t>(share);
    const int64_t mass = below + (static_cast<double>(below) < share);
    return mass > 1 ? mass : 1;
}

// Binary search for the least float32 logit whose z is at least the bound, since z increases with the logit.
uint64_t cut_at_bound(float peak, const Scale& scale, double bound) {
    uint64_t low = key_of(-GREATEST, 0) >> 32, high = key_of(peak, 0) >> 32;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (scale.of(value_of(middle << 32)) >= bound) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return high << 32;
}

uint64_t cut_at_count(const Logits& row, int64_t count, Candidate* scratch) {
    int64_t listed = collect(row, value_reached_by(row, count, scratch), INFINITE, scratch);
    if (listed < count) listed = collect(row, -INFINITE, INFINITE, scratch);
    return cut_at(scratch, listed, count);
}

uint64_t cut_of(const Logits& row, const SampleRow& spec, const Scale& scale, Candidate* scratch) {
    uint64_t cut = 0;
    if (spec.top_k > 0 && spec.top_k < row.vocab) {
        cut = cut_at_count(row, spec.top_k, scratch);
        if (spec.top_p < 1.0) cut = greater(cut, cut_at_mass_within(row, cut, scale, spec.top_p, scratch));
    } else if (spec.top_p < 1.0) {
        cut = cut_at_mass(row, scale, spec.top_p, scratch);
    }
    if (spec.min_p > 0.0) {
        cut = greater(cut, cut_at_bound(row.peak, scale, log(spec.min_p > 1e-300 ? spec.min_p : 1e-300)));
    }
    return greater(cut, key_of(-GREATEST, 0x7fffffff));  // excludes logits of -inf
}

int64_t best_in_order(const Logits& row, int64_t count, Candidate* to) {
    const int64_t listed = list_between(row, FIRST_KEY, cut_at_count(row, count, to), to);
    put_in_order(to, listed);
    return listed;
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
