// The filters of the chain beyond top-k, top-p and min-p: top-n-sigma, typical-p, XTC, dynamic temperature, mirostat
// and adaptive-p. Each filter applies to the tokens that the previous filters kept. Filters that keep all logits above
// a threshold are applied as one cut of the row before the remaining tokens are listed.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr double NONE_TO_EXCLUDE = 0.5;  // at most one token has a greater probability, so XTC excludes none
constexpr double TINY = 1e-300;          // replaces 0, which has no logarithm
constexpr double LEAST_TEMPERATURE = 1e-5;
constexpr double SHARPNESS = 10.0, INVERSE_WIDTH = 1.0 / 0.3;  // of adaptive-p
constexpr double LOG2_E = 0x1.71547652b82fep+0;
const int32_t STEPS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ---- the list ----

// The standard deviation of the row's logits above -inf.
double deviation(const Logits& row, const Left& room) {
    const Scale distance(row.peak, 1.0);
    double* work = reinterpret_cast<double*>(room.list);
    int64_t count = 0;
    for (int64_t i = 0; i < row.vocab; ++i) {
        const bool here = row.x[i] > -INFINITE;
        count += here;
        room.z[i] = here ? distance.of(row.x[i]) : 0.0;
    }
    const double number = static_cast<double>(count), mean = tree_sum(room.z, row.vocab, work) / number;
    for (int64_t i = 0; i < row.vocab; ++i) {
        const double off = room.z[i] - mean;
        room.z[i] = row.x[i] > -INFINITE ? off * off : 0.0;
    }
    return __builtin_sqrt(tree_sum(room.z, row.vocab, work) / number);
}

// The cut of the leading filters that keep a head of the row by logit; it applies before any token is listed.
uint64_t first_cut(const Logits& row, const SampleRow& spec, const Scale& scale, const Left& room) {
    const bool typical = spec.typical_p < 1.0;
    if (!(spec.top_n_sigma > 0.0) && !typical) return cut_of(row, spec, scale, room.list);
    uint64_t cut = key_of(-GREATEST, 0x7fffffff);  // excludes logits of -inf
    if (spec.top_k > 0 && spec.top_k < row.vocab) cut = greater(cut, cut_at_count(row, spec.top_k, room.list));
    if (!(spec.top_n_sigma > 0.0)) return cut;
    const double bound = deviation(row, room) * -spec.top_n_sigma;
    return greater(cut, cut_at_bound(row.peak, Scale(row.peak, 1.0), bound));
}

// Lists the tokens that the cut keeps, by ascending id.
void list(Left& left, const Logits& row, const Scale& scale, uint64_t cut) {
    const float value = value_of(cut);
    const int64_t last = id_of(cut);
    left.count = 0;
    for (int64_t b = 0; b < row.blocks; ++b) {
        if (!(row.maxima[b] >= value)) continue;
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        for (int64_t i = begin; i < end; i += LANES) {
            const f32x16 x = load_within(row.x, i, end);
            uint32_t found = lanes(less_equal(broadcast(value), x)) & within(end - i);
            for (uint32_t open = found & ~lanes(less(broadcast(value), x)); open; open &= open - 1) {
                if (i + __builtin_ctz(open) > last) found &= ~(open & -open);
            }
            if (found == 0) continue;
            const int64_t lower = __builtin_popcount(found & 0xffu);
            pack(left.ids + left.count, add(broadcast_i32(static_cast<int32_t>(i)), load(STEPS)), found);
            pack(left.z + left.count, scale.of(low_to_double(x)), found & 0xffu);
            pack(left.z + left.count + lower, scale.of(high_to_double(x)), found >> 8);
            left.count += lower + __builtin_popcount(found >> 8);
        }
    }
}

// ---- filters ----

bool xtc_acts(const SampleRow& spec) {
    if (spec.xtc_probability <= 0.0 || spec.xtc_threshold > NONE_TO_EXCLUDE) return false;
    return (static_cast<double>(xtc_word(spec)) + 0.5) * 0x1p-32 <= spec.xtc_probability;
}

