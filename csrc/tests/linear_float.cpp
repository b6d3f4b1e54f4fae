// Tests products with float matrices bit for bit against scalar code that follows the contract: every format, odd
// shapes, ranges of panels, hostile values. Packing followed by lookup must return the original values.
#include "../matrix.h"
#include "check.h"

using kvasir::Matrix;

extern "C" {
int64_t kvasir_matrix_bytes(int32_t format, int64_t rows, int64_t cols, int32_t segments);
int64_t kvasir_activated_bytes(int32_t format, int32_t activation, int64_t cols, int32_t segments);
int32_t kvasir_pack(const Matrix* m, int32_t source, const uint8_t* rows, int64_t row_bytes, int64_t first_row,
                    int64_t num_rows);
void kvasir_prepare(const Matrix* m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows);
void kvasir_linear(const Matrix* m, const uint8_t* activated, int64_t rows, int64_t first_panel, int64_t last_panel,
                   float* out, int64_t out_stride, const float* bias, const float* residual, int64_t residual_stride);
void kvasir_lookup(const Matrix* m, float* out, int64_t out_stride, const int64_t* ids, int64_t count);
}

namespace {

using namespace kvasir_test;

struct Kind {
    int32_t format, activation, source;
    int64_t size;  // bytes of a weight
};

constexpr Kind KINDS[] = {
    {kvasir::FORMAT_F32, kvasir::ACT_F32, 0, 4},
    {kvasir::FORMAT_F16, kvasir::ACT_F32, 1, 2},
    {kvasir::FORMAT_BF16, kvasir::ACT_F32, 30, 2},
    {kvasir::FORMAT_BF16, kvasir::ACT_BF16, 30, 2},
};

float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float flush(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

// a * b + c as in the kernels: one rounding, denormals flushed.
float multiply_add(float a, float b, float c) { return flush(std::fma(flush(a), flush(b), c)); }

float to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if (std::isnan(value)) return of_bits((bits | 0x400000u) & 0xffff0000u);
    return of_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

float of_half(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent == 31   ? (fraction ? NAN : INFINITY)
                  : exponent != 0 ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                  : std::ldexp(static_cast<float>(fraction), -24);
    return half & 0x8000 ? -value : value;
}

float draw(std::mt19937& random, bool hostile) {
    const float value = std::normal_distribution<float>()(random);
    const float all[] = {0.0f, -0.0f, 1e-42f, -1e-38f, 3e38f, -3e38f, 1e-20f, INFINITY, -INFINITY, NAN};
    return hostile && random() % 8 == 0 ? all[random() % 10] : value;
}

// Draws a weight: writes it to `stored` in its format and returns its value.
float draw_weight(std::mt19937& random, const Kind& kind, bool hostile, uint8_t* stored) {
    if (kind.format == kvasir::FORMAT_F16) {
        uint16_t half = static_cast<uint16_t>(random());
        if (!hostile && (half >> 10 & 31) == 31) half &= 0x83ff;
        std::memcpy(stored, &half, sizeof half);
        return of_half(half);
    }
    const float value = kind.format == kvasir::FORMAT_F32 ? draw(random, hostile) : to_bf16(draw(random, hostile));
    const uint32_t bits = bits_of(value);
    std::memcpy(stored, reinterpret_cast<const uint8_t*>(&bits) + 4 - kind.size, static_cast<size_t>(kind.size));
    return value;
}

float expected_sum(const Kind& kind, const float* w, const float* x, int64_t cols, int32_t segments) {
    float sums[8];
    const int64_t width = cols / segments;
    for (int32_t s = 0; s < segments; ++s, w += width, x += width) {
        float sum = 0.0f;
        for (int64_t k = 0; k < width; ++k) {
            if (kind.activation == kvasir::ACT_F32) {
                sum = multiply_add(w[k], x[k], sum);
            } else if (k % 2 == 0) {  // the second number of a pair is added first
                const bool has_second = k + 1 < width;
                sum = multiply_add(has_second ? w[k + 1] : 0.0f, has_second ? to_bf16(x[k + 1]) : 0.0f, sum);
                sum = multiply_add(w[k], to_bf16(x[k]), sum);
            }
        }
        // The padding of an odd segment adds 0 * 0, which turns -0 into 0.
        if (kind.activation == kvasir::ACT_F32 && kind.format == kvasir::FORMAT_BF16 && width % 2) sum += 0.0f;
        sums[s] = sum;
    }
    for (int32_t count = segments; count > 1; count /= 2) {
        for (int32_t i = 0; i < count / 2; ++i) sums[i] = flush(sums[2 * i] + sums[2 * i + 1]);
    }
    return sums[0];
}

void check(std::mt19937& random, const Kind& kind, int64_t rows, int64_t n, int64_t k, int32_t segments, bool hostile) {
    const int64_t bytes = kvasir_matrix_bytes(kind.format, n, k, segments);
    const int64_t row_bytes = k * kind.size;
    Guarded<uint8_t> file(n * row_bytes), data(bytes);
    Guarded<float> x(rows * k), bias(n), out(rows * n);
    std::vector<float> w(static_cast<size_t>(n * k)), expected(static_cast<size_t>(rows * n));
    for (int64_t i = 0; i < n * k; ++i) {
        w[static_cast<size_t>(i)] = draw_weight(random, kind, hostile, file.data + i * kind.size);
    }
    for (int64_t i = 0; i < rows * k; ++i) x[i] = draw(random, hostile);
    for (int64_t i = 0; i < n; ++i) bias[i] = draw(random, false);
    for (int64_t i = 0; i < rows * n; ++i) out[i] = draw(random, false);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < n; ++c) {
            const float sum = expected_sum(kind, w.data() + c * k, x.data + r * k, k, segments);
            expected[static_cast<size_t>(r * n + c)] = flush(out[r * n + c] + flush(sum + bias[c]));
        }
    }

