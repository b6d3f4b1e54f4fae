// A plain implementation of the sampler's rules: computes the weight of every token, sorts all tokens and draws noise
// for each. The arithmetic of single numbers is that of kvasir/sampling, so tokens and bits must be equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../sampler.h"

namespace sampler_rules {

using namespace kvasir;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33;

// ---- one number ----

inline int64_t weight(double z) {
    z = std::max(z, -30.0);
    const double n = std::nearbyint(z * 0x1.71547652b82fep+0);
    const double r = z - n * LN2_HIGH - n * LN2_LOW;
    double factorial = 362880, p = r * (1 / factorial);
    for (int i = 9; i > 1; --i) {
        factorial /= i;
        p = (p + 1 / factorial) * r;
    }
    return static_cast<int64_t>(std::nearbyint(std::ldexp(p + 1, 40 + static_cast<int>(n))));
}

inline double ln(double x) {
    int n;
    double m = std::frexp(x, &n);  // in [1/2, 1)
    if (m < 0x1.6a09e667f3bcdp-1) m *= 2, --n;
    const double f = m - 1, s = f / (f + 2), square = s * s;
    double series = square * (1.0 / 19);
    for (int i = 17; i > 1; i -= 2) series = (series + 1.0 / i) * square;
    return (series + 1) * s * 2 + n * LN2_LOW + n * LN2_HIGH;
}

inline uint32_t noise(uint64_t seed, uint32_t position, uint32_t token, uint32_t stream = 0) {
    uint32_t c[4] = {position, token / 4, stream, 0};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int i = 0; i < 10; ++i) {
        const uint64_t a = uint64_t{0xd2511f53} * c[0], b = uint64_t{0xcd9e8d57} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9e3779b9u;
        k[1] += 0xbb67ae85u;
    }
    return c[token % 4];
}

// ---- one row ----

inline double centred(float x, float peak) {
    return std::min(static_cast<double>(x) - std::min<double>(peak, 1e300), 0.0);
}

inline std::vector<int32_t> in_order(const std::vector<float>& x) {
    std::vector<int32_t> ids(x.size());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
    return ids;
}

inline std::vector<std::vector<int32_t>> lists_of(const IdLists& lists) {
    std::vector<std::vector<int32_t>> all;
    for (int64_t i = 0, begin = 0; i < lists.count; begin = lists.ends[i++]) {
        all.emplace_back(lists.ids + begin, lists.ids + lists.ends[i]);
    }
    return all;
}

// DRY by its definition: compares the ids before each index with the end of the window.
inline void dry(std::vector<float>& x, const SampleRow& spec) {
    const Dry& d = spec.dry;
    const int64_t last_n = spec.dry_penalty_last_n, allowed = spec.dry_allowed_length;
    const int64_t count = last_n > 0 ? std::min(last_n, spec.num_ids) : spec.num_ids;
    const std::vector<int32_t> ids(spec.ids + spec.num_ids - count, spec.ids + spec.num_ids);
    const auto alone = [&](int32_t id) {
        return id >= 0 && id / 32 < d.breaker_words && (d.breakers[id / 32] >> (id % 32) & 1);
    };
    int64_t start = 0;  // index after the last breaker
    for (int64_t i = 0; i < count; ++i) {
        int64_t length = alone(ids[i]);
        for (const auto& sequence : lists_of(d.sequences)) {
            const int64_t size = static_cast<int64_t>(sequence.size());
            const bool here = size <= count - i && std::equal(sequence.begin(), sequence.end(), ids.begin() + i);
            if (here) length = std::max(length, size);
        }
        if (length) start = i + length;
    }
    if (count - start < allowed) return;
    std::vector<int64_t> longest(x.size(), -1);
    for (int64_t i = 1; i < count; ++i) {
        int64_t n = 0;
        while (n < i && ids[i - 1 - n] == ids[count - 1 - n]) ++n;
        if (n < allowed || alone(ids[i]) || ids[i] < 0 || ids[i] >= static_cast<int64_t>(x.size())) continue;
        longest[ids[i]] = std::max(longest[ids[i]], std::min(n, count - start));
    }
    for (size_t t = 0; t < x.size(); ++t) {
        const double power = std::pow(spec.dry_base, static_cast<double>(longest[t] - allowed));  // exact in tests
        if (longest[t] >= 0) x[t] -= static_cast<float>(spec.dry_multiplier * power);
    }
}

