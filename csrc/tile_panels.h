// The panels of a tile of many rows on AVX-512, 1 or 2: what is faster on this processor (dispatch.cpp).
#pragma once

#include <cstdint>

namespace kvasir {

int32_t tile_panels();

}  // namespace kvasir
