// The differences between the cache's formats: how a row is stored in a tile, how keys are multiplied by a query, and
// how values are multiplied by their weights.
//
//     DIMS, TOKENS            dimensions in one step over the keys, tokens in one step over the values
//     KEY_BYTES               of a step over a tile of keys
//     VALUE_BYTES             of a step over 16 dimensions of values
//     store_key, store_value  a row of a head into place `token` of a tile
#pragma once

#include "attention_layout.h"
#include "simd.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

struct FloatWeights {
    static constexpr int64_t TOKENS = 1;
    using Weight = float;

    static KVASIR_INLINE f32x16 mix(f32x16 sum, f32x16 value, float weight) {
        return fma(value, broadcast(weight), sum);
    }
    // Steps are single tokens and have no halves.
    static KVASIR_INLINE f32x16 mix_half(f32x16 sum, f32x16, float, bool) { return sum; }
};

// The query row as float32, for keys that are widened to it.
struct FloatQuery {
    static constexpr int64_t DIMS = 1;
    using Sum = f32x16;
    using Query = float;

    static KVASIR_INLINE void load_query(AttentionState& state, int64_t row, const float* from, int64_t dim) {
        std::memcpy(state.query + row * QUERY_BYTES, from, static_cast<size_t>(dim) * sizeof(float));
    }
    static KVASIR_INLINE f32x16 start(const AttentionState&, int64_t) { return broadcast(0.0f); }
    static KVASIR_INLINE f32x16 dot(f32x16 sum, f32x16 key, float query) { return fma(key, broadcast(query), sum); }
    static KVASIR_INLINE f32x16 score(f32x16 sum, const AttentionState&, int64_t, const uint8_t*) { return sum; }
};

struct WholeWeights : FloatWeights {
    static KVASIR_INLINE void store_weights(uint8_t* to, f32x16 weights, const uint8_t*) {
        store(reinterpret_cast<float*>(to), weights);
    }
};

struct Float32 : FloatQuery, WholeWeights {
    static constexpr int64_t KEY_BYTES = 64, VALUE_BYTES = 64;
    using Key = f32x16;
    using Value = f32x16;

    static KVASIR_INLINE f32x16 load_key(const uint8_t* from) { return load(reinterpret_cast<const float*>(from)); }
    static KVASIR_INLINE f32x16 load_value(const uint8_t* from) { return load_key(from); }

    static void store_key(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        float* to = reinterpret_cast<float*>(tile) + token;
        for (int64_t i = 0; i < layout.head_dim; ++i) to[i * TILE_TOKENS] = row[i];
    }
    static void store_value(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        float* to = reinterpret_cast<float*>(tile) + token * mixed_dim(layout);
        std::memcpy(to, row, static_cast<size_t>(value_dim(layout)) * sizeof(float));
    }
};

// A row as 16-bit numbers, padded with zeros to a multiple of 16.
template <typename Store>
KVASIR_INLINE void round_row(uint16_t* to, const float* row, int64_t dim, Store store16) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store16(to + i, load(row + i));
    if (i < dim) store16(to + i, load_first(row + i, dim - i));
}

struct Float16 : FloatQuery, WholeWeights {
    static constexpr int64_t KEY_BYTES = 32, VALUE_BYTES = 32;
    using Key = f32x16;
    using Value = f32x16;

    static KVASIR_INLINE f32x16 load_key(const uint8_t* from) {
        return load_f16(reinterpret_cast<const uint16_t*>(from));
    }
    static KVASIR_INLINE f32x16 load_value(const uint8_t* from) { return load_key(from); }

    static void store_key(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        uint16_t half[MAX_HEAD_DIM], *to = reinterpret_cast<uint16_t*>(tile) + token;
        round_row(half, row, layout.head_dim, [](uint16_t* out, f32x16 a) { store_f16(out, a); });
        for (int64_t i = 0; i < layout.head_dim; ++i) to[i * TILE_TOKENS] = half[i];
    }
    static void store_value(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        uint16_t* to = reinterpret_cast<uint16_t*>(tile) + token * mixed_dim(layout);
        round_row(to, row, value_dim(layout), [](uint16_t* out, f32x16 a) { store_f16(out, a); });
    }
};

// Two bfloat16 that are multiplied by a pair of the cache: as a pair where the processor multiplies pairs, else widened
// to float32 once for all keys and values.
#if defined(KVASIR_AVX512)
using PairFactor = uint32_t;

