// What changes logits before they are drawn from: mask, min_tokens, bias, penalties.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// x = row where the mask allows. Ids behind the last word are forbidden.
void copy_masked(float* x, const float* row, int64_t vocab, const int32_t* mask, int64_t mask_words) {
    for (int64_t i = 0; i < vocab; i += LANES) {
        const uint32_t word = i / 32 < mask_words ? static_cast<uint32_t>(mask[i / 32]) : 0;
        const f32x16 a = load_within(row, i, vocab);
        store(x + i, select(mask_of(word >> (i % 32) & 0xffffu), a, broadcast(-INFINITE)));
    }
}

// A set of ids, to see each once. Ids without a logit are never in it.
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

void penalize_repetition(float* x, int64_t vocab, const SampleRow& spec, uint64_t* set) {
    Ids seen(set, vocab);
    for (int64_t i = 0; i < spec.num_ids; ++i) {
        const int32_t id = spec.ids[i];
        if (!seen.add(id)) continue;
        x[id] = x[id] > 0.0f ? x[id] / spec.repetition_penalty : x[id] * spec.repetition_penalty;
    }
}

void penalize_occurrence(float* x, int64_t vocab, const SampleRow& spec, uint64_t* set, int32_t* counts) {
    Ids seen(set, vocab);
    const int64_t begin = spec.prompt_len > 0 ? spec.prompt_len : 0;
    for (int64_t i = begin; i < spec.num_ids; ++i) {
        const int32_t id = spec.ids[i];
        if (seen.add(id)) counts[id] = 0;
        if (seen.has(id)) ++counts[id];
    }
    for (int64_t i = begin; i < spec.num_ids; ++i) {
        const int32_t id = spec.ids[i];
        if (!seen.has(id)) continue;
        seen.remove(id);
        const float times = static_cast<float>(counts[id]) * spec.frequency_penalty;
        x[id] = x[id] - times - spec.presence_penalty;
    }
}

}  // namespace

bool changes_logits(const SampleRow& spec) {
    const bool forbids = spec.num_ids - spec.prompt_len < spec.min_tokens && spec.num_stop_ids > 0;
    return spec.mask || forbids || spec.num_bias > 0 || spec.repetition_penalty != 1.0f ||
           spec.frequency_penalty != 0.0f || spec.presence_penalty != 0.0f;
}

int32_t process(float* x, const float* row, int64_t vocab, const SampleRow& spec, uint8_t* scratch) {
    if (spec.mask) {
        copy_masked(x, row, vocab, spec.mask, spec.mask_words);
    } else {
        std::memcpy(x, row, static_cast<size_t>(vocab) * sizeof *x);
    }
    if (spec.num_ids - spec.prompt_len < spec.min_tokens) {
        for (int64_t i = 0; i < spec.num_stop_ids; ++i) {
            const int32_t id = spec.stop_ids[i];
            if (id >= 0 && id < vocab) x[id] = -INFINITE;
        }
    }
    for (int64_t i = 0; i < spec.num_bias; ++i) {
        const int32_t id = spec.bias_ids[i];
        if (id < 0 || id >= vocab) return SAMPLE_BIAS_OUTSIDE;
        x[id] += spec.bias[i];
    }
    uint64_t* set = reinterpret_cast<uint64_t*>(scratch);
    int32_t* counts = reinterpret_cast<int32_t*>(scratch + (vocab + 63) / 64 * 8);
    if (spec.repetition_penalty != 1.0f) penalize_repetition(x, vocab, spec, set);
    if (spec.frequency_penalty != 0.0f || spec.presence_penalty != 0.0f) {
        penalize_occurrence(x, vocab, spec, set, counts);
    }
    return SAMPLE_OK;
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