inline void change(std::vector<float>& x, const SampleRow& spec) {
    const int64_t vocab = static_cast<int64_t>(x.size());
    for (int64_t t = 0; spec.mask && t < vocab; ++t) {
        if (t / 32 >= spec.mask_words || !(spec.mask[t / 32] >> (t % 32) & 1)) x[t] = -INF;
    }
    for (int64_t i = 0; spec.num_ids - spec.prompt_len < spec.min_tokens && i < spec.num_stop_ids; ++i) {
        if (spec.stop_ids[i] >= 0 && spec.stop_ids[i] < vocab) x[spec.stop_ids[i]] = -INF;
    }
    for (const auto& word : lists_of(spec.bad_words)) {
        const int64_t before = static_cast<int64_t>(word.size()) - 1;
        if (before > spec.num_ids - spec.prompt_len || word.back() < 0 || word.back() >= vocab) continue;
        if (std::equal(word.begin(), word.end() - 1, spec.ids + spec.num_ids - before)) x[word.back()] = -INF;
    }
    for (int64_t i = 0; i < spec.num_bias; ++i) x[spec.bias_ids[i]] += spec.bias[i];
    const int64_t all = spec.num_ids;
    const auto last = [&](int64_t n) { return n < 0 ? spec.ids : spec.ids + std::max<int64_t>(0, all - n); };
    const int32_t* repeated = last(spec.repetition_last_n);
    const int32_t* occurred = spec.occurrence_last_n ? last(spec.occurrence_last_n) : spec.ids + spec.prompt_len;
    for (int64_t t = 0; t < vocab; ++t) {
        const bool known = std::count(repeated, spec.ids + all, t) > 0;
        if (known) x[t] = x[t] > 0 ? x[t] / spec.repetition_penalty : x[t] * spec.repetition_penalty;
        const float count = static_cast<float>(std::count(occurred, spec.ids + all, t));
        if (count == 0) continue;
        const float times = count * spec.frequency_penalty;
        x[t] = x[t] - times - spec.presence_penalty;
    }
    if (spec.dry_multiplier != 0.0 && spec.dry_penalty_last_n != 0) dry(x, spec);
}

// ---- the filters beyond top-k, top-p and min-p ----

struct Token {
    int32_t id;
    float x;
    double z;
};
using Tokens = std::vector<Token>;

inline int64_t total_of(const Tokens& left) {
    int64_t total = 0;
    for (const Token& t : left) total += weight(t.z);
    return total;
}

inline double log_total_of(const Tokens& left) { return ln(static_cast<double>(total_of(left)) * 0x1p-40); }

inline double entropy_of(const Tokens& left) {
    double surprise = 0;
    for (const Token& t : left) {
        surprise += std::nearbyint(static_cast<double>(weight(t.z)) * -std::max(t.z, -30.0));
    }
    return log_total_of(left) + surprise / static_cast<double>(total_of(left));
}

// Keeps the tokens for which `stays` is true, by ascending id, and shifts z so that the greatest is 0.
template <typename Stays>
inline void only(Tokens& left, Stays stays) {
    Tokens kept;
    double max_z = -INFINITY;
    for (const Token& t : left) {
        if (!stays(t)) continue;
        kept.push_back(t);
        max_z = std::max(max_z, t.z);
    }
    for (Token& t : kept) t.z -= max_z;
    std::sort(kept.begin(), kept.end(), [](const Token& a, const Token& b) { return a.id < b.id; });
    left = kept;
}