KVASIR_INLINE f32x16 dot_pair(f32x16 sum, u16x32 pairs, PairFactor x) { return dot_bf16(sum, pairs, x); }
KVASIR_INLINE float number_of(PairFactor x, bool odd) {
    const uint32_t bits = odd ? x & 0xffff0000u : x << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}
KVASIR_INLINE void store_factors(uint8_t* to, int64_t at, f32x16 a) {
    store_bf16(reinterpret_cast<uint16_t*>(to) + at, a);
}
KVASIR_INLINE void store_normal_factors(uint8_t* to, f32x16 a) {
    store_bf16_normal(reinterpret_cast<uint16_t*>(to), a);
}
#else
struct PairFactor {
    float even, odd;
};

KVASIR_INLINE f32x16 dot_pair(f32x16 sum, u16x32 pairs, PairFactor x) {  // dot_bf16's operations
    return fma(even_bf16(pairs), broadcast(x.even), fma(odd_bf16(pairs), broadcast(x.odd), sum));
}
KVASIR_INLINE float number_of(PairFactor x, bool odd) { return odd ? x.odd : x.even; }
KVASIR_INLINE void store_factors(uint8_t* to, int64_t at, f32x16 a) {
    store(reinterpret_cast<float*>(to) + at, bits_to_float(shift_left<16>(round_to_bf16(a))));
}
KVASIR_INLINE void store_normal_factors(uint8_t* to, f32x16 a) { store_factors(to, 0, a); }
#endif

// Queries and weights are rounded too; products are exact and sums are float32.
struct Bfloat16 {
    static constexpr int64_t DIMS = 2, TOKENS = 2;
    static constexpr int64_t KEY_BYTES = 64, VALUE_BYTES = 64;
    using Sum = f32x16;
    using Key = u16x32;
    using Value = u16x32;
    using Query = PairFactor;
    using Weight = PairFactor;

    static KVASIR_INLINE u16x32 load_key(const uint8_t* from) {
        return load_pairs(reinterpret_cast<const uint16_t*>(from));
    }
    static KVASIR_INLINE u16x32 load_value(const uint8_t* from) { return load_key(from); }

    static KVASIR_INLINE void load_query(AttentionState& state, int64_t row, const float* from, int64_t dim) {
        uint8_t* to = state.query + row * QUERY_BYTES;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) store_factors(to, i, load(from + i));
        if (i < dim) store_factors(to, i, load_first(from + i, dim - i));
    }
    static KVASIR_INLINE f32x16 start(const AttentionState&, int64_t) { return broadcast(0.0f); }
    static KVASIR_INLINE f32x16 dot(f32x16 sum, u16x32 key, PairFactor query) { return dot_pair(sum, key, query); }
    static KVASIR_INLINE f32x16 score(f32x16 sum, const AttentionState&, int64_t, const uint8_t*) { return sum; }

    static KVASIR_INLINE void store_weights(uint8_t* to, f32x16 weights, const uint8_t*) {
        store_normal_factors(to, weights);
    }
    static KVASIR_INLINE f32x16 mix(f32x16 sum, u16x32 value, PairFactor weight) {
        return dot_pair(sum, value, weight);
    }
    // One token of a pair, if the row does not attend to the other.
    static KVASIR_INLINE f32x16 mix_half(f32x16 sum, u16x32 value, PairFactor weight, bool odd) {
        return fma(odd ? odd_bf16(value) : even_bf16(value), broadcast(number_of(weight, odd)), sum);
    }

    static void store_key(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        uint16_t pairs[MAX_HEAD_DIM];
        round_row(pairs, row, layout.head_dim, [](uint16_t* out, f32x16 a) { store_bf16(out, a); });
        for (int64_t i = 0; i < layout.head_dim; i += 2) {
            std::memcpy(tile + (i / 2 * TILE_TOKENS + token) * 4, pairs + i, 4);
        }
    }
    static void store_value(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        uint16_t rounded[MAX_HEAD_DIM], *to = reinterpret_cast<uint16_t*>(tile) + token % 2;
        to += token / 2 * mixed_dim(layout) * 2;
        round_row(rounded, row, value_dim(layout), [](uint16_t* out, f32x16 a) { store_bf16(out, a); });
        for (int64_t i = 0; i < value_dim(layout); ++i) to[2 * i] = rounded[i];
    }
};

