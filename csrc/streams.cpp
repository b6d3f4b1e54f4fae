// Operations on rows of several streams (AltUp, arXiv:2301.13310): [rows, streams, cols]. Their contracts are in
// kernels.h. The last elements of a row are computed by the same operations as the others.
#include "simd_math.h"

namespace kvasir {
namespace KVASIR_ISA {

static KVASIR_INLINE f32x16 load_lanes(const float* from, int64_t count) {
    return count < LANES ? load_first(from, count) : load(from);
}
static KVASIR_INLINE void store_lanes(float* to, f32x16 a, int64_t count) {
    count < LANES ? store_first(to, a, count) : store(to, a);
}

void predict_streams(float* out, const float* x, const float* coefs, int64_t rows, int64_t streams, int64_t cols) {
    for (int64_t row = 0; row < rows; ++row) {
        const float *from = x + row * streams * cols, *c = coefs + row * streams * streams;
        for (int64_t j = 0; j < streams; ++j) {
            float* to = out + (row * streams + j) * cols;
            for (int64_t i = 0; i < cols; i += LANES) {
                const int64_t rest = cols - i;
                f32x16 sum = load_lanes(from + j * cols + i, rest);
                for (int64_t s = 0; s < streams; ++s) {
                    sum = fma(load_lanes(from + s * cols + i, rest), broadcast(c[j * streams + s]), sum);
                }
                store_lanes(to + i, sum, rest);
            }
        }
    }
}

void correct_streams(float* out, const float* x, const float* computed, const float* coefs, int64_t rows,
                     int64_t streams, int64_t cols, int64_t active) {
    for (int64_t row = 0; row < rows; ++row) {
        const float *from = x + row * streams * cols, *c = coefs + row * streams;
        float* to = out + row * streams * cols;
        for (int64_t i = 0; i < cols; i += LANES) {
            const int64_t rest = cols - i;
            const f32x16 change = sub(load_lanes(computed + row * cols + i, rest),
                                      load_lanes(from + active * cols + i, rest));
            for (int64_t s = 0; s < streams; ++s) {
                const f32x16 share = add(broadcast(c[s]), broadcast(1.0f));
                store_lanes(to + s * cols + i, fma(change, share, load_lanes(from + s * cols + i, rest)), rest);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
