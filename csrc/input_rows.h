// Where the blocks of a recurrent layer keep the inputs of their tokens: after the state at the block's start,
//
//     state | before [taps - 1][inputs] | own [block size][inputs]
#pragma once

#include <cstdint>

namespace kvasir {

struct InputRows {
    float* blocks;         // block 0; each `block_stride` floats after the last
    int64_t block_stride;
    int64_t state_size;    // floats of a block before its rows
    int64_t inputs;        // floats of a row
    int32_t taps, block_size, group, reserved;  // of the convolution; tokens; index of the block table
};

}  // namespace kvasir
