// The table of all kernels for one instruction set. CMake compiles this file and the kernel files once for each set,
// with its compiler flags and with KVASIR_ISA defined as its name.
#include "kernels.h"

#define KVASIR_TEXT_OF(name) #name
#define KVASIR_TEXT(name) KVASIR_TEXT_OF(name)

namespace kvasir {
namespace KVASIR_ISA {

// rows.cpp
void rms_norm(float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t, float);
void layer_norm(float*, int64_t, const float*, int64_t, const float*, const float*, int64_t, int64_t, float);
void rope(float*, int64_t, const float*, int64_t, const float*, const float*, int64_t, int64_t, int64_t, int64_t,
          int64_t);
void activate(int32_t, float*, const float*, int64_t);
void gated(int32_t, float*, const float*, const float*, int64_t);
void add_rows(float*, const float*, const float*, int64_t);
void multiply_rows(float*, const float*, const float*, int64_t);
void scale_rows(float*, const float*, float, int64_t);
void softcap_rows(float*, const float*, float, int64_t);
void clamp_rows(float*, const float*, float, float, int64_t);
void xielu_rows(float*, const float*, const float*, int64_t);
void gaussian_cut(float*, const float*, int64_t, int64_t, float);
void match_rows(float*, const float*, const float*, int64_t, int64_t, float);
// streams.cpp
void predict_streams(float*, const float*, const float*, int64_t, int64_t, int64_t);
void correct_streams(float*, const float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t);
// linear.cpp
void prepare(const Matrix&, uint8_t*, const float*, int64_t, int64_t);
void linear(const Matrix&, const uint8_t*, int64_t, int64_t, int64_t, float*, int64_t, const float*, const float*,
            int64_t);
void lookup_rows(const Matrix&, float*, int64_t, const int64_t*, int64_t);
// low_rank.cpp
void shrink(const Shrink*, int64_t);
void expand(const Expand&, int64_t, int64_t);
void squares(const ChangedRow&, double*);
// attention_store.cpp
void store_kv(const StoreArgs&, int64_t, int64_t);
// attention.cpp
void attention(const AttentionArgs&, const Team&);
// delta.cpp
void gated_delta(const DeltaArgs&, const Team&);
// indexer.cpp
void select_tokens(const IndexArgs&, const Team&);
// selected.cpp
void selected_attention(const SelectedArgs&, const Team&);
// short_conv.cpp
void short_conv(const ShortConvArgs&, const Team&);
// ssm.cpp
void causal_convolution(const ConvolutionArgs&, const Team&);
void selective_scan(const ScanArgs&, const Team&);
// wkv.cpp
void token_shift(const ShiftArgs&, const Team&);
void wkv(const WkvArgs&, const Team&);
// sampler.cpp
void sample(const SampleArgs&, const Team&);

extern const Kernels kernels = {
    KVASIR_TEXT(KVASIR_ISA),
    rms_norm,
    layer_norm,
    rope,
    activate,
    gated,
    add_rows,
    multiply_rows,
    scale_rows,
    softcap_rows,
    clamp_rows,
    xielu_rows,
    gaussian_cut,
    match_rows,
    predict_streams,
    correct_streams,
    prepare,
    linear,
    lookup_rows,
    shrink,
    expand,
    squares,
    store_kv,
    attention,
    gated_delta,
    select_tokens,
    selected_attention,
    short_conv,
    causal_convolution,
    selective_scan,
    token_shift,
    wkv,
    sample,
};

}  // namespace KVASIR_ISA
}  // namespace kvasir
