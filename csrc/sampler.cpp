// Samples tokens from rows of logits by the operations of kvasir/sampling, in the same order and with the same
// roundings, so that the bits equal the reference's. To save time, the maximum of each block of logits is computed
// first, and later passes skip blocks whose maximum is too low to matter.
#include "sampler_parts.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr double GREEDY_BELOW = 1e-5;

// Enables denormals, which the reference uses and the pool's threads flush.
#if defined(__SSE2__)
class Denormals {
  public:
    Denormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~Denormals() { _mm_setcsr(saved_); }
    Denormals(const Denormals&) = delete;

  private:
    unsigned saved_;
};
#elif defined(__aarch64__)
class Denormals {
  public:
    Denormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~Denormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
    Denormals(const Denormals&) = delete;

  private:
    uint64_t saved_;
};
#else
class Denormals {};
#endif

Logits unmeasured(const float* x, int64_t vocab, const float* maxima) {
    return {x, vocab, (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK, maxima, -INFINITE};
}

KVASIR_INLINE float merged(float peak, float other) { return other > peak || other != other ? other : peak; }

// Writes the maxima of these blocks. Returns the greatest of them, or NaN if a logit is NaN.
float measure(const Logits& row, Range blocks, float* maxima) {
    float peak = -INFINITE;
    f32x16 bad = broadcast(0.0f);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const int64_t begin = b * SAMPLE_BLOCK, end = lesser(begin + SAMPLE_BLOCK, row.vocab);
        f32x16 block_max = broadcast(-INFINITE);
        for (int64_t i = begin; i < end; i += LANES) {
            const f32x16 a = load_within(row.x, i, end);
            block_max = max(a, block_max);
            bad = select(unordered(a, a), a, bad);
        }
        maxima[b] = greatest(block_max);
        peak = maxima[b] > peak ? maxima[b] : peak;
    }
    return any(unordered(bad, bad)) ? __builtin_nanf("") : peak;
}

Logits measured(const float* x, int64_t vocab, float* maxima) {
    Logits row = unmeasured(x, vocab, maxima);
    row.peak = measure(row, {0, row.blocks}, maxima);
    return row;
}

// The lowest id at the peak.
int64_t first_at_peak(const Logits& row) {
    int64_t id = 0;
    while (row.maxima[id / SAMPLE_BLOCK] != row.peak) id += SAMPLE_BLOCK;
    while (row.x[id] != row.peak) ++id;
    return id;
}

// ---- rows ----

// A thread's partial results for its blocks of a row.
struct Part {
    float peak;
    int64_t total;
};

// One thread's scratch, in the layout that sample_scratch() accounts for.
struct Scratch {
    Candidate* candidates;  // [vocab rounded up to a multiple of 32], as are the next four members
    double* z;
    int64_t* weights;
    int32_t* ids;
    float* x;
    float* raw_maxima;      // [blocks]
    float* maxima;          // [blocks]
    int32_t* dry_room;      // [args.dry_ids], or null
    Part* part;

