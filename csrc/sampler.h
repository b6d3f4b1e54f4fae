// Samples tokens from rows of logits, with the same bits as the reference sampler (kvasir/sampling).
#pragma once

#include <cstdint>

#include "team.h"

namespace kvasir {

// Sequences of ids, one after another: number i ends before ids[ends[i]].
struct IdLists {
    const int32_t* ids;
    const int64_t* ends;
    int64_t count;
};

// What DRY (dry.py of kvasir/sampling) needs besides its request fields, which are members of SampleRow.
struct Dry {
    const int32_t* breakers;  // words of the ids that are breakers by themselves, as in a mask
    int64_t breaker_words;
    const int32_t* heads;  // words of the first ids of the breaker sequences
    int64_t head_words;
    IdLists sequences;  // ascending, distinct, none empty
};

constexpr int CARRIED = 2;  // numbers of the sampler's state that is not a function of the ids; first mirostat's mu

struct SampleRow {
#include "sampler_fields.h"
    int32_t logprobs;  // -1 for none, else how many of the best besides the chosen one, at most MAX_LOGPROBS
    int32_t given;     // 1 + a token to describe as if it had been chosen; 0: a token is sampled
    double carry[CARRIED];  // at this position
    uint64_t seed;
    int64_t position;
    const int32_t* ids;  // all known ids, the prompt first
    int64_t num_ids, prompt_len;
    int64_t min_tokens;
    const int32_t* stop_ids;
    int64_t num_stop_ids;
    const int32_t* bias_ids;  // unique
    const float* bias;
    int64_t num_bias;
    IdLists bad_words;          // none empty
    Dry dry;
    const int32_t* mask;  // words of a grammar, or null; bit i & 31 of word i >> 5 allows token i
    int64_t mask_words;
};

constexpr int32_t MAX_LOGPROBS = 128;

enum SampleError : int32_t {
    SAMPLE_OK = 0,
    SAMPLE_NAN = 1,              // a logit is NaN
    SAMPLE_ALL_LOW = 2,          // no logit is above -inf
    SAMPLE_NOTHING_ALLOWED = 3,  // none is left after mask, min_tokens, bias and penalties
    SAMPLE_BIAS_OUTSIDE = 4,     // a bias names an id outside the vocabulary
};

struct Sampled {
    int32_t token;  // -1 with an error
    int32_t error;
    float logprob;  // this and the rest are written only if logprobs are requested
    int32_t rank;
    int32_t best_ids[MAX_LOGPROBS];  // as many as requested, at most the vocabulary
    float best_logprobs[MAX_LOGPROBS];
    double carry[CARRIED];  // at the next position; unchanged for a row without state
};

struct SampleArgs {
    const float* logits;  // [rows, stride], left unchanged
    int64_t stride, vocab, rows;
    const SampleRow* specs;
    Sampled* results;
    uint8_t* scratch;  // sample_scratch(vocab) bytes for each thread of the team, aligned to 8
    int32_t* dry_room;  // dry_ids numbers for each thread; null if no row uses DRY
    int64_t dry_ids;    // at least as many as DRY considers of any row
};

constexpr int64_t SAMPLE_BLOCK = 256;  // logits per stored maximum
constexpr int64_t MAX_SAMPLE_VOCAB = int64_t{1} << 22;  // so that the sum of all weights fits an int64

// Numbers for a vocabulary in vectors: lists are read and written 32 tokens at a time.
constexpr int64_t sample_room(int64_t vocab) { return (vocab + 31) / 32 * 32; }

int64_t sample_scratch(int64_t vocab);  // a multiple of 64

}  // namespace kvasir
