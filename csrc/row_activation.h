// One more of the activations of matrix.h, for formats in super-blocks whose segments are whole super-blocks.
#pragma once

#include <cstdint>

namespace kvasir {

// int8 in [-127, 127] in the layout of ACT_Q8_256, with one float32 scale for the whole row.
constexpr int32_t ACT_Q8_ROW = 4;

}  // namespace kvasir
