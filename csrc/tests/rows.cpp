// Tests the row kernels with odd shapes and hostile values: norms and rotary embedding against scalar code that follows
// the contract, all kernels against the portable ones, and rows computed by a pool of threads.
#include <atomic>

#include "../dispatch.h"
#include "../pool.h"
#include "check.h"

using kvasir::FloatMode;
using kvasir::Kernels;
using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

namespace {

constexpr int64_t WIDTHS[] = {1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 100, 127, 1000, 1023, 4099};

// Ordinary values of several magnitudes, and the special values that break careless kernels.
float draw(std::mt19937& random, int kind) {
    const float value = std::normal_distribution<float>()(random);
    const float hostile[] = {0.0f, -0.0f, 1e-42f, -1e-38f, 3e38f, -3e38f, INFINITY, -INFINITY, NAN};
    switch (kind) {
        case 0: return value;
        case 1: return value * 1e-18f;
        case 2: return value * 1e18f;
        default: return hostile[random() % (sizeof(hostile) / sizeof(float))];
    }
}

void fill(Guarded<float>& array, int64_t count, std::mt19937& random, int kind) {
    for (int64_t i = 0; i < count; ++i) array[i] = draw(random, kind);
}

float flush(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

float tree_sum(float* lane) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] = flush(lane[i] + lane[i + half]);
    }
    return lane[0];
}

float expect_factor(const float* x, int64_t cols, float centre, float eps) {
    float lane[16] = {};
    for (int64_t i = 0; i < cols; ++i) {
        const float a = flush(flush(x[i]) - centre);
        lane[i % 16] = flush(std::fma(a, a, lane[i % 16]));
    }
    const float mean = flush(tree_sum(lane) / static_cast<float>(cols));
    return flush(1.0f / std::sqrt(flush(mean + flush(eps))));
}

void expect_rms_norm(float* out, const float* x, const float* weight, int64_t cols, float eps) {
    const float factor = expect_factor(x, cols, 0.0f, eps);
    for (int64_t i = 0; i < cols; ++i) out[i] = flush(flush(flush(x[i]) * factor) * flush(weight[i]));
}

void expect_layer_norm(float* out, const float* x, const float* weight, const float* bias, int64_t cols, float eps) {
    float lane[16] = {};
    for (int64_t i = 0; i < cols; ++i) lane[i % 16] = flush(lane[i % 16] + flush(x[i]));
    const float mean = flush(tree_sum(lane) / static_cast<float>(cols));
    const float factor = expect_factor(x, cols, mean, eps);
    for (int64_t i = 0; i < cols; ++i) {
        const float scaled = flush(flush(flush(x[i]) - mean) * factor);
        out[i] = flush(std::fma(scaled, flush(weight[i]), flush(bias[i])));
    }
}

void check_norms(std::mt19937& random, int kind, int64_t rows, int64_t cols) {
    const float eps = kind == 1 ? 0.0f : 1e-6f;
    const int64_t size = rows * cols;
    Guarded<float> x(size), weight(cols), bias(cols), out(size), rms(size), layer(size);
    fill(x, size, random, kind);
    fill(weight, cols, random, kind == 3 ? 3 : 0);
    fill(bias, cols, random, kind == 3 ? 3 : 0);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * cols;
        expect_rms_norm(rms.data + at, x.data + at, weight.data, cols, eps);
        expect_layer_norm(layer.data + at, x.data + at, weight.data, bias.data, cols, eps);
    }
    const Kernels& kernels = kvasir::kernels();
    const FloatMode mode;
    kernels.layer_norm(out.data, cols, x.data, cols, weight.data, bias.data, rows, cols, eps);
    require(same(out.data, layer.data, size), "layer_norm");
    kernels.rms_norm(out.data, cols, x.data, cols, weight.data, rows, cols, eps);
    require(same(out.data, rms.data, size), "rms_norm");
    kernels.rms_norm(x.data, cols, x.data, cols, weight.data, rows, cols, eps);
    require(same(x.data, rms.data, size), "rms_norm in place");
}

// Rows of a wider array: the elements between them are neither read nor written.
void check_strides(std::mt19937& random) {
    constexpr int64_t ROWS = 3, COLS = 21, STRIDE = 30, SIZE = (ROWS - 1) * STRIDE + COLS;
    Guarded<float> x(SIZE), weight(COLS), out(SIZE), dense(ROWS * COLS);
    fill(x, SIZE, random, 0);
    fill(weight, COLS, random, 0);
    fill(out, SIZE, random, 3);
    out[COLS] = 5.0f;
    const FloatMode mode;
    kvasir::kernels().rms_norm(out.data, STRIDE, x.data, STRIDE, weight.data, ROWS, COLS, 1e-6f);
    kvasir::kernels().rms_norm(dense.data, COLS, x.data, STRIDE, weight.data, ROWS, COLS, 1e-6f);
    for (int64_t row = 0; row < ROWS; ++row) {
        require(same(out.data + row * STRIDE, dense.data + row * COLS, COLS), "rms_norm of strided rows");
    }
    require(out[COLS] == 5.0f, "rms_norm does not write between rows");
}

