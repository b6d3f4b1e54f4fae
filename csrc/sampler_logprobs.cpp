// Log-probabilities and ranks of the raw logits.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

// 1 + the number of tokens that precede this one by descending logit, ties by ascending id.
int32_t rank_of(const Logits& row, int64_t token) {
    const float own = row.x[token];
    int64_t rank = 1;
    for (int64_t b = 0; b < row.blocks; ++b) {
        if (!(row.maxima[b] >= own)) continue;
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        for (int64_t i = begin; i < end; i += LANES) {
            const f32x16 a = load_within(row.x, i, end);
            const uint32_t greater_ones = lanes(less(broadcast(own), a));
            const uint32_t reaching = lanes(less_equal(broadcast(own), a));
            const uint32_t before = token > i ? within(token - i) : 0;
            rank += __builtin_popcount(greater_ones | (reaching & before));
        }
    }
    return static_cast<int32_t>(rank);
}

}  // namespace

void describe(Sampled& result, const Logits& row, int64_t total, int64_t count, Candidate* scratch) {
    const Scale scale(row.peak, 1.0);
    const double log_total = log(static_cast<double>(total) * 0x1p-40);
    result.logprob = static_cast<float>(scale.of(row.x[result.token]) - log_total);
    result.rank = rank_of(row, result.token);
    count = lesser(lesser(count, MAX_LOGPROBS), row.vocab);
    if (count < 1) return;
    const int64_t listed = best_in_order(row, count, scratch);
    for (int64_t i = 0; i < listed; ++i) {
        result.best_ids[i] = static_cast<int32_t>(id_of(scratch[i].key));
        result.best_logprobs[i] = static_cast<float>(scale.of(row.x[result.best_ids[i]]) - log_total);
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