// int8 in [-127, 127] with a scale per token and head. Scores are exact integers times two scales; the values' scale
// goes into the weights.
struct Int8 : FloatWeights {
    static constexpr int64_t DIMS = 4;
    static constexpr int64_t KEY_BYTES = 64, VALUE_BYTES = 16;
    static constexpr int32_t BIAS = 128;  // of the keys, the unsigned operand of the dot product
    using Sum = i32x16;
    using Value = f32x16;
    using Query = int32_t;  // four dimensions

#if defined(KVASIR_AVX2)
    // Keys without their bias, whose products fit 16 bits.
    using Key = Centred;

    static KVASIR_INLINE Centred load_key(const uint8_t* from) { return centred(load(from)); }
    static KVASIR_INLINE i32x16 start(const AttentionState&, int64_t) { return broadcast_i32(0); }
    static KVASIR_INLINE i32x16 dot(i32x16 sum, const Centred& key, int32_t query) {
        return add_pairs(sum, pairs(key, query));
    }
#else
    using Key = u8x64;

    static KVASIR_INLINE u8x64 load_key(const uint8_t* from) { return load(from); }
    static KVASIR_INLINE i32x16 start(const AttentionState& state, int64_t row) {
        return broadcast_i32(-BIAS * state.query_sum[row]);
    }
    static KVASIR_INLINE i32x16 dot(i32x16 sum, u8x64 key, int32_t query) {
        return kvasir::KVASIR_ISA::dot<255>(sum, key, query);
    }
#endif
    static KVASIR_INLINE f32x16 load_value(const uint8_t* from) {
        return to_float(load_i8(reinterpret_cast<const int8_t*>(from)));
    }

    // Writes the row, padded to a multiple of 16, and returns its scale; for a row that is not finite, zeros and NaN.
    static float quantize(int8_t* to, const float* row, int64_t dim) {
        f32x16 top = broadcast(0.0f);
        bool finite = true;
        for (int64_t i = 0; i < dim; i += LANES) {
            const f32x16 x = abs(dim - i < LANES ? load_first(row + i, dim - i) : load(row + i));
            finite = finite && !any(unordered(x, x)) && !any(less(broadcast(3.4028235e38f), x));
            top = max(top, x);
        }
        const float scale = greatest(top) / 127.0f;
        const bool zero = !finite || scale < 1.17549435e-38f;
        for (int64_t i = 0; i < dim; i += LANES) {
            const f32x16 x = dim - i < LANES ? load_first(row + i, dim - i) : load(row + i);
            const i32x16 q = to_int(div(x, broadcast(zero ? 1.0f : scale)));
            store_i8(to + i, zero ? broadcast_i32(0) : q);
        }
        return !finite ? __builtin_nanf("") : zero ? 0.0f : scale;
    }

    static KVASIR_INLINE void load_query(AttentionState& state, int64_t row, const float* from, int64_t dim) {
        int8_t* to = reinterpret_cast<int8_t*>(state.query + row * QUERY_BYTES);
        state.query_scale[row] = quantize(to, from, dim);
        state.query_sum[row] = 0;
        for (int64_t i = 0; i < dim; ++i) state.query_sum[row] += to[i];
    }
    static KVASIR_INLINE f32x16 score(i32x16 sum, const AttentionState& state, int64_t row, const uint8_t* scales) {
        const f32x16 scale = mul(load(reinterpret_cast<const float*>(scales)), broadcast(state.query_scale[row]));
        return mul(to_float(sum), scale);
    }

    static KVASIR_INLINE void store_weights(uint8_t* to, f32x16 weights, const uint8_t* scales) {
        store(reinterpret_cast<float*>(to), mul(weights, load(reinterpret_cast<const float*>(scales))));
    }

    static void store_key(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        int8_t q[MAX_HEAD_DIM];
        reinterpret_cast<float*>(tile + tile_numbers(layout, false))[token] = quantize(q, row, layout.head_dim);
        for (int64_t i = 0; i < layout.head_dim; ++i) {
            tile[(i / 4 * TILE_TOKENS + token) * 4 + i % 4] = static_cast<uint8_t>(q[i] + BIAS);
        }
    }
    static void store_value(const CacheLayout& layout, uint8_t* tile, int64_t token, const float* row) {
        int8_t* to = reinterpret_cast<int8_t*>(tile) + token * mixed_dim(layout);
        float& scale = reinterpret_cast<float*>(tile + tile_numbers(layout, true))[token];
        if (!layout.latent) {
            scale = quantize(to, row, value_dim(layout));
            return;
        }
        int8_t q[MAX_HEAD_DIM];
        scale = quantize(q, row, layout.head_dim);
        std::memcpy(to, q, static_cast<size_t>(value_dim(layout)));
    }
};

}  // namespace
}  // namespace KVASIR_ISA
}  // namespace kvasir