void check_rope(std::mt19937& random, int kind, int64_t head_dim, int64_t half) {
    constexpr int64_t ROWS = 3, HEADS = 2;
    const int64_t stride = HEADS * head_dim, size = ROWS * stride;
    Guarded<float> x(size), cos(ROWS * half), sin(ROWS * half), out(size), expected(size);
    fill(x, size, random, kind);
    fill(cos, ROWS * half, random, 0);
    fill(sin, ROWS * half, random, 0);
    for (int64_t i = 0; i < size; ++i) {
        const int64_t row = i / stride, d = i % head_dim;
        expected[i] = x[i];
        if (d >= 2 * half) continue;
        const float c = cos[row * half + d % half], s = sin[row * half + d % half];
        const float other = flush(x[d < half ? i + half : i - half]);
        const float straight = flush(flush(x[i]) * c), across = flush(other * s);
        expected[i] = flush(d < half ? straight - across : straight + across);
    }
    const FloatMode mode;
    const auto rope = kvasir::kernels().rope;
    rope(out.data, stride, x.data, stride, cos.data, sin.data, half, ROWS, HEADS, head_dim, half);
    require(same(out.data, expected.data, size), "rope");
    rope(x.data, stride, x.data, stride, cos.data, sin.data, half, ROWS, HEADS, head_dim, half);
    require(same(x.data, expected.data, size), "rope in place");
}

// Runs all elementwise kernels; out: [ELEMENTWISE, count].
constexpr int64_t ELEMENTWISE = 6 + 6 + 7;
void elementwise(const Kernels& kernels, float* out, const float* a, const float* b, int64_t count) {
    const FloatMode mode;
    for (int32_t f = kvasir::FUNCTION_NONE; f <= kvasir::FUNCTION_EXP; ++f, out += 2 * count) {
        kernels.activate(f, out, a, count);
        kernels.gated(f, out + count, a, b, count);
    }
    kernels.add(out, a, b, count);
    kernels.multiply(out + count, a, b, count);
    kernels.scale(out + 2 * count, a, 0.3f, count);
    kernels.softcap(out + 3 * count, a, 30.0f, count);
    kernels.clamp(out + 4 * count, a, -0.5f, 0.25f, count);
    const float settings[] = {0.8f, 1.2f, 0.5f, -1e-6f};
    kernels.xielu(out + 5 * count, a, settings, count);
    kernels.activate(kvasir::FUNCTION_SOFTPLUS, out + 6 * count, a, count);
}

void check_elementwise(std::mt19937& random, int kind, int64_t count) {
    Guarded<float> a(count), b(count), out(ELEMENTWISE * count), expected(ELEMENTWISE * count), one(ELEMENTWISE);
    fill(a, count, random, kind);
    fill(b, count, random, kind);
    elementwise(kvasir::portable::kernels, expected.data, a.data, b.data, count);
    elementwise(kvasir::kernels(), out.data, a.data, b.data, count);
    require(same(out.data, expected.data, ELEMENTWISE * count), "elementwise kernels equal the portable ones");
    for (int64_t i = 0; i < count; i += 7) {
        elementwise(kvasir::kernels(), one.data, a.data + i, b.data + i, 1);
        for (int64_t k = 0; k < ELEMENTWISE; ++k) {
            require(same(one.data + k, out.data + k * count + i, 1), "an element's bits do not depend on its index");
        }
    }
}

void check_values() {
    constexpr int64_t COUNT = 4001;
    Guarded<float> x(COUNT), out(COUNT);
    const Kernels& kernels = kvasir::kernels();
    const FloatMode mode;
    const auto close = [&](int32_t function, double (*exact)(double), const char* what) {
        kernels.activate(function, out.data, x.data, COUNT);
        for (int64_t i = 0; i < COUNT; ++i) {
            // The tolerance covers a few roundings of the result and one of a sum near 1 that is multiplied by x.
            require(std::fabs(out[i] - exact(x[i])) <= 4e-7 * std::fabs(x[i]), what);
        }
    };
    for (int64_t i = 0; i < COUNT; ++i) x[i] = static_cast<float>(i - COUNT / 2) * 0.01f;
    close(kvasir::FUNCTION_SILU, [](double v) { return v / (1 + std::exp(-v)); }, "silu");
    close(kvasir::FUNCTION_GELU, [](double v) { return 0.5 * v * std::erfc(-v * std::sqrt(0.5)); }, "gelu");
    close(
        kvasir::FUNCTION_GELU_TANH,
        [](double v) { return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); },
        "gelu by tanh");
    close(kvasir::FUNCTION_RELU, [](double v) { return v > 0 ? v : 0; }, "relu");
    const float settings[] = {0.8f, 1.2f, 0.5f, -1e-6f};
    kernels.xielu(out.data, x.data, settings, COUNT);
    for (int64_t i = 0; i < COUNT; ++i) {
        const double v = x[i], curve = v > 0 ? 0.8 * v * v : (std::expm1(std::min(v, -1e-6)) - v) * 1.2;
        require(std::fabs(out[i] - (curve + 0.5 * v)) <= 4e-7 * std::fmax(1.0, std::fabs(curve)), "xielu");
    }
    kernels.clamp(out.data, x.data, -0.5f, 0.25f, COUNT);
    for (int64_t i = 0; i < COUNT; ++i) require(out[i] == std::fmin(std::fmax(x[i], -0.5f), 0.25f), "clamp");
    kernels.softcap(out.data, x.data, 2.0f, COUNT);
    for (int64_t i = 0; i < COUNT; ++i) require(std::fabs(out[i] - 2 * std::tanh(x[i] / 2.0)) < 4e-7, "softcap");
}

