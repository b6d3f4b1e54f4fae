// The C ABI of the sampler (kvasir/sampling/native.py).
#include "dispatch.h"
#include "kvasir_cpu.h"
#include "pool.h"

namespace kvasir {

static_assert(sizeof(Sampled) == 32 + 8 * MAX_LOGPROBS && sizeof(SampleArgs) == 72,
              "kvasir/sampling/native.py packs the same layout");

int64_t sample_scratch(int64_t vocab) {
    const int64_t blocks = (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    const int64_t bytes = (16 + 8 + 8 + 4 + 4) * sample_room(vocab) + 2 * 4 * blocks;
    return (bytes + 63) / 64 * 64 + 64;  // the last cache line holds a thread's partial results
}

namespace {

void sample_with(const Team& team, void* args) { kernels().sample(*static_cast<const SampleArgs*>(args), team); }

}  // namespace
}  // namespace kvasir

// Samples one token for each row, with its log-probability if requested. The bits equal those of kvasir/sampling, so
// denormals are not flushed here. vocab is 1 to 2^22. A row with an error does not affect the other rows. Runs on the
// pool, or on the calling thread if `pool` is null; args->scratch must hold memory for each thread (sampler.h).
KVASIR_API void kvasir_sample(kvasir::SampleArgs* args, void* pool) {
    if (pool != nullptr) {
        kvasir::pool_run(static_cast<kvasir::Pool*>(pool), kvasir::sample_with, args);
    } else {
        kvasir::sample_with(kvasir::Team{0, 1, nullptr}, args);
    }
}

// Bytes of scratch for each thread, for a vocabulary of this size.
KVASIR_API int64_t kvasir_sample_scratch(int64_t vocab) { return kvasir::sample_scratch(vocab); }

// Identifies the first members of SampleRow: the number changes if the fields change (kvasir/fields.py).
KVASIR_API int32_t kvasir_sampler_layout() { return KVASIR_SAMPLER_LAYOUT; }
