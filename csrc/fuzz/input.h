// Decodes a fuzzer's bytes into values, in order; zeros follow the last byte. Also the check that all targets share:
// every instruction set must give the same bits.
#pragma once

#include <functional>

#include "../kvasir_cpu.h"
#include "../tests/check.h"

// One for each source file of this folder.
void fuzz_attention(const uint8_t* data, size_t size);
void fuzz_delta(const uint8_t* data, size_t size);
void fuzz_indexer(const uint8_t* data, size_t size);
void fuzz_linear(const uint8_t* data, size_t size);
void fuzz_program(const uint8_t* data, size_t size);
void fuzz_router(const uint8_t* data, size_t size);
void fuzz_rows(const uint8_t* data, size_t size);
void fuzz_sampler(const uint8_t* data, size_t size);
void fuzz_scan(const uint8_t* data, size_t size);
void fuzz_short_conv(const uint8_t* data, size_t size);
void fuzz_streams(const uint8_t* data, size_t size);
void fuzz_wkv(const uint8_t* data, size_t size);

namespace kvasir_fuzz {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
    bool flag() { return byte() & 1; }
    // In [low, high].
    int64_t between(int64_t low, int64_t high) {
        const uint64_t span = static_cast<uint64_t>(high - low) + 1;
        uint64_t value = byte();
        if (span > 256) value |= static_cast<uint64_t>(byte()) << 8;
        return low + static_cast<int64_t>(value % span);
    }
    template <typename T, size_t N>
    T one_of(const T (&values)[N]) {
        return values[byte() % N];
    }
    // Arbitrary bits.
    template <typename T>
    T any() {
        T value;
        uint8_t bytes[sizeof(T)];
        for (uint8_t& b : bytes) b = byte();
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
    // A moderate number or, with `hostile`, sometimes an extreme one.
    float number(bool hostile) {
        constexpr float HARD[] = {0.0f,  -0.0f,  1e-42f, -1e-38f,   3e38f,     -3e38f, 1e-20f, 1.0f,
                                  1e30f, -1e30f, 88.8f,  -INFINITY, INFINITY,  NAN,    16384.5f, -104.0f};
        if (hostile && byte() % 4 == 0) return one_of(HARD);
        return static_cast<float>(static_cast<int8_t>(byte())) / 16.0f;
    }

    // Fills an array from a seed, except for the first few elements, which come from the input.
    void floats(float* to, int64_t count) {
        const bool hostile = flag();
        std::mt19937 random(any<uint16_t>());
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; ++i) to[i] = normal(random);
        for (int64_t i = 0; i < count && i < 8; ++i) to[i] = number(hostile);
        for (int64_t i = 8; hostile && i < count; i += 1 + static_cast<int64_t>(random() % 64)) to[i] = number(true);
    }
    void bits(uint8_t* to, int64_t count) {
        const uint8_t kind = byte();
        std::mt19937 random(any<uint16_t>());
        for (int64_t i = 0; i < count; ++i) to[i] = kind % 4 == 3 ? kind : static_cast<uint8_t>(random());
        for (int64_t i = 0; i < count && i < 32; ++i) to[i] ^= byte();
    }

  private:
    const uint8_t* data_;
    size_t size_;
    size_t at_ = 0;
};

// Runs `compute`, which returns all its results, on every instruction set that this machine supports.
inline void on_all(const std::function<std::vector<float>()>& compute, const char* what) {
    std::vector<float> first;
    for (int32_t place = 0; kvasir_set_isa(place) == place; ++place) {
        const std::vector<float> found = compute();
        if (place == 0) first = found;
        const auto size = static_cast<int64_t>(found.size());
        require(first.size() == found.size() && same(first.data(), found.data(), size), what);
    }
    kvasir_set_isa(-1);
}

}  // namespace kvasir_fuzz