// Bit i: whether weight i of 16 is at least `least`.
uint32_t reaching(const int64_t* weights, double least) {
    const uint32_t low = at_least(to_double(load(weights)), broadcast_f64(least));
    return low | at_least(to_double(load(weights + 8)), broadcast_f64(least)) << 8;
}

void exclude_top_choices(Left& left, double threshold) {
    const double share = static_cast<double>(weigh(left.weights, left.z, left.count).total) * threshold;
    const double below = static_cast<double>(static_cast<int64_t>(share)), least = below < share ? below + 1.0 : below;
    int64_t above = 0, last = 0;
    double lowest = __builtin_inf();  // least z above the threshold; tokens with different logits may share it
    for (int64_t i = 0; i < left.count; i += LANES) {
        const uint32_t here = reaching(left.weights + i, least) & within(left.count - i);
        above += __builtin_popcount(here);
        const f64x8 bound = broadcast_f64(lowest);
        const uint32_t higher = at_least(load_f64(left.z + i), bound) | at_least(load_f64(left.z + i + 8), bound) << 8;
        for (uint32_t open = here & ~higher; open; open &= open - 1) {
            const double z = left.z[i + __builtin_ctz(open)];
            lowest = z < lowest ? z : lowest;
        }
    }
    if (above < 2) return;
    float logit = INFINITE;
    for (int64_t i = 0; i < left.count; i += LANES) {
        const f64x8 bound = broadcast_f64(lowest);
        const uint32_t low = at_least(bound, load_f64(left.z + i)), high = at_least(bound, load_f64(left.z + i + 8));
        const uint32_t here = reaching(left.weights + i, least) & within(left.count - i);
        for (uint32_t open = here & (low | high << 8); open; open &= open - 1) {
            const int64_t place = i + __builtin_ctz(open);
            if (left.logit(place) > logit) continue;
            logit = left.logit(place);
            last = place;
        }
    }
    keep(left, [&](int64_t i, f64x8, f64x8) {
        const uint32_t own = last - i < LANES && last >= i ? 1u << (last - i) : 0u;
        return ~reaching(left.weights + i, least) | own;
    });
}

void change_temperature(Left& left, const SampleRow& spec) {
    if (left.count == 1) return;
    const double lower = spec.temperature - spec.dynatemp_range, low = lower > 0.0 ? lower : 0.0;
    const double high = spec.temperature + spec.dynatemp_range;
    const Weighed all = weigh(left.weights, left.z, left.count);
    const double entropy = log_weight(all.total) + static_cast<double>(all.surprise) / static_cast<double>(all.total);
    double share = entropy / log(static_cast<double>(left.count));
    share = share < TINY ? TINY : share > 1.0 ? 1.0 : share;
    const double power = static_cast<double>(weight_of(log(share) * spec.dynatemp_exponent)) * 0x1p-40;
    const double temperature = power * (high - low) + low;
    const double factor = 1.0 / (temperature < LEAST_TEMPERATURE ? LEAST_TEMPERATURE : temperature);
    for (int64_t i = 0; i < left.count; ++i) left.z[i] *= factor;
}

void keep_unsurprising(Left& left, double mu) {
    const double log_total = log_weight(weigh(left.weights, left.z, left.count).total);
    int64_t best = 0;
    for (int64_t i = 1; i < left.count; ++i) best = left.logit(i) > left.logit(best) ? i : best;
    keep(left, [&](int64_t i, f64x8 low, f64x8 high) {
        const f64x8 total = broadcast_f64(log_total), unit = broadcast_f64(LOG2_E), bound = broadcast_f64(mu);
        const uint32_t lower = at_least(bound, mul(sub(total, low), unit));
        const uint32_t own = best - i < LANES && best >= i ? 1u << (best - i) : 0u;
        return lower | at_least(bound, mul(sub(total, high), unit)) << 8 | own;
    });
}

