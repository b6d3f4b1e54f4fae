// Tests products with integer matrices and FP8: every format, odd shapes, ranges of panels, blocks and rows of arbitrary bits.
// The expected products are computed from the rows that lookup returns. A row has the same bits alone and in a batch, in
// tiles of one panel and of two.
#include "../input_rule.h"
#include "../matrix.h"
#include "../outliers.h"
#include "../row_activation.h"
#include "check.h"

using kvasir::Matrix;

void test_linear_float();  // linear_float.cpp

extern "C" {
int32_t kvasir_set_tile_panels(int32_t count);
int32_t kvasir_format_of(int32_t ggml_type);
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

// A GGML type or one of our own, the offsets of the float16 numbers in its blocks, and of the upper bytes of float32 and
// bfloat16 numbers; -1 for none. Byte 0 of an MXFP4 block is an exponent.
struct Kind {
    int32_t type, cols;
    int64_t bytes;
    int halves[2];
    int tops[2] = {-1, -1};
};

constexpr Kind KINDS[] = {
    {2, 32, 18, {0, -1}},      {3, 32, 20, {0, 2}},     {6, 32, 22, {0, -1}},   {7, 32, 24, {0, 2}},
    {8, 32, 34, {0, -1}},      {20, 32, 18, {0, -1}},   {39, 32, 17, {-1, -1}}, {10, 256, 84, {80, 82}},
    {11, 256, 110, {108, -1}}, {12, 256, 144, {0, 2}},  {13, 256, 176, {0, 2}}, {14, 256, 210, {208, -1}},
    {23, 256, 136, {0, -1}},   {34, 256, 54, {52, -1}}, {35, 256, 66, {64, -1}},
    {40, 64, 36, {-1, -1}},
    {1000, 128, 132, {-1, -1}, {3, -1}},
    {1001, 64, 68, {-1, -1}, {3, -1}},
    {1002, 64, 68, {-1, -1}, {3, -1}},
    {1003, 64, 68, {0, 2}},
    {1004, 64, 68, {0, 2}},
    {1005, 64, 68, {-1, -1}, {1, 3}},
    {1006, 64, 68, {-1, -1}, {1, 3}},
    {1007, 64, 68, {-1, -1}, {3, -1}},
    {1008, 64, 72, {-1, -1}, {3, -1}},
};

void fill(Guarded<uint8_t>& file, int64_t count, const Kind& kind, std::mt19937& random, bool hostile) {
    for (int64_t i = 0; i < count; ++i) file[i] = static_cast<uint8_t>(random());
    if (hostile) return;
    for (int64_t block = 0; block < count; block += kind.bytes) {
        for (int at : kind.halves) {
            if (at >= 0) file[block + at + 1] = static_cast<uint8_t>(0x20 | (file[block + at + 1] & 0x83));
        }
        for (int at : kind.tops) {
            if (at >= 0) file[block + at] = static_cast<uint8_t>(0x3c | (file[block + at] & 0x80));
        }
        if (kind.type == 39) file[block] = static_cast<uint8_t>(110 + file[block] % 16);
    }
}

constexpr int32_t OUTLIERS = kvasir::ACT_Q8_32 + kvasir::ACT_RULED + kvasir::ACT_OUTLIERS;

struct Case {
    int64_t rows, n, k;
    int32_t segments;
};

// whole: whether the activations of a row share one scale; those of INT8 have outliers then.
void check(std::mt19937& random, const Kind& kind, const Case& c, bool hostile, bool whole = false) {
    const int32_t format = kvasir_format_of(kind.type);
    const int32_t activation = format == kvasir::FORMAT_FP8 ? kvasir::ACT_BF16
                               : whole && kind.cols == 64    ? OUTLIERS
                               : whole                       ? kvasir::ACT_Q8_ROW
                               : kind.cols == 256           ? kvasir::ACT_Q8_256
                                                            : kvasir::ACT_Q8_32;
    const int64_t row_bytes = c.k / kind.cols * kind.bytes, bytes = kvasir_matrix_bytes(format, c.n, c.k, c.segments);
    const int64_t width = kvasir_activated_bytes(format, activation, c.k, c.segments);
    Guarded<uint8_t> file(c.n * row_bytes), data(bytes + 64), activated(c.rows * width);
    Guarded<float> x(c.rows * c.k), bias(c.n), out(c.rows * c.n), alone(c.n), weight(c.n * c.k);
    fill(file, c.n * row_bytes, kind, random, hostile);
    std::normal_distribution<float> normal;
    const float values[] = {0.0f, 1e-42f, -1e-38f, 3e38f, INFINITY, -INFINITY, NAN};
    for (int64_t i = 0; i < c.rows * c.k; ++i) {
        x[i] = hostile && random() % 64 == 0 ? values[random() % 7] : normal(random);
    }
    for (int64_t i = 0; i < c.n; ++i) bias[i] = normal(random);
    std::vector<float> residual(static_cast<size_t>(c.rows * c.n));
    for (float& value : residual) value = normal(random);

    std::memset(data.data, 0xff, static_cast<size_t>(bytes));
    const Matrix m = {format, activation, c.segments, 0, c.n, c.k, data.data};
    const int64_t middle = c.n / 32 * 16;  // packed by two calls, as by several threads
    require(kvasir_pack(&m, kind.type, file.data + middle * row_bytes, row_bytes, middle, c.n - middle) == 0, "pack");
    require(kvasir_pack(&m, kind.type, file.data, row_bytes, 0, middle) == 0, "pack");
    std::vector<int64_t> ids(static_cast<size_t>(c.n));
    for (int64_t i = 0; i < c.n; ++i) ids[static_cast<size_t>(i)] = i;
    kvasir_lookup(&m, weight.data, c.k, ids.data(), c.n);
    require_first_bits(weight.data, c.n * c.k, "lookup");

    const kvasir::InputRule rule = {kvasir::ROUND_OUTLIERS, 0, 2.5f, 0};
    std::memcpy(data.data + bytes, &rule, sizeof rule);
    kvasir_prepare(&m, activated.data, x.data, c.k, c.rows);
    const int64_t panels = kvasir::panels(m), split = panels / 3;
    for (const int32_t tile_panels : {1, 2}) {
        require(kvasir_set_tile_panels(tile_panels) == tile_panels, "tiles of as many panels");
        std::memcpy(out.data, residual.data(), residual.size() * sizeof(float));
        kvasir_linear(&m, activated.data, c.rows, split, panels, out.data, c.n, bias.data, out.data, c.n);
        kvasir_linear(&m, activated.data, c.rows, 0, split, out.data, c.n, bias.data, out.data, c.n);
        require_first_bits(out.data, c.rows * c.n, "a product");
    }
    kvasir_set_tile_panels(0);
    for (int64_t r = 0; r < c.rows; ++r) {
        const float* row = residual.data() + r * c.n;
        kvasir_linear(&m, activated.data + r * width, 1, 0, panels, alone.data, c.n, bias.data, row, c.n);
        require(same(alone.data, out.data + r * c.n, c.n), "a row has the same bits alone and in a batch");
        for (int64_t n = 0; n < c.n && !hostile; ++n) {
            double sum = 0, square = 0, size = 0;
            for (int64_t k = 0; k < c.k; ++k) {
                const double product = static_cast<double>(x[r * c.k + k]) * weight[n * c.k + k];
                sum += product;
                square += static_cast<double>(x[r * c.k + k]) * x[r * c.k + k];
                size += static_cast<double>(weight[n * c.k + k]) * weight[n * c.k + k];
            }
            // 8-bit activations have an error of about 1 % of their RMS; these errors accumulate like random numbers.
            const double error = std::fabs(alone[n] - (sum + bias[n] + row[n]));
            require(error < 0.06 * std::sqrt(square * size / static_cast<double>(c.k)) + 1e-5,
                    "a product is within the tolerance");
        }
    }
}

}  // namespace