    std::memset(data.data, 0xff, static_cast<size_t>(bytes));
    const Matrix m = {kind.format, kind.activation, segments, 0, n, k, data.data};
    const int64_t middle = n / 32 * 16;  // packed by two calls, as by several threads
    require(kvasir_pack(&m, kind.source, file.data + middle * row_bytes, row_bytes, middle, n - middle) == 0, "pack");
    require(kvasir_pack(&m, kind.source, file.data, row_bytes, 0, middle) == 0, "pack");

    std::vector<int64_t> ids(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = n - 1 - i;
    Guarded<float> table(n * k);
    kvasir_lookup(&m, table.data, k, ids.data(), n);
    for (int64_t i = 0; i < n; ++i) {
        require(same(table.data + i * k, w.data() + (n - 1 - i) * k, k), "lookup returns the packed row");
    }

    const int64_t activated_bytes = kvasir_activated_bytes(kind.format, kind.activation, k, segments);
    Guarded<uint8_t> activated(rows * activated_bytes);
    kvasir_prepare(&m, activated.data, x.data, k, rows);
    const int64_t panels = kvasir::panels(m), split = panels / 3;
    kvasir_linear(&m, activated.data, rows, split, panels, out.data, n, bias.data, out.data, n);
    kvasir_linear(&m, activated.data, rows, 0, split, out.data, n, bias.data, out.data, n);
    require(same(out.data, expected.data(), rows * n), "a float product has the bits that the contract requires");
}

}  // namespace

void test_linear_float();

void test_linear_float() {
    std::mt19937 random(1);
    for (const Kind& kind : KINDS) {
        for (const bool hostile : {false, true}) {
            for (int64_t k : {1, 2, 3, 8, 15, 16, 17, 33, 40}) {
                for (int64_t n : {1, 15, 16, 17, 40}) check(random, kind, 1 + random() % 7, n, k, 1, hostile);
            }
            for (int64_t rows : {1, 2, 3, 5, 6, 7, 13}) check(random, kind, rows, 100, 72, 8, hostile);
            check(random, kind, 3, 33, 1000, 1, hostile);
            check(random, kind, 7, 65, 44, 4, hostile);
            check(random, kind, 2, 20, 34, 2, hostile);
        }
    }
    require(kvasir_matrix_bytes(kvasir::FORMAT_F32, 16, 10, 4) == -1,
            "segments that do not divide the columns are rejected");
    require(kvasir_matrix_bytes(kvasir::FORMAT_COUNT, 16, 16, 1) == -1, "an unknown format is rejected");
    const Matrix m = {kvasir::FORMAT_F32, kvasir::ACT_F32, 1, 0, 20, 4, nullptr};
    require(kvasir_pack(&m, 0, nullptr, 16, 8, 12) == -1, "packing must start at a panel");
    require(kvasir_pack(&m, 0, nullptr, 16, 0, 15) == -1, "packing must end at a panel");
    require(kvasir_pack(&m, 0, nullptr, 16, 16, 16) == -1, "packing must stay within the matrix");
    require(kvasir_pack(&m, 8, nullptr, 16, 0, 16) == -1, "blocks cannot become a float matrix");
}
