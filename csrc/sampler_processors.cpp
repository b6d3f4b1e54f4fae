// Changes logits before sampling: mask, min_tokens, bad words, bias, penalties.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// x = row for the ids that the mask allows, else -inf. Ids after the mask's last word are forbidden.
void copy_masked(float* x, const float* row, int64_t vocab, const int32_t* mask, int64_t mask_words) {
    for (int64_t i = 0; i < vocab; i += LANES) {
        const uint32_t word = i / 32 < mask_words ? static_cast<uint32_t>(mask[i / 32]) : 0;
        const f32x16 a = load_within(row, i, vocab);
        store(x + i, select(mask_of(word >> (i % 32) & 0xffffu), a, broadcast(-INFINITE)));
    }
}

// The index range of the last `count` ids; all ids if count is negative.
Range last_of(int64_t num_ids, int64_t count) { return {count < 0 || count > num_ids ? 0 : num_ids - count, num_ids}; }

int64_t end_of_prompt(const SampleRow& spec) { return spec.prompt_len > 0 ? spec.prompt_len : 0; }

// Forbids the last id of each bad word whose other ids are the end of the output.
void forbid_bad_words(float* x, int64_t vocab, const SampleRow& spec) {
    const int64_t sampled = spec.num_ids - end_of_prompt(spec);
    int64_t begin = 0;
    for (int64_t w = 0; w < spec.bad_words.count; ++w) {
        const int64_t before = spec.bad_words.ends[w] - begin - 1;
        const int32_t* word = spec.bad_words.ids + begin;
        begin = spec.bad_words.ends[w];
        if (before > 0 && before > sampled) continue;
        const int32_t* end = spec.ids + spec.num_ids - before;
        int64_t same = 0;
        while (same < before && word[same] == end[same]) ++same;
        const int32_t last = word[before];
        if (same == before && last >= 0 && last < vocab) x[last] = -INFINITE;
    }
}

void penalize_repetition(float* x, int64_t vocab, const SampleRow& spec, uint64_t* set) {
    Ids seen(set, vocab);
    const Range window = last_of(spec.num_ids, spec.repetition_last_n);
    for (int64_t i = window.begin; i < window.end; ++i) {
        const int32_t id = spec.ids[i];
        if (!seen.add(id)) continue;
        x[id] = x[id] > 0.0f ? x[id] / spec.repetition_penalty : x[id] * spec.repetition_penalty;
    }
}

void penalize_occurrence(float* x, int64_t vocab, const SampleRow& spec, uint64_t* set, int32_t* counts) {
    Ids seen(set, vocab);
    const int64_t begin =
        spec.occurrence_last_n ? last_of(spec.num_ids, spec.occurrence_last_n).begin : end_of_prompt(spec);
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
    return spec.mask || forbids || spec.bad_words.count > 0 || spec.num_bias > 0 || uses_dry(spec) ||
           spec.repetition_penalty != 1.0f || spec.frequency_penalty != 0.0f || spec.presence_penalty != 0.0f;
}

int32_t process(float* x, const float* row, int64_t vocab, const SampleRow& spec, uint8_t* scratch, int32_t* dry_room) {
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
    forbid_bad_words(x, vocab, spec);
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
    if (uses_dry(spec)) penalize_again(x, vocab, spec, scratch, dry_room);
    return SAMPLE_OK;
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