    Scratch(const SampleArgs& args, int32_t thread) {
        const int64_t size = sample_scratch(args.vocab), blocks = (args.vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
        const int64_t room = sample_room(args.vocab);
        uint8_t* from = args.scratch + thread * size;
        candidates = reinterpret_cast<Candidate*>(from);
        z = reinterpret_cast<double*>(candidates + room);
        weights = reinterpret_cast<int64_t*>(z + room);
        ids = reinterpret_cast<int32_t*>(weights + room);
        x = reinterpret_cast<float*>(ids + room);
        raw_maxima = x + room;
        maxima = raw_maxima + blocks;
        part = reinterpret_cast<Part*>(from + size - sizeof(Part));
        dry_room = args.dry_room ? args.dry_room + thread * args.dry_ids : nullptr;
    }
};

// Returns the token of a row and updates its carry.
int64_t choose(const Logits& row, const SampleRow& spec, const Scratch& s, double* carry) {
    const int64_t top = first_at_peak(row);
    if (!(spec.temperature >= GREEDY_BELOW)) return top;
    if (needs_chain(spec)) {
        return choose_by_chain(row, spec, {row.x, s.ids, s.z, 0, s.weights, s.candidates}, carry);
    }
    const Scale scale(row.peak, 1.0 / spec.temperature);
    return draw(row, scale, cut_of(row, spec, scale, s.candidates), spec, top);
}

bool is_sound(float peak) { return peak > -INFINITE; }  // false for NaN

int64_t total_asked(const SampleRow& spec, const Logits& raw, Range blocks) {
    const bool asked = spec.logprobs >= 0 && is_sound(raw.peak);
    return asked ? total_weight(raw, blocks, Scale(raw.peak, 1.0)) : 0;
}

// Writes the result of a row whose block maxima are known. total: the sum of total_asked() over all blocks.
void finish(const SampleArgs& args, int64_t r, const Logits& raw, int64_t total, const Scratch& scratch) {
    const SampleRow& spec = args.specs[r];
    Sampled& result = args.results[r];
    result.token = -1;
    result.logprob = 0.0f;
    result.rank = 0;
    std::memcpy(result.carry, spec.carry, sizeof spec.carry);
    result.error = is_sound(raw.peak) ? SAMPLE_OK : raw.peak != raw.peak ? SAMPLE_NAN : SAMPLE_ALL_LOW;
    if (result.error != SAMPLE_OK) return;
    if (spec.given) {
        result.token = spec.given - 1;
        return describe(result, raw, total, spec.logprobs, scratch.candidates);
    }
    Logits row = raw;
    if (changes_logits(spec)) {
        result.error = process(scratch.x, raw.x, args.vocab, spec, reinterpret_cast<uint8_t*>(scratch.candidates),
                               scratch.dry_room);
        if (result.error != SAMPLE_OK) return;
        row = measured(scratch.x, args.vocab, scratch.maxima);
        if (!is_sound(row.peak)) result.error = SAMPLE_NOTHING_ALLOWED;
        if (result.error != SAMPLE_OK) return;
    }
    result.token = static_cast<int32_t>(choose(row, spec, scratch, result.carry));
    if (spec.logprobs >= 0) describe(result, raw, total, spec.logprobs, scratch.candidates);
}

void sample_alone(const SampleArgs& args, int64_t r, const Scratch& scratch) {
    const Logits raw = measured(args.logits + r * args.stride, args.vocab, scratch.raw_maxima);
    finish(args, r, raw, total_asked(args.specs[r], raw, {0, raw.blocks}), scratch);
}

// All threads compute the maxima and the total of one row together; the first thread does the rest.
void sample_together(const SampleArgs& args, int64_t r, const Team& team) {
    const Scratch shared(args, 0), own(args, team.thread);
    Logits raw = unmeasured(args.logits + r * args.stride, args.vocab, shared.raw_maxima);
    const Range blocks = share(team, raw.blocks);
    own.part->peak = measure(raw, blocks, shared.raw_maxima);
    team.barrier();
    for (int32_t t = 0; t < team.threads; ++t) raw.peak = merged(raw.peak, Scratch(args, t).part->peak);
    own.part->total = total_asked(args.specs[r], raw, blocks);
    team.barrier();
    if (team.thread == 0) {
        int64_t total = 0;
        for (int32_t t = 0; t < team.threads; ++t) total += Scratch(args, t).part->total;
        finish(args, r, raw, total, shared);
    }
    team.barrier();
}

// Not inlined, so that the compiler cannot move its operations out of the scope in which denormals are enabled.
__attribute__((noinline)) void sample_rows(const SampleArgs& args, const Team& team) {
    if (2 * args.rows <= team.threads) {
        for (int64_t r = 0; r < args.rows; ++r) sample_together(args, r, team);
        return;
    }
    const Scratch scratch(args, team.thread);
    const Range rows = share(team, args.rows);
    for (int64_t r = rows.begin; r < rows.end; ++r) sample_alone(args, r, scratch);
}

}  // namespace

void sample(const SampleArgs& args, const Team& team) {
    [[maybe_unused]] const Denormals denormals;
    sample_rows(args, team);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