void test_linear() {
    test_linear_float();
    std::mt19937 random(1);
    for (const Kind& kind : KINDS) {
        for (const bool hostile : {false, true}) {
            const int64_t k = kind.cols;
            for (const Case& c : {Case{1, 1, k, 1}, Case{2, 17, k, 1}, Case{9, 48, k, 1}, Case{5, 33, 3 * k, 1},
                                  Case{12, 50, 2 * k, 2}, Case{23, 40, 4 * k, 4}, Case{3, 15, 8 * k, 8}, Case{37, 31, 2 * k, 2}}) {
                check(random, kind, c, hostile);
                if (kind.type == 35 || kind.type == 1002) check(random, kind, c, hostile, true);
            }
        }
        check(random, kind, {66, 33, 1536, 2}, false);  // two parts of rows, slabs of 512 columns and a shorter one
        const Matrix m = {kvasir_format_of(kind.type), kvasir::ACT_Q8_256, 2, 0, 16, 3 * kind.cols, nullptr};
        require(kvasir_pack(&m, kind.type, nullptr, 0, 0, 0) == -1, "segments that are not whole groups are rejected");
        require(kvasir_pack(&m, 1000, nullptr, 0, 0, 0) == -1, "an unknown source type is rejected");
    }
    require(kvasir_format_of(16) == -1, "a type without a layout has no format");
    require(kvasir_set_tile_panels(3) == -1 && kvasir_set_tile_panels(-1) == -1, "other tiles are rejected");
}
