// The sampler against the same rules written plainly: every token is weighed, put in order and given its noise. The
// arithmetic of one number is that of kvasir/sampling, so tokens and bits must be equal.
#include "../sampler.h"

#include <algorithm>

#include "../kvasir_cpu.h"
#include "../pool.h"
#include "check.h"

KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool);

namespace {

using namespace kvasir;
using kvasir_test::Guarded;
using kvasir_test::require;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33;

// ---- one number ----

int64_t weight(double z) {
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

double ln(double x) {
    int n;
    double m = std::frexp(x, &n);  // in [1/2, 1)
    if (m < 0x1.6a09e667f3bcdp-1) m *= 2, --n;
    const double f = m - 1, s = f / (f + 2), square = s * s;
    double series = square * (1.0 / 19);
    for (int i = 17; i > 1; i -= 2) series = (series + 1.0 / i) * square;
    return (series + 1) * s * 2 + n * LN2_LOW + n * LN2_HIGH;
}

uint32_t noise(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t c[4] = {position, token / 4, 0, 0};
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

double centred(float x, float peak) { return std::min(static_cast<double>(x) - std::min<double>(peak, 1e300), 0.0); }

std::vector<int32_t> in_order(const std::vector<float>& x) {
    std::vector<int32_t> ids(x.size());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
    return ids;
}

void change(std::vector<float>& x, const SampleRow& spec) {
    const int64_t vocab = static_cast<int64_t>(x.size());
    for (int64_t t = 0; spec.mask && t < vocab; ++t) {
        if (t / 32 >= spec.mask_words || !(spec.mask[t / 32] >> (t % 32) & 1)) x[t] = -INF;
    }
    for (int64_t i = 0; spec.num_ids - spec.prompt_len < spec.min_tokens && i < spec.num_stop_ids; ++i) {
        if (spec.stop_ids[i] >= 0 && spec.stop_ids[i] < vocab) x[spec.stop_ids[i]] = -INF;
    }
    for (int64_t i = 0; i < spec.num_bias; ++i) x[spec.bias_ids[i]] += spec.bias[i];
    for (int64_t t = 0; t < vocab; ++t) {
        const bool known = std::count(spec.ids, spec.ids + spec.num_ids, t) > 0;
        if (known) x[t] = x[t] > 0 ? x[t] / spec.repetition_penalty : x[t] * spec.repetition_penalty;
        const float count = static_cast<float>(std::count(spec.ids + spec.prompt_len, spec.ids + spec.num_ids, t));
        if (count == 0) continue;
        const float times = count * spec.frequency_penalty;
        x[t] = x[t] - times - spec.presence_penalty;
    }
}

int32_t choose(const std::vector<float>& x, const SampleRow& spec) {
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

void check_row(const float* row, int64_t vocab, const SampleRow& spec, const Sampled& found) {
    const std::vector<float> raw(row, row + vocab);
    std::vector<float> x = raw;
    change(x, spec);
    const bool none = *std::max_element(x.begin(), x.end()) == -INF;
    if (none) return require(found.error == SAMPLE_NOTHING_ALLOWED, "forbidden");
    require(found.error == SAMPLE_OK, "no error");
    require(found.token == choose(x, spec), "token");
    if (spec.logprobs < 0) return;
    const std::vector<int32_t> ids = in_order(raw);
    int64_t total = 0;
    for (const float v : raw) total += weight(centred(v, raw[ids[0]]));
    const double log_total = ln(static_cast<double>(total) * 0x1p-40);
    const auto logprob = [&](int32_t id) { return static_cast<float>(centred(raw[id], raw[ids[0]]) - log_total); };
    const float own = logprob(found.token);
    require(kvasir_test::same(&own, &found.logprob, 1), "logprob");
    require(ids[found.rank - 1] == found.token, "rank");
    for (int32_t i = 0; i < std::min<int64_t>(spec.logprobs, vocab); ++i) {
        const float best = logprob(ids[i]);
        require(found.best_ids[i] == ids[i] && kvasir_test::same(&best, &found.best_logprobs[i], 1), "best");
    }
}

// ---- many rows ----

using Random = std::mt19937;

int64_t below(Random& random, int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); }

template <typename T, size_t N>
T one_of(Random& random, const T (&values)[N]) {
    return values[below(random, N)];
}

float logit(Random& random, int kind) {
    std::normal_distribution<float> normal;
    const float x = normal(random);
    switch (kind) {
        case 0: return x * 3;
        case 1: return std::nearbyint(x);
        case 2: return x > 0 ? 0.0f : -0.0f;
        case 3: return x > 1.5f ? INF : x < 0 ? -INF : x;
        case 4: return x * 3e-39f;
        case 5: return x > 2 ? x * 30 : -INF;
        default: return x * 1e37f;
    }
}

// A spec whose arrays end at forbidden pages.
struct Case {
    Guarded<int32_t> ids{7}, stop_ids{2}, bias_ids{2}, mask;
    Guarded<float> bias{2};
    SampleRow spec = {};

    Case(Random& random, int64_t vocab) : mask((vocab + 31) / 32) {
        for (int i = 0; i < 7; ++i) ids[i] = static_cast<int32_t>(below(random, vocab + 2)) - 1;
        for (int i = 0; i < 2; ++i) stop_ids[i] = static_cast<int32_t>(below(random, vocab + 2)) - 1;
        for (int i = 0; i < 2; ++i) bias_ids[i] = static_cast<int32_t>(below(random, vocab));
        for (int64_t i = 0; i < (vocab + 31) / 32; ++i) mask[i] = static_cast<int32_t>(random());
        bias[0] = 2.5f;
        bias[1] = -40.0f;
        spec.temperature = one_of(random, {0.0, 1e-5, 0.3, 1.0, 100.0});
        spec.top_p = one_of(random, {1.0, 1.0, 0.95, 0.3, 1e-9});
        spec.min_p = one_of(random, {0.0, 0.0, 0.1, 1.0});
        spec.top_k = one_of(random, {-1, 0, 1, 5, 64, 65, 300, 1 << 30});
        spec.presence_penalty = one_of(random, {0.0f, 0.5f});
        spec.frequency_penalty = one_of(random, {0.0f, -0.3f});
        spec.repetition_penalty = one_of(random, {1.0f, 1.3f});
        spec.seed = random();
        spec.position = below(random, 1 << 20);
        spec.ids = ids.data;
        spec.num_ids = 7;
        spec.prompt_len = below(random, 8);
        spec.min_tokens = below(random, 6);
        spec.stop_ids = stop_ids.data;
        spec.num_stop_ids = below(random, 3);
        spec.bias_ids = bias_ids.data;
        spec.bias = bias.data;
        spec.num_bias = bias_ids[0] == bias_ids[1] ? 0 : below(random, 3);
        if (random() % 3 == 0) spec.mask = mask.data;
        spec.mask_words = std::max<int64_t>(0, (vocab + 31) / 32 - below(random, 2));
        spec.logprobs = one_of(random, {-1, 0, 3, MAX_LOGPROBS});
    }
};

void check_rows(Random& random, int64_t vocab, int64_t rows, void* pool, int32_t threads) {
    Guarded<float> logits(rows * vocab);
    Guarded<SampleRow> specs(rows);
    Guarded<Sampled> results(rows);
    Guarded<uint8_t> scratch(threads * sample_scratch(vocab));
    std::vector<Case*> cases;
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = static_cast<int>(below(random, 7));
        for (int64_t i = 0; i < vocab; ++i) logits[r * vocab + i] = logit(random, kind);
        logits[r * vocab + below(random, vocab)] = kind == 4 ? 0.0f : 1.0f;  // so that the row is sound
        cases.push_back(new Case(random, vocab));
        specs[r] = cases.back()->spec;
    }
    SampleArgs args = {logits.data, vocab, vocab, rows, specs.data, results.data, scratch.data};
    kvasir_sample(&args, pool);
    for (int64_t r = 0; r < rows; ++r) {
        check_row(logits.data + r * vocab, vocab, specs[r], results[r]);
        delete cases[static_cast<size_t>(r)];
    }
}

void check_errors() {
    constexpr int64_t VOCAB = 300, ROWS = 4;
    Guarded<float> logits(ROWS * VOCAB);
    Guarded<SampleRow> specs(ROWS);
    Guarded<Sampled> results(ROWS);
    Guarded<uint8_t> scratch(sample_scratch(VOCAB));
    Guarded<int32_t> outside(1);
    Guarded<float> bias(1);
    outside[0] = VOCAB;
    bias[0] = 1.0f;
    for (int64_t i = 0; i < ROWS * VOCAB; ++i) logits[i] = i < VOCAB ? -INF : static_cast<float>(i % 7);
    logits[2 * VOCAB - 1] = NAN;
    for (int64_t r = 0; r < ROWS; ++r) {
        specs[r] = SampleRow{};
        specs[r].repetition_penalty = 1.0f;
        specs[r].logprobs = 1;
    }
    specs[2].bias_ids = outside.data;
    specs[2].bias = bias.data;
    specs[2].num_bias = 1;
    SampleArgs args = {logits.data, VOCAB, VOCAB, ROWS, specs.data, results.data, scratch.data};
    kvasir_sample(&args, nullptr);
    const int32_t errors[] = {SAMPLE_ALL_LOW, SAMPLE_NAN, SAMPLE_BIAS_OUTSIDE, SAMPLE_OK};
    for (int64_t r = 0; r < ROWS; ++r) {
        require(results[r].error == errors[r] && (results[r].token == -1) == (errors[r] != SAMPLE_OK), "errors");
    }
}

}  // namespace

void test_sampler() {
    Random random(7);
    check_errors();
    for (const int32_t threads : {1, 2, 3}) {
        Pool* pool = pool_create(threads, false);
        for (const int64_t vocab : {1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 700}) {
            for (const int64_t rows : {1, 2, 5}) {
                for (int i = 0; i < (rows == 1 ? 12 : 3); ++i) check_rows(random, vocab, rows, pool, threads);
            }
        }
        pool_destroy(pool);
    }
}