// Rows are normalised by one thread and added by another; the bits must equal those of one thread.
struct Shared {
    const float* x;
    const float* weight;
    float* normed;
    float* out;
    int64_t rows, cols;
};

void norm_then_add(const kvasir::Team& team, void* context) {
    const Shared& s = *static_cast<const Shared*>(context);
    const kvasir::Range own = kvasir::share(team, s.rows);
    const int64_t at = own.begin * s.cols;
    kvasir::kernels().rms_norm(s.normed + at, s.cols, s.x + at, s.cols, s.weight, own.end - own.begin, s.cols, 1e-6f);
    team.barrier();
    for (int64_t row = own.begin; row < own.end; ++row) {  // adds a row that another thread may have normalised
        const float* other = s.normed + (s.rows - 1 - row) * s.cols;
        kvasir::kernels().add(s.out + row * s.cols, s.normed + row * s.cols, other, s.cols);
    }
}

// Threads draw pieces of one draw after the other, with no barrier between; some draws have fewer pieces than threads.
struct Draws {
    static constexpr int64_t COUNT = 40, MOST = 97;
    std::atomic<int32_t> taken[COUNT][MOST];

    static int64_t pieces(int64_t draw) { return 1 + draw * 31 % MOST; }
};

void draw_all(const kvasir::Team& team, void* context) {
    Draws& draws = *static_cast<Draws*>(context);
    for (int64_t i = 0; i < Draws::COUNT; ++i) {
        const uint64_t number = team.next_draw();
        for (int64_t piece; (piece = team.draw(number, Draws::pieces(i))) >= 0;) ++draws.taken[i][piece];
    }
}

void check_draws(kvasir::Pool* pool) {
    for (int round = 0; round < 3; ++round) {  // numbers go on from run to run
        Draws draws{};
        kvasir::pool_run(pool, draw_all, &draws);
        for (int64_t i = 0; i < Draws::COUNT; ++i) {
            for (int64_t piece = 0; piece < Draws::MOST; ++piece) {
                require(draws.taken[i][piece] == (piece < Draws::pieces(i)), "every piece is drawn exactly once");
            }
        }
    }
}

void check_pool(std::mt19937& random) {
    constexpr int64_t ROWS = 7, COLS = 37, SIZE = ROWS * COLS;
    Guarded<float> x(SIZE), weight(COLS), normed(SIZE), out(SIZE), alone(SIZE);
    fill(x, SIZE, random, 0);
    fill(weight, COLS, random, 0);
    Shared shared{x.data, weight.data, normed.data, alone.data, ROWS, COLS};
    for (int32_t threads : {1, 2, 3, 9}) {
        kvasir::Pool* pool = kvasir::pool_create(threads, threads == 3);
        require(pool != nullptr, "a pool is created");
        for (int round = 0; round < 50; ++round) {
            std::memset(normed.data, 0, SIZE * sizeof(float));
            kvasir::pool_run(pool, norm_then_add, &shared);
            require(same(shared.out, alone.data, SIZE), "rows do not depend on the number of threads");
            shared.out = out.data;
        }
        check_draws(pool);
        kvasir::pool_destroy(pool);
    }
    require(kvasir::pool_create(0, false) == nullptr && kvasir::pool_create(-1, true) == nullptr,
            "a pool needs at least one thread");
}

}  // namespace

void test_rows() {
    std::mt19937 random(1);
    for (int kind = 0; kind < 4; ++kind) {
        for (int64_t width : WIDTHS) {
            for (int64_t rows : {1, 2, 5}) check_norms(random, kind, rows, width);
            check_elementwise(random, kind, width);
        }
        for (int64_t half : {1, 3, 15, 16, 17, 32, 40}) {
            check_rope(random, kind, 2 * half, half);
            check_rope(random, kind, 2 * half + 5, half);
        }
    }
    check_strides(random);
    check_values();
    check_pool(random);
}
