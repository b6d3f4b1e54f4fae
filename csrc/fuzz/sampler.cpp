// Fuzzes the sampler with arbitrary logits and parameters. Each row must give a token of the vocabulary or an error,
// the same on every instruction set, with any number of threads and in any batch.
#include "../sampler.h"

#include <memory>
#include <set>

#include "../pool.h"
#include "input.h"

KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool);

namespace {

using namespace kvasir_fuzz;
using kvasir::Sampled;
using kvasir::SampleRow;

constexpr int64_t MAX_IDS = 40;

// Up to three short lists, ascending and distinct, in arrays that end at inaccessible pages.
struct Lists {
    Guarded<int32_t> ids{9};
    Guarded<int64_t> ends{3};

    kvasir::IdLists of(Input& in, int64_t among) {
        std::set<std::vector<int32_t>> lists;
        for (int64_t n = in.between(0, 3); n > 0; --n) {
            std::vector<int32_t> list(static_cast<size_t>(in.between(1, 3)));
            for (int32_t& id : list) id = static_cast<int32_t>(in.between(0, among - 1));
            lists.insert(list);
        }
        std::vector<int32_t> all;
        const int64_t count = static_cast<int64_t>(lists.size());
        int64_t* end = ends.data + 3 - count;
        for (const auto& list : lists) {
            all.insert(all.end(), list.begin(), list.end());
            *end++ = static_cast<int64_t>(all.size());
        }
        int32_t* first = ids.data + 9 - all.size();
        std::copy(all.begin(), all.end(), first);
        return {first, ends.data + 3 - count, count};
    }
};

// A row's parameters, in arrays that end at inaccessible pages.
struct Parameters {
    Guarded<int32_t> ids, stop_ids, bias_ids, mask, breakers, heads;
    Guarded<float> bias;
    Lists bad_words, sequences;
    SampleRow spec = {};

    Parameters(Input& in, int64_t vocab)
        : ids(MAX_IDS), stop_ids(3), bias_ids(3), mask((vocab + 31) / 32), breakers((vocab + 31) / 32),
          heads((vocab + 31) / 32), bias(3) {
        spec.temperature = in.one_of({0.0, 1.0, 0.3, 100.0, 1e-5, 1e-300, 0.9999});
        spec.top_p = in.one_of({1.0, 0.9, 1e-9, 0.5, 0.999999});
        spec.min_p = in.one_of({0.0, 0.0, 0.05, 1.0});
        spec.top_k = in.one_of({0, 1, 5, 64, 65, 300, 1 << 30});
        spec.seed = in.any<uint64_t>();
        spec.position = in.between(0, 1 << 15);
        spec.logprobs = in.one_of({-1, 0, 3, kvasir::MAX_LOGPROBS});
        if (in.byte() % 16 == 15) spec.given = 1 + static_cast<int32_t>(in.between(0, vocab - 1));
        fill_ids(in, vocab);
        fill_bias(in, vocab);
        fill_penalties(in, vocab);
        fill_chain(in);
    }

    // How many ids DRY considers.
    int64_t considered() const {
        const int64_t last_n = spec.dry_penalty_last_n;
        return last_n > 0 ? std::min(last_n, spec.num_ids) : spec.num_ids;
    }

    // Ids of the whole vocabulary and just outside it, or of at most three ids, so that they repeat. The arrays end at
    // the page boundary.
    void fill_ids(Input& in, int64_t vocab) {
        const bool few = in.flag();
        spec.num_ids = in.between(0, MAX_IDS);
        spec.prompt_len = in.between(0, spec.num_ids);
        int32_t* first = ids.data + MAX_IDS - spec.num_ids;
        for (int64_t i = 0; i < spec.num_ids; ++i) {
            first[i] = static_cast<int32_t>(few ? in.byte() % std::min<int64_t>(vocab, 3) : in.between(-1, vocab));
        }
        spec.ids = first;
        spec.min_tokens = in.between(0, 50);
        for (int64_t i = 0; i < 3; ++i) stop_ids[i] = static_cast<int32_t>(in.between(-1, vocab));
        spec.num_stop_ids = in.between(0, 3);
        spec.stop_ids = stop_ids.data + 3 - spec.num_stop_ids;
        spec.bad_words = bad_words.of(in, few ? std::min<int64_t>(vocab, 3) : vocab);
    }

