// What a checkpoint says about the input rows of one matrix: their order, and how they are rounded. Matrix::activation
// has ACT_RULED added, and the rule follows the matrix's panels.
#pragma once

#include "matrix.h"

namespace kvasir {

constexpr int32_t ACT_RULED = 16;

enum Rounding : int32_t {
    ROUND_AS_FORMAT = 0,  // the activations of the format, as without a rule
    ROUND_INT8 = 1,       // x / scale, clamped to [-128, 127], to the nearest integer: for INT8
    ROUND_FP8 = 2,        // x / scale, clamped to [-448, 448], to the nearest E4M3, times scale: for FP8 with ACT_F32
    ROUND_OUTLIERS = 3,   // outliers.h: for INT8 with ACT_OUTLIERS
};

struct InputRule {
    int32_t rounding;
    int32_t group;    // columns that share a dynamic scale, their largest magnitude / 127.5 or 448; 0: all of a row
    float scale;      // the static scale; 0: dynamic. Of ROUND_OUTLIERS: the threshold; 0: there are no outliers
    int32_t ordered;  // whether int32 [cols] follow: column k of the matrix is multiplied by column order[k] of a row
};

static inline const InputRule* input_rule(const Matrix& m) {
    if (!(m.activation & ACT_RULED)) return nullptr;
    return reinterpret_cast<const InputRule*>(m.data + panels(m) * panel_bytes(m));
}

namespace KVASIR_ISA {

// Rounds rows [rows, cols] of activated_bytes(m) each, in place, by ROUND_FP8.
void round_fp8(const Matrix& m, const InputRule& rule, uint8_t* activated, int64_t rows);

}  // namespace KVASIR_ISA
}  // namespace kvasir