double next_mu(const Left& left, int64_t token, const SampleRow& spec, double mu) {
    int64_t place = 0;
    while (left.ids[place] != token) ++place;
    const double log_total = log_weight(weigh(left.weights, left.z, left.count).total);
    const double surprise = (log_total - left.z[place]) * LOG2_E;
    return mu - spec.mirostat_eta * (surprise - spec.mirostat_tau);
}

// Mirostat replaces adaptive-p.
bool is_adaptive(const SampleRow& spec) { return spec.adaptive_target >= 0.0 && spec.mirostat == 0; }

// Replaces each z by a score of how near the token's probability is to the target that the history gives. Returns the
// sum of the original weights, which stay in left.weights.
int64_t prefer_near(Left& left, const SampleRow& spec, const double* carry) {
    const int64_t total = weigh(left.weights, left.z, left.count).total;
    const double wanted = 2.0 * spec.adaptive_target - carry[0] / carry[1];
    const double aim = wanted < 0.0 ? 0.0 : wanted > 1.0 ? 1.0 : wanted;
    for (int64_t i = 0; i < left.count; ++i) {
        const double p = static_cast<double>(left.weights[i]) / static_cast<double>(total);
        const double distance = __builtin_fabs((p - aim) * INVERSE_WIDTH);
        left.z[i] = -(distance * SHARPNESS * distance / (distance + 1.0));
    }
    const double max_z = greatest(left.z, left.count);
    for (int64_t i = 0; i < left.count; ++i) left.z[i] -= max_z;
    return total;
}

void remember(double* carry, const Left& left, int64_t token, int64_t total, double decay) {
    int64_t place = 0;
    while (left.ids[place] != token) ++place;
    const double p = static_cast<double>(left.weights[place]) / static_cast<double>(total);
    carry[0] = p + decay * carry[0];
    carry[1] = 1.0 + decay * carry[1];
}

}  // namespace

bool needs_chain(const SampleRow& spec) {
    return spec.top_n_sigma > 0.0 || spec.typical_p < 1.0 ||
           (spec.xtc_probability > 0.0 && spec.xtc_threshold <= NONE_TO_EXCLUDE) || spec.dynatemp_range > 0.0 ||
           spec.mirostat != 0 || is_adaptive(spec);
}

int64_t choose_by_chain(const Logits& row, const SampleRow& spec, Left left, double* carry) {
    const Scale scale(row.peak, 1.0 / (spec.dynatemp_range > 0.0 ? 1.0 : spec.temperature));
    list(left, row, scale, first_cut(row, spec, scale, left));
    if (spec.typical_p < 1.0) keep_typical(left, spec.typical_p);
    if (spec.typical_p < 1.0 || spec.top_n_sigma > 0.0) {  // otherwise the first cut includes them
        if (spec.top_p < 1.0) keep_nucleus(left, spec.top_p);
        const double bound = spec.min_p > 0.0 ? log(spec.min_p > TINY ? spec.min_p : TINY) : 0.0;
        const auto reaches = [&](int64_t, f64x8 low, f64x8 high) {
            return at_least(low, broadcast_f64(bound)) | at_least(high, broadcast_f64(bound)) << 8;
        };
        if (spec.min_p > 0.0) keep(left, reaches);
    }
    if (xtc_acts(spec)) exclude_top_choices(left, spec.xtc_threshold);
    if (spec.dynatemp_range > 0.0) change_temperature(left, spec);
    if (spec.mirostat) keep_unsurprising(left, carry[0]);
    const int64_t total = is_adaptive(spec) ? prefer_near(left, spec, carry) : 0;
    const int64_t token = draw_left(left, spec);
    if (is_adaptive(spec)) remember(carry, left, token, total, spec.adaptive_decay);
    if (spec.mirostat) carry[0] = next_mu(left, token, spec, carry[0]);
    return token;
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
