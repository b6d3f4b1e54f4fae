// Runs every kernel on every instruction set this machine has, over odd shapes and hostile values, and compares the
// bits with plain scalar code written after the contract. Made for the sanitizers: every array ends at a page that
// may not be touched, so that reading or writing one element too many is a fault also inside vector instructions.
#include "kvasir_cpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

// An array of floats whose last element is the last before a forbidden page.
class Guarded {
  public:
    explicit Guarded(int64_t count) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t used = (static_cast<size_t>(count) * sizeof(float) + page - 1) / page * page;
        size_ = used + page;
        base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
        if (base_ == MAP_FAILED || mprotect(base_ + used, page, PROT_NONE) != 0) std::abort();
        data = reinterpret_cast<float*>(base_ + used) - count;
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base_, size_); }

    float* data;

  private:
    char* base_;
    size_t size_;
};

float flush(float value) { return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value; }

void expect_rms_norm(float* out, const float* x, const float* weight, int64_t cols, float eps) {
    float lane[16] = {};
    for (int64_t i = 0; i < cols; ++i) lane[i % 16] = flush(std::fma(flush(x[i]), flush(x[i]), lane[i % 16]));
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] = flush(lane[i] + lane[i + half]);
    }
    const float mean = flush(lane[0] / static_cast<float>(cols));
    const float factor = flush(1.0f / std::sqrt(flush(mean + flush(eps))));
    for (int64_t i = 0; i < cols; ++i) out[i] = flush(flush(flush(x[i]) * factor) * flush(weight[i]));
}

bool same(const float* a, const float* b, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (!(std::isnan(a[i]) && std::isnan(b[i])) && std::memcmp(a + i, b + i, sizeof(float)) != 0) return false;
    }
    return true;
}

// What rows may hold: ordinary values of several sizes, and the values that break careless kernels.
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

bool check_rms_norm(std::mt19937& random, int kind, int64_t rows, int64_t cols, float eps) {
    Guarded x(rows * cols), weight(cols), out(rows * cols);
    std::vector<float> expected(static_cast<size_t>(rows * cols));
    for (int64_t i = 0; i < rows * cols; ++i) x.data[i] = draw(random, kind);
    for (int64_t i = 0; i < cols; ++i) weight.data[i] = draw(random, kind == 3 ? 3 : 0);
    for (int64_t row = 0; row < rows; ++row) {
        expect_rms_norm(&expected[static_cast<size_t>(row * cols)], x.data + row * cols, weight.data, cols, eps);
    }
    kvasir_rms_norm_f32(out.data, x.data, weight.data, rows, cols, eps);
    const bool apart = same(out.data, expected.data(), rows * cols);
    kvasir_rms_norm_f32(x.data, x.data, weight.data, rows, cols, eps);
    return apart && same(x.data, expected.data(), rows * cols);
}

}  // namespace

int main() {
    int passed = 0, failed = 0;
    for (int32_t place = 0; kvasir_set_isa(place) == place; ++place) {
        std::mt19937 random(1);
        for (int kind = 0; kind < 4; ++kind) {
            for (int64_t cols : {1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 100, 127, 1000, 1023, 4099}) {
                for (int64_t rows : {1, 2, 5}) {
                    const bool good = check_rms_norm(random, kind, rows, cols, kind == 1 ? 0.0f : 1e-6f);
                    if (!good) std::printf("rms_norm wrong: %s, kind %d, [%lld, %lld]\n", kvasir_isa_name(), kind,
                                           static_cast<long long>(rows), static_cast<long long>(cols));
                    good ? ++passed : ++failed;
                }
            }
        }
        std::printf("kernels on %s: checked\n", kvasir_isa_name());
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
