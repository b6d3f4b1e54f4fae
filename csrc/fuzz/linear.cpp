// Fuzzes packed matrices of arbitrary bits and shapes: packing in parts, lookup, activations by the rules of the formats
// and of checkpoints (input_rule.h), and products. A row must have the same bits alone and in a batch. Invalid ranges
// must be rejected without writing.
#include "../input_rule.h"
#include "../outliers.h"
#include "../row_activation.h"
#include "input.h"

using kvasir::Matrix;

KVASIR_API int32_t kvasir_format_of(int32_t ggml_type);
KVASIR_API int64_t kvasir_matrix_bytes(int32_t format, int64_t rows, int64_t cols, int32_t segments);
KVASIR_API int64_t kvasir_activated_bytes(int32_t format, int32_t activation, int64_t cols, int32_t segments);
KVASIR_API int32_t kvasir_pack(const Matrix* m, int32_t source, const uint8_t* rows, int64_t row_bytes,
                               int64_t first_row, int64_t num_rows);
KVASIR_API void kvasir_prepare(const Matrix* m, uint8_t* out, const float* x, int64_t x_stride, int64_t rows);
KVASIR_API void kvasir_linear(const Matrix* m, const uint8_t* activated, int64_t rows, int64_t first_panel,
                              int64_t last_panel, float* out, int64_t out_stride, const float* bias,
                              const float* residual, int64_t residual_stride);
KVASIR_API void kvasir_lookup(const Matrix* m, float* out, int64_t out_stride, const int64_t* ids, int64_t count);

namespace {

using namespace kvasir_fuzz;

struct Kind {
    int32_t source;
    int64_t cols, bytes;  // of a block
};

constexpr Kind KINDS[] = {
    {0, 1, 4},     {1, 1, 2},      {30, 1, 2},     {2, 32, 18},    {3, 32, 20},   {6, 32, 22},
    {7, 32, 24},   {8, 32, 34},    {20, 32, 18},   {39, 32, 17},   {10, 256, 84}, {11, 256, 110},
    {12, 256, 144}, {13, 256, 176}, {14, 256, 210}, {23, 256, 136}, {34, 256, 54}, {35, 256, 66},
    {40, 64, 36},  {1000, 128, 132}, {1001, 64, 68}, {1002, 64, 68}, {1003, 64, 68}, {1004, 64, 68},
    {1005, 64, 68}, {1006, 64, 68}, {1007, 64, 68}, {1008, 64, 72},
};

int32_t activation_of(Input& in, int32_t format) {
    if (format == kvasir::FORMAT_BF16 || format == kvasir::FORMAT_FP8) return in.flag() ? kvasir::ACT_BF16 : kvasir::ACT_F32;
    if (format < kvasir::FORMAT_Q4_0) return kvasir::ACT_F32;
    return format < kvasir::FORMAT_Q2_K ? kvasir::ACT_Q8_32 : kvasir::ACT_Q8_256;
}

// A rule for the input rows of a matrix, and the matrix's activation by it.
struct Ruled {
    kvasir::InputRule rule = {};
    int32_t activation;
    std::vector<int32_t> order;  // empty: the columns' own
};

// One of the rules that src/kvasir/quant/inputs.py allows for the matrix, or none.
Ruled rule_of(Input& in, const Matrix& m) {
    Ruled ruled;
    ruled.activation = m.activation;
    const uint8_t kind = in.byte() % 4;
    const float scale = std::fabs(in.number(true));
    if (kind == 0 || m.activation == kvasir::ACT_BF16 || !(scale < INFINITY)) return ruled;
    if (m.format == kvasir::FORMAT_FP8) {
        ruled.rule = {kvasir::ROUND_FP8, static_cast<int32_t>(16 * in.between(0, 20)), scale, 0};
    } else if (m.format == kvasir::FORMAT_INT8 && kind == 1) {
        ruled.rule = {kvasir::ROUND_OUTLIERS, 0, scale, 0};
        ruled.activation += kvasir::ACT_OUTLIERS;
    } else if (m.format == kvasir::FORMAT_TERNARY && kind == 1) {
        ruled.activation = kvasir::ACT_Q8_ROW;
        return ruled;
    } else if (m.format >= kvasir::FORMAT_Q4_0) {
        const bool rounds = m.format == kvasir::FORMAT_INT8 && in.flag();
        ruled.rule = {rounds ? kvasir::ROUND_INT8 : kvasir::ROUND_AS_FORMAT, 0, rounds ? scale : 0.0f, in.flag()};
    } else {
        return ruled;
    }
    ruled.activation += kvasir::ACT_RULED;
    if (ruled.rule.ordered) {
        ruled.order.resize(static_cast<size_t>(m.cols));
        for (size_t k = 0; k < ruled.order.size(); ++k) ruled.order[k] = static_cast<int32_t>(k);
        std::shuffle(ruled.order.begin(), ruled.order.end(), std::mt19937(in.any<uint16_t>()));
    }
    return ruled;
}

// Arbitrary sizes: either a size in bytes or -1 is returned.
void check_sizes(Input& in) {
    const int32_t format = in.between(-1, kvasir::FORMAT_COUNT), segments = in.between(-1, 9);
    const int64_t rows = (int64_t{1} << in.between(0, 62)) + in.between(-1, 1);
    const int64_t cols = (int64_t{1} << in.between(0, 62)) + in.between(-1, 1);
    require(kvasir_matrix_bytes(format, rows, cols, segments) >= -1, "bytes of a matrix");
    require(kvasir_activated_bytes(format, in.between(0, 3), cols, segments) >= -1, "bytes of a row");
}

// Packs a random range. It must be rejected without writing if it is outside of the matrix or not aligned to panels.
void pack_invalid(Input& in, const Matrix& m, int64_t bytes, const std::vector<uint8_t>& file, int64_t row_bytes) {
    const std::vector<uint8_t> before(m.data, m.data + bytes);
    const int64_t first = in.flag() ? in.between(-40, 80) : in.any<int64_t>();
    const int64_t count = in.flag() ? in.between(-40, 80) : in.any<int64_t>();
    const bool fits = first >= 0 && count >= 0 && first <= m.rows && count <= m.rows - first &&
                      first % kvasir::PANEL == 0 && (count % kvasir::PANEL == 0 || first + count == m.rows);
    if (fits) return;
    require(kvasir_pack(&m, 0, file.data(), row_bytes, first, count) == -1, "an invalid range is rejected");
    require(std::equal(before.begin(), before.end(), m.data), "a rejected call writes nothing");
}

}  // namespace

