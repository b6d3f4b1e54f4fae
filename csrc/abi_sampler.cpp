// The C ABI of the sampler (kvasir/sampling/native.py).
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {

static_assert(sizeof(Sampled) == 32 + 8 * MAX_LOGPROBS && sizeof(SampleArgs) == 56,
              "kvasir/sampling/native.py packs the same layout");

int64_t sample_scratch(int64_t vocab) {
    const int64_t blocks = (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    const int64_t bytes = (16 + 8 + 8 + 4 + 4) * sample_room(vocab) + 2 * 4 * blocks;
    return (bytes + 63) / 64 * 64 + 64;  // the last line is for what threads tell each other
}

namespace {

void sample_with(const Team& team, void* args) { kernels().sample(*static_cast<const SampleArgs*>(args), team); }

}  // namespace
}  // namespace kvasir

// One token for each row, with its log-probability where asked for: the bits of kvasir/sampling (sampler.h has the
// structures). Denormals count here, as they do there. vocab is 1 to 2^22. A row with an error touches no other. Runs
// on the pool, or on the calling thread where it is null; there is scratch for each thread.
KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool) {
    if (pool != nullptr) {
        kvasir::pool_run(static_cast<kvasir::Pool*>(pool), kvasir::sample_with, args);
    } else {
        kvasir::sample_with(kvasir::Team{0, 1, nullptr}, args);
    }
}

// Bytes of scratch that each thread needs for a vocabulary.
KVASIR_API int64_t kvasir_sample_scratch(int64_t vocab) { return kvasir::sample_scratch(vocab); }

// Which fields a SampleRow begins with: a number that differs wherever they do (kvasir/fields.py).
KVASIR_API int32_t kvasir_sampler_layout() { return KVASIR_SAMPLER_LAYOUT; }
