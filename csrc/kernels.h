// The table of kernels, filled once per instruction set (isa.cpp) and chosen at run time (dispatch.cpp).
//
// Every kernel computes whole rows, columns or tiles whose bits do not depend on the thread that computes them. Strides
// are counted in elements. Kernels that take a Team split the work themselves; the others are given their share.
#pragma once

#include <cstdint>

#include "attention.h"
#include "delta.h"
#include "indexer.h"
#include "low_rank.h"
#include "matrix.h"
#include "rows.h"
#include "sampler.h"
#include "short_conv.h"
#include "ssm.h"
#include "wkv.h"
#include "team.h"

namespace kvasir {

struct Kernels {
    const char* isa;

    // rows.cpp. All float32. `rows` are [rows, cols], each `stride` from the next; in place if pointers are equal.
    // rms_norm: weight may be null.
    void (*rms_norm)(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* weight,
                     int64_t rows, int64_t cols, float eps);
    // weight and bias may both be null.
    void (*layer_norm)(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* weight,
                       const float* bias, int64_t rows, int64_t cols, float eps);
    // Rotates the dimensions i and i + half of each head. cos, sin: [rows, half] with row stride angle_stride. The
    // heads of a row are adjacent.
    void (*rope)(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* cos, const float* sin,
                 int64_t angle_stride, int64_t rows, int64_t heads, int64_t head_dim, int64_t half);
    void (*activate)(int32_t function, float* out, const float* x, int64_t count);
    void (*gated)(int32_t function, float* out, const float* gate, const float* up, int64_t count);  // f(gate) * up
    void (*add)(float* out, const float* a, const float* b, int64_t count);
    void (*multiply)(float* out, const float* a, const float* b, int64_t count);
    void (*scale)(float* out, const float* a, float factor, int64_t count);
    void (*softcap)(float* out, const float* a, float cap, int64_t count);  // cap * tanh(a / cap)
    void (*clamp)(float* out, const float* a, float low, float high, int64_t count);
    // xIELU (arXiv:2411.13010); settings: alpha of positive numbers, alpha of others, beta, eps.
    void (*xielu)(float* out, const float* a, const float* settings, int64_t count);
    // How far a row's elements exceed its mean plus so many standard deviations; 0 where they do not.
    void (*gaussian_cut)(float* out, const float* x, int64_t rows, int64_t cols, float deviations);
    // x times the root of the mean square of `like`, divided by that of x; the mean square of x counts as at least
    // `least`.
    void (*match)(float* out, const float* x, const float* like, int64_t rows, int64_t cols, float least);

    // streams.cpp. Rows of [streams, cols].
    // out[j] = x[j] + the sum over s, ascending, of x[s] * coefs[j][s]. out is not x.
    void (*predict_streams)(float* out, const float* x, const float* coefs, int64_t rows, int64_t streams, int64_t cols);
    // out[s] = x[s] + (computed - x[active]) * (coefs[s] + 1). computed: [rows, cols]. out may be x.
    void (*correct_streams)(float* out, const float* x, const float* computed, const float* coefs, int64_t rows,
                            int64_t streams, int64_t cols, int64_t active);

    // linear.cpp. `prepare` converts float32 rows to the activations that a matrix needs: out is [rows] of
    // activated_bytes. Columns are split into m.segments and padded like the matrix's.
    void (*prepare)(const Matrix& m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows);
    // out[r][n] = residual[r][n] + (bias[n] + sum over k), for the panels [first, last); bias and residual may be null,
    // residual may be out.
    void (*linear)(const Matrix& m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                   float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);
    // Rows of a matrix as float32 [count, cols]: the embedding lookup. ids are in [0, m.rows).
    void (*lookup)(const Matrix& m, float* out, int64_t out_stride, const int64_t* ids, int64_t count);

    // low_rank.cpp
    void (*shrink)(const Shrink* jobs, int64_t count);
    void (*expand)(const Expand& job, int64_t first_panel, int64_t last_panel);
    void (*squares)(const ChangedRow& row, double* out);

    // attention_store.cpp, attention.cpp
    void (*store_kv)(const StoreArgs& args, int64_t first_row, int64_t last_row);
    void (*attention)(const AttentionArgs& args, const Team& team);  // may use a barrier: all threads call it

    // delta.cpp
    void (*gated_delta)(const DeltaArgs& args, const Team& team);

    // indexer.cpp, selected.cpp
    void (*select_tokens)(const IndexArgs& args, const Team& team);  // uses a barrier
    void (*selected_attention)(const SelectedArgs& args, const Team& team);

    // short_conv.cpp
    void (*short_conv)(const ShortConvArgs& args, const Team& team);
    // ssm.cpp
    void (*causal_convolution)(const ConvolutionArgs& args, const Team& team);
    void (*selective_scan)(const ScanArgs& args, const Team& team);
    // wkv.cpp
    void (*token_shift)(const ShiftArgs& args, const Team& team);
    void (*wkv)(const WkvArgs& args, const Team& team);

    // sampler.cpp
    void (*sample)(const SampleArgs& args, const Team& team);  // may use barriers; all threads of the team call it
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace kvasir