// Keeps the shortest head, in the order of `before`, whose probability reaches p.
template <typename Before>
inline void nucleus(Tokens& left, double p, Before before) {
    const double share = static_cast<double>(total_of(left)) * p;
    const int64_t mass = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(share)));
    std::stable_sort(left.begin(), left.end(), before);
    int64_t sum = 0;
    only(left, [&](const Token& t) {
        const bool stays = sum < mass;
        sum += weight(t.z);
        return stays;
    });
}

inline double tree(std::vector<double> x) {
    size_t size = 1;
    while (size < x.size()) size *= 2;
    x.resize(size, 0.0);
    for (; size > 1; size /= 2) {
        for (size_t i = 0; i < size / 2; ++i) x[i] += x[i + size / 2];
    }
    return x[0];
}

inline double deviation(const std::vector<float>& x, float peak) {
    std::vector<double> parts;
    double count = 0;
    for (const float v : x) parts.push_back(v > -INF ? ++count, centred(v, peak) : 0.0);
    const double mean = tree(parts) / count;
    for (size_t i = 0; i < x.size(); ++i) {
        const double off = centred(x[i], peak) - mean;
        parts[i] = x[i] > -INF ? off * off : 0.0;
    }
    return std::sqrt(tree(parts) / count);
}

inline void exclude(Tokens& left, const SampleRow& spec) {
    const uint32_t word = noise(spec.seed, static_cast<uint32_t>(spec.position), 0, 1);
    const double threshold = spec.xtc_threshold;
    if (spec.xtc_probability <= 0 || threshold > 0.5 || (word + 0.5) * 0x1p-32 > spec.xtc_probability) return;
    const auto least = static_cast<int64_t>(std::ceil(static_cast<double>(total_of(left)) * threshold));
    Token last = {-1, INF, 0};
    int64_t above = 0;
    for (const Token& t : left) {
        if (weight(t.z) < least) continue;
        ++above;
        if (t.x <= last.x) last = t;
    }
    if (above > 1) only(left, [&](const Token& t) { return weight(t.z) < least || t.id == last.id; });
}

inline void change_temperature(Tokens& left, const SampleRow& spec) {
    if (left.size() < 2) return;
    const double low = std::max(0.0, spec.temperature - spec.dynatemp_range);
    const double high = spec.temperature + spec.dynatemp_range;
    const double share = entropy_of(left) / ln(static_cast<double>(left.size()));
    const double power = ln(std::min(std::max(share, 1e-300), 1.0)) * spec.dynatemp_exponent;
    const double by = 1 / std::max(static_cast<double>(weight(power)) * 0x1p-40 * (high - low) + low, 1e-5);
    for (Token& t : left) t.z *= by;
}