    void fill_bias(Input& in, int64_t vocab) {
        spec.num_bias = std::min(in.between(0, 3), vocab);
        spec.bias_ids = bias_ids.data + 3 - spec.num_bias;
        spec.bias = bias.data + 3 - spec.num_bias;
        for (int64_t i = 0; i < 3; ++i) bias[i] = in.number(true);
        for (int64_t i = 0; i < 3; ++i) bias_ids[i] = static_cast<int32_t>(vocab - 1 - i);
        if (in.byte() % 16 == 15) bias_ids[2] = static_cast<int32_t>(vocab);
        in.bits(reinterpret_cast<uint8_t*>(mask.data), (vocab + 31) / 32 * 4);
        if (in.byte() % 3 == 1) spec.mask = mask.data;
        spec.mask_words = in.between(0, (vocab + 31) / 32);
    }

    void fill_penalties(Input& in, int64_t vocab) {
        spec.presence_penalty = in.one_of({0.0f, 0.5f, -2.0f});
        spec.frequency_penalty = in.one_of({0.0f, -0.3f, 2.0f});
        spec.repetition_penalty = in.one_of({1.0f, 1.3f, 0.01f, 10.0f});
        spec.repetition_last_n = in.one_of({-1, 0, 1, 7, 1 << 30});
        spec.occurrence_last_n = in.one_of({0, -1, 1, 7, 1 << 30});
        spec.dry_multiplier = in.one_of({0.0, 0.8, 1e30});
        spec.dry_base = in.one_of({1.75, 1.0, 0.5, 1e300});
        spec.dry_allowed_length = in.between(0, 5);
        spec.dry_penalty_last_n = in.one_of({-1, 0, 1, 2, 20, 1 << 30});
        kvasir::Dry& dry = spec.dry;
        dry.breakers = breakers.data;
        dry.breaker_words = in.between(0, (vocab + 31) / 32);
        for (int64_t n = in.between(0, 2); n > 0; --n) mark(breakers, in.between(0, vocab - 1));
        dry.sequences = sequences.of(in, std::min<int64_t>(vocab, 3));
        for (int64_t i = 0; i < dry.sequences.count; ++i) {
            mark(heads, dry.sequences.ids[i ? dry.sequences.ends[i - 1] : 0]);
        }
        dry.heads = heads.data;
        dry.head_words = (vocab + 31) / 32;
    }

    // The filters beyond top-k, top-p and min-p; half of the rows use none of them.
    void fill_chain(Input& in) {
        spec.typical_p = 1.0;
        spec.top_n_sigma = -1.0;
        spec.adaptive_target = -1.0;
        if (!in.flag()) return;
        spec.typical_p = in.one_of({1.0, 0.9, 0.2, 1e-9});
        spec.top_n_sigma = in.one_of({-1.0, 1e-9, 0.7, 1000.0});
        spec.xtc_probability = in.one_of({0.0, 0.5, 1.0});
        spec.xtc_threshold = in.one_of({0.1, 0.0, 0.5, 0.6});
        spec.dynatemp_range = in.one_of({0.0, 0.5, 100.0});
        spec.dynatemp_exponent = in.one_of({1.0, 0.0, 3.0});
        spec.mirostat = in.one_of({0, 2});
        spec.mirostat_tau = in.one_of({5.0, 0.0, 100.0});
        spec.mirostat_eta = in.one_of({0.1, 1.0});
        spec.carry[0] = in.one_of({10.0, -1.0, 0.0, 1e300});
        spec.adaptive_target = in.one_of({-1.0, 0.0, 0.5});
        spec.adaptive_decay = in.one_of({0.9, 0.0, 0.99});
        spec.carry[1] = in.one_of({10.0, 1.0});
    }

