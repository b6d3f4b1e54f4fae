// Tests the sampler against a plain implementation of its rules (sampler_rules.h), on rows and parameters of all kinds.
#include "sampler_rules.h"

#include "../kvasir_cpu.h"
#include "../pool.h"
#include "check.h"

KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool);

namespace {

using namespace kvasir;
using namespace sampler_rules;
using kvasir_test::Guarded;
using kvasir_test::require;

constexpr float INF = sampler_rules::INF;

void check_row(const float* row, int64_t vocab, const SampleRow& spec, const Sampled& found) {
    const std::vector<float> raw(row, row + vocab);
    std::vector<float> x = raw;
    change(x, spec);
    const bool none = *std::max_element(x.begin(), x.end()) == -INF;
    if (none) return require(found.error == SAMPLE_NOTHING_ALLOWED, "an error if no token is allowed");
    require(found.error == SAMPLE_OK, "no error");
    double carry[CARRIED];
    std::memcpy(carry, spec.carry, sizeof carry);
    const bool chained = spec.temperature >= 1e-5 && is_chained(spec);
    require(found.token == (chained ? choose_by_chain(x, spec, carry) : choose(x, spec)), "the token");
    require(std::memcmp(found.carry, carry, sizeof carry) == 0, "carry");
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

// Two short lists in ascending order; the arrays end at inaccessible pages.
struct TwoLists {
    Guarded<int32_t> ids{3};
    Guarded<int64_t> ends{2};

    TwoLists(Random& random, int64_t vocab) {
        for (int i = 0; i < 3; ++i) ids[i] = static_cast<int32_t>(below(random, std::min<int64_t>(vocab, 3)));
        ids[1] = ids[0] + 1;
        ends[0] = 1;
        ends[1] = 3;
    }
    IdLists of(Random& random) { return {ids.data, ends.data, one_of(random, {0, 1, 2})}; }
};

// A SampleRow whose arrays end at inaccessible pages.
struct Case {
    Guarded<int32_t> ids{7}, stop_ids{2}, bias_ids{2}, mask, breakers{1}, heads{1};
    Guarded<float> bias{2};
    TwoLists words, sequences;
    SampleRow spec = {};

    Case(Random& random, int64_t vocab)
        : mask((vocab + 31) / 32), words(random, vocab), sequences(random, vocab) {
        const int64_t among = random() % 2 ? vocab + 2 : 4;  // or few ids, so that they repeat
        for (int i = 0; i < 7; ++i) ids[i] = static_cast<int32_t>(below(random, among)) - 1;
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
        spec.bad_words = words.of(random);
        spec.repetition_last_n = one_of(random, {-1, 0, 3, 1 << 30});
        spec.occurrence_last_n = one_of(random, {-1, 0, 3, 1 << 30});
        fill_dry(random);
        fill_chain(random);
    }

    void fill_dry(Random& random) {
        breakers[0] = static_cast<int32_t>(random() & random() & random());
        heads[0] = 1 << sequences.ids[0] | 1 << sequences.ids[1];
        spec.dry_multiplier = one_of(random, {0.0, 0.5, 8.0});
        spec.dry_base = 2.0;
        spec.dry_allowed_length = below(random, 4);
        spec.dry_penalty_last_n = one_of(random, {-1, 0, 1, 2, 5, 1 << 30});
        spec.dry = {breakers.data, below(random, 2), heads.data, 1, sequences.of(random)};
    }

    void fill_chain(Random& random) {
        spec.typical_p = one_of(random, {1.0, 1.0, 0.9, 0.3, 1e-9});
        spec.top_n_sigma = one_of(random, {-1.0, -1.0, 1e-9, 0.7, 1000.0});
        spec.xtc_probability = one_of(random, {0.0, 0.5, 1.0});
        spec.xtc_threshold = one_of(random, {0.0, 0.01, 0.1, 0.5, 0.6});
        spec.dynatemp_range = one_of(random, {0.0, 0.0, 0.5, 100.0});
        spec.dynatemp_exponent = one_of(random, {0.0, 1.0, 3.0});
        spec.mirostat = one_of(random, {0, 0, 2});
        spec.mirostat_tau = 3.0;
        spec.mirostat_eta = 0.7;
        spec.carry[0] = one_of(random, {-1.0, 2.0, 6.0, 100.0});
        spec.adaptive_target = one_of(random, {-1.0, -1.0, 0.0, 0.4, 1.0});
        spec.adaptive_decay = one_of(random, {0.0, 0.9, 0.99});
        spec.carry[1] = one_of(random, {1.0, 10.0});
        if (random() % 2 == 0) return;  // half of the rows use none of the chain's filters
        spec.typical_p = 1.0;
        spec.top_n_sigma = spec.xtc_probability = spec.dynatemp_range = spec.mirostat = 0;
        spec.adaptive_target = -1.0;
    }
};

void check_rows(Random& random, int64_t vocab, int64_t rows, void* pool, int32_t threads) {
    Guarded<float> logits(rows * vocab);
    Guarded<SampleRow> specs(rows);
    Guarded<Sampled> results(rows);
    Guarded<uint8_t> scratch(threads * sample_scratch(vocab));
    Guarded<int32_t> room(threads * 7);
    std::vector<Case*> cases;
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = static_cast<int>(below(random, 7));
        for (int64_t i = 0; i < vocab; ++i) logits[r * vocab + i] = logit(random, kind);
        logits[r * vocab + below(random, vocab)] = kind == 4 ? 0.0f : 1.0f;  // so that at least one logit is finite
        cases.push_back(new Case(random, vocab));
        specs[r] = cases.back()->spec;
    }
    SampleArgs args = {logits.data, vocab, vocab, rows, specs.data, results.data, scratch.data, room.data, 7};
    kvasir_sample(&args, pool);
    for (int64_t r = 0; r < rows; ++r) {
        check_row(logits.data + r * vocab, vocab, specs[r], results[r]);
        delete cases[static_cast<size_t>(r)];
    }
}

// Rows of one sequence may be sampled at once, so each thread has its own room for DRY.
void check_dry_room() {
    constexpr int64_t VOCAB = 300, IDS = 7;
    constexpr int32_t THREADS = 2;
    Random random(9);
    Case c(random, VOCAB);
    c.spec.dry_multiplier = 1.0;
    c.spec.dry_penalty_last_n = -1;
    c.spec.dry_allowed_length = 0;
    c.spec.dry.breaker_words = c.spec.dry.head_words = 0;
    const SampleRow specs[] = {c.spec, c.spec};
    const std::vector<float> logits(THREADS * VOCAB, 1.0f);
    std::vector<Sampled> results(THREADS);
    std::vector<int32_t> room(THREADS * IDS, -1);
    std::vector<uint64_t> scratch(static_cast<size_t>(THREADS * sample_scratch(VOCAB)) / 8);
    SampleArgs args = {logits.data(), VOCAB, VOCAB, THREADS, specs, results.data(),
                       reinterpret_cast<uint8_t*>(scratch.data()), room.data(), IDS};
    Pool* pool = pool_create(THREADS, false);
    kvasir_sample(&args, pool);
    pool_destroy(pool);
    for (size_t i = 1; i < IDS; ++i) require(room[i] >= 0 && room[IDS + i] == room[i], "each thread writes its own room");
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
        specs[r].typical_p = 1.0;
        specs[r].adaptive_target = -1.0;
        specs[r].logprobs = 1;
    }
    specs[2].bias_ids = outside.data;
    specs[2].bias = bias.data;
    specs[2].num_bias = 1;
    SampleArgs args = {logits.data, VOCAB, VOCAB, ROWS, specs.data, results.data, scratch.data, nullptr, 0};
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
    check_dry_room();
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