void fuzz_linear(const uint8_t* data, size_t size) {
    Input in(data, size);
    const Kind kind = in.one_of(KINDS);
    const int32_t format = kvasir_format_of(kind.source), segments = in.one_of({1, 2, 4, 8});
    const int64_t n = in.between(1, 70), rows = in.between(1, 20);
    const int64_t k = kind.cols * segments * in.between(1, kind.cols == 1 ? 60 : kind.cols == 32 ? 3 : 2);
    const int64_t row_bytes = k / kind.cols * kind.bytes, bytes = kvasir_matrix_bytes(format, n, k, segments);
    const int32_t activation = activation_of(in, format);
    const int64_t x_stride = k + in.between(0, 5), out_stride = n + in.between(0, 5);
    const bool has_bias = in.flag(), has_residual = in.flag();
    std::vector<uint8_t> file(static_cast<size_t>(n * row_bytes));
    in.bits(file.data(), n * row_bytes);
    Guarded<float> x((rows - 1) * x_stride + k), bias(n);
    in.floats(x.data, (rows - 1) * x_stride + k);
    in.floats(bias.data, n);
    std::vector<float> residual(static_cast<size_t>(rows * out_stride));
    in.floats(residual.data(), rows * out_stride);
    Guarded<uint8_t> packed(bytes);
    std::memset(packed.data, 0xff, static_cast<size_t>(bytes));
    Matrix m = {format, activation, segments, 0, n, k, packed.data};
    const int64_t middle = in.between(0, n) / kvasir::PANEL * kvasir::PANEL;
    if (kvasir_pack(&m, kind.source, nullptr, 0, 0, 0) != 0) return;  // segments are not whole groups
    require(kvasir_pack(&m, kind.source, file.data() + middle * row_bytes, row_bytes, middle, n - middle) == 0, "pack");
    require(kvasir_pack(&m, kind.source, file.data(), row_bytes, 0, middle) == 0, "pack");
    pack_invalid(in, m, bytes, file, row_bytes);

    std::vector<int64_t> ids(static_cast<size_t>(rows));
    for (int64_t& id : ids) id = in.between(0, n - 1);
    const int64_t panels = kvasir::panels(m), split = in.between(0, panels);
    const Ruled ruled = rule_of(in, m);
    const size_t order_bytes = ruled.order.size() * sizeof(int32_t);
    Guarded<uint8_t> whole(bytes + static_cast<int64_t>(sizeof ruled.rule + order_bytes));
    std::copy_n(packed.data, bytes, whole.data);
    std::memcpy(whole.data + bytes, &ruled.rule, sizeof ruled.rule);
    if (order_bytes) std::memcpy(whole.data + bytes + sizeof ruled.rule, ruled.order.data(), order_bytes);
    m.data = whole.data;
    m.activation = ruled.activation;
    const int64_t width = kvasir_activated_bytes(format, m.activation, k, segments);
    kvasir_set_tile_panels(n % 2 == 0 ? 1 : 2);
    on_all(
        [&] {
            Guarded<uint8_t> activated(rows * width);
            Guarded<float> out((rows - 1) * out_stride + n), alone(n), table(rows * k);
            std::copy_n(residual.begin(), (rows - 1) * out_stride + n, out.data);
            kvasir_prepare(&m, activated.data, x.data, x_stride, rows);
            for (const auto& [first, last] : {std::pair{split, panels}, {int64_t{0}, split}}) {
                kvasir_linear(&m, activated.data, rows, first, last, out.data, out_stride,
                              has_bias ? bias.data : nullptr, has_residual ? out.data : nullptr, out_stride);
            }
            for (int64_t r = 0; r < rows; ++r) {
                kvasir_linear(&m, activated.data + r * width, 1, 0, panels, alone.data, n,
                              has_bias ? bias.data : nullptr, has_residual ? &residual[r * out_stride] : nullptr, n);
                require(same(alone.data, out.data + r * out_stride, n), "a row has the same bits alone");
                if (r + 1 < rows) {
                    require(same(out.data + r * out_stride + n, &residual[r * out_stride + n], out_stride - n),
                            "the padding between rows is not written");
                }
            }
            kvasir_lookup(&m, table.data, k, ids.data(), rows);
            std::vector<float> found(table.data, table.data + rows * k);
            found.insert(found.end(), out.data, out.data + (rows - 1) * out_stride + n);
            return found;
        },
        "linear: all instruction sets give the same bits");
    kvasir_set_tile_panels(0);
    check_sizes(in);
}