inline int32_t choose_by_chain(const std::vector<float>& x, const SampleRow& spec, double* carry) {
    const auto by_logit = [](const Token& a, const Token& b) { return a.x > b.x; };
    const float peak = *std::max_element(x.begin(), x.end());
    const double bound = spec.top_n_sigma > 0 ? deviation(x, peak) * -spec.top_n_sigma : -INFINITY;
    const double factor = 1 / (spec.dynatemp_range > 0 ? 1.0 : spec.temperature);
    Tokens left;
    for (size_t t = 0; t < x.size(); ++t) {
        const double z = centred(x[t], peak);
        if (x[t] > -INF && z >= bound) left.push_back({static_cast<int32_t>(t), x[t], z * factor});
    }
    if (spec.top_k > 0 && static_cast<size_t>(spec.top_k) < left.size()) {
        std::stable_sort(left.begin(), left.end(), by_logit);
        left.resize(static_cast<size_t>(spec.top_k));
        only(left, [](const Token&) { return true; });
    }
    if (spec.typical_p < 1) {
        const double log_total = log_total_of(left), expected = entropy_of(left);
        const auto far = [=](const Token& t) { return std::fabs(log_total - t.z - expected); };
        nucleus(left, spec.typical_p, [=](const Token& a, const Token& b) { return far(a) < far(b); });
    }
    if (spec.top_p < 1) nucleus(left, spec.top_p, by_logit);
    if (spec.min_p > 0) only(left, [&](const Token& t) { return t.z >= ln(spec.min_p); });
    exclude(left, spec);
    if (spec.dynatemp_range > 0) change_temperature(left, spec);
    if (spec.mirostat) {
        const double log_total = log_total_of(left);
        const Token best = *std::max_element(left.begin(), left.end(), [](auto& a, auto& b) { return a.x < b.x; });
        only(left, [&](const Token& t) {
            return (log_total - t.z) * 0x1.71547652b82fep+0 <= carry[0] || t.id == best.id;
        });
    }
    const bool adaptive = spec.adaptive_target >= 0 && !spec.mirostat;
    std::vector<double> shares;
    if (adaptive) {
        double total = 0, max_z = -INFINITY;
        for (const Token& t : left) total += static_cast<double>(weight(t.z));
        const double aim = std::min(std::max(2 * spec.adaptive_target - carry[0] / carry[1], 0.0), 1.0);
        for (Token& t : left) {
            shares.push_back(static_cast<double>(weight(t.z)) / total);
            const double far = std::fabs((shares.back() - aim) * (1 / 0.3));
            t.z = -(far * 10 * far / (far + 1));
            max_z = std::max(max_z, t.z);
        }
        for (Token& t : left) t.z -= max_z;
    }
    double score = INFINITY;
    Token chosen = {};
    for (const Token& t : left) {
        const uint32_t word = noise(spec.seed, static_cast<uint32_t>(spec.position), static_cast<uint32_t>(t.id));
        const double own = ln(-ln((4294967296.0 - 0.5 - word) * 0x1p-32)) - t.z;
        if (own < score) score = own, chosen = t;
    }
    const double surprise = (log_total_of(left) - chosen.z) * 0x1.71547652b82fep+0;
    if (adaptive) {
        const auto at = std::find_if(left.begin(), left.end(), [&](const Token& t) { return t.id == chosen.id; });
        carry[0] = shares[static_cast<size_t>(at - left.begin())] + spec.adaptive_decay * carry[0];
        carry[1] = 1 + spec.adaptive_decay * carry[1];
    }
    if (spec.mirostat) carry[0] -= spec.mirostat_eta * (surprise - spec.mirostat_tau);
    return chosen.id;
}

inline bool is_chained(const SampleRow& spec) {
    return spec.typical_p < 1 || spec.top_n_sigma > 0 || spec.xtc_probability > 0 || spec.dynatemp_range > 0 ||
           spec.mirostat || spec.adaptive_target >= 0;
}

inline int32_t choose(const std::vector<float>& x, const SampleRow& spec) {
    const std::vector<int32_t> ids = in_order(x);
    if (spec.temperature < 1e-5) return ids[0];
    const float peak = x[ids[0]];
    const double factor = 1 / spec.temperature;
    const size_t limit = spec.top_k > 0 ? std::min<size_t>(ids.size(), spec.top_k) : ids.size();
    int64_t total = 0, before = 0;
    for (size_t i = 0; i < limit; ++i) total += weight(centred(x[ids[i]], peak) * factor);
    const int64_t mass = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(static_cast<double>(total) * spec.top_p)));
    double best = INFINITY;
    int32_t best_id = -1;
    for (size_t i = 0; i < limit; ++i) {
        const int32_t id = ids[i];
        const double z = centred(x[id], peak) * factor;
        if (x[id] == -INF || (spec.min_p > 0 && z < ln(spec.min_p)) || (spec.top_p < 1 && before >= mass)) break;
        before += weight(z);
        const uint32_t word = noise(spec.seed, static_cast<uint32_t>(spec.position), static_cast<uint32_t>(id));
        const double one_minus_u = (4294967296.0 - 0.5 - word) * 0x1p-32;
        const double score = ln(-ln(one_minus_u)) - z;
        if (score < best || (score == best && id < best_id)) best = score, best_id = id;
    }
    return best_id;
}

}  // namespace sampler_rules