    static void mark(Guarded<int32_t>& words, int64_t id) {
        words[id / 32] = static_cast<int32_t>(static_cast<uint32_t>(words[id / 32]) | 1u << (id % 32));
    }
};

float logit(Input& in, int kind, float x) {
    switch (kind) {
        case 0: return x * 3;
        case 1: return std::nearbyint(x);  // ties
        case 2: return x > 0 ? 0.0f : -0.0f;
        case 3: return x > 1.5f ? INFINITY : x < 0 ? -INFINITY : x;
        case 4: return x * 3e-39f;
        case 5: return x * 1e38f;
        case 6: return -INFINITY;
        default: return in.number(true);
    }
}

// Each call creates its own pool, so that no waiting threads outlive the input.
void sample(kvasir::SampleArgs args, int32_t threads) {
    if (threads == 0) return kvasir_sample(&args, nullptr);
    kvasir::Pool* pool = kvasir::pool_create(threads, false);
    kvasir_sample(&args, pool);
    kvasir::pool_destroy(pool);
}

// Appends a row's result to `to`, without the members that the sampler did not write.
void put(std::vector<float>& to, const Sampled& result, const SampleRow& spec, int64_t vocab) {
    require(result.error >= kvasir::SAMPLE_OK && result.error <= kvasir::SAMPLE_BIAS_OUTSIDE, "a known error");
    require((result.token == -1) == (result.error != kvasir::SAMPLE_OK), "either a token or an error");
    require(result.token >= -1 && result.token < vocab, "a token of the vocabulary");
    require(!spec.given || result.error || result.token == spec.given - 1, "the given token is returned");
    to.push_back(static_cast<float>(result.token));
    to.push_back(static_cast<float>(result.error));
    uint16_t carry[4 * kvasir::CARRIED];  // each is exact as a float
    std::memcpy(carry, result.carry, sizeof carry);
    to.insert(to.end(), std::begin(carry), std::end(carry));
    if (result.error || spec.logprobs < 0) return;
    require(result.rank >= 1 && result.rank <= vocab, "a rank in range");
    to.push_back(result.logprob);
    to.push_back(static_cast<float>(result.rank));
    for (int64_t i = 0; i < std::min<int64_t>(spec.logprobs, vocab); ++i) {
        to.push_back(static_cast<float>(result.best_ids[i]));
        to.push_back(result.best_logprobs[i]);
    }
}

}  // namespace

void fuzz_sampler(const uint8_t* data, size_t size) {
    Input in(data, size);
    const int64_t vocab = in.between(1, in.flag() ? 40 : 600), rows = in.between(1, 3);
    const int64_t stride = vocab + in.between(0, 2);
    const int32_t threads = static_cast<int32_t>(in.between(0, 3));
    Guarded<float> logits((rows - 1) * stride + vocab);
    std::mt19937 random(in.any<uint16_t>());
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = in.byte() % 8;
        for (int64_t i = 0; i < vocab; ++i) logits[r * stride + i] = logit(in, kind, normal(random));
        for (int64_t i = in.byte() % 4; i > 0; --i) logits[r * stride + in.between(0, vocab - 1)] = in.number(true);
    }
    std::vector<std::unique_ptr<Parameters>> parameters;
    Guarded<SampleRow> specs(rows);
    int64_t considered = 0;  // by DRY, most ids of a row
    for (int64_t r = 0; r < rows; ++r) {
        parameters.push_back(std::make_unique<Parameters>(in, vocab));
        specs[r] = parameters.back()->spec;
        considered = std::max(considered, parameters.back()->considered());
    }
    on_all(
        [&] {
            Guarded<Sampled> results(rows), alone(1);
            Guarded<uint8_t> scratch(std::max(threads, 1) * kvasir::sample_scratch(vocab));
            Guarded<int32_t> room(std::max(threads, 1) * considered);
            kvasir::SampleArgs args = {logits.data, stride, vocab, rows, specs.data, results.data, scratch.data, room.data,
                                       considered};
            sample(args, threads);
            std::vector<float> found;
            for (int64_t r = 0; r < rows; ++r) {
                put(found, results[r], specs[r], vocab);
                std::vector<float> together, single;
                put(together, results[r], specs[r], vocab);
                sample({logits.data + r * stride, vocab, vocab, 1, specs.data + r, alone.data, scratch.data, room.data,
                        considered}, 0);
                put(single, alone[0], specs[r], vocab);
                const auto values = static_cast<int64_t>(single.size());
                require(together.size() == single.size() && same(together.data(), single.data(), values),
                        "a row's result does not depend on the batch");
            }
            return found;
        },
        "sampler: all instruction sets give the same bits");
}
