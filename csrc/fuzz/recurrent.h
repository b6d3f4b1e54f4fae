// Fuzzes a layer whose state is kept in blocks: several sequences in steps of any size, from their own states or from
// their blocks. Neither the steps, the threads, the other sequences nor the instruction set may change a bit.
#pragma once

#include <functional>

#include "../tests/layers.h"
#include "input.h"

namespace kvasir_fuzz {

constexpr int64_t MAX_ROWS = 3;

// The tokens of each sequence, and how they are divided into steps.
struct Plan {
    struct Step {
        std::vector<int64_t> counts;
        std::vector<int64_t> forgotten;
        int32_t threads;
    };
    explicit Plan(Input& in)
        : rows(in.between(1, MAX_ROWS)), length(in.between(1, 40)), block_size(static_cast<int32_t>(in.between(8, 24))) {
        for (int64_t steps = in.between(0, 12); steps > 0; --steps) {
            Step step;
            step.threads = static_cast<int32_t>(in.between(1, 4));
            for (int64_t row = 0; row < rows; ++row) {
                step.counts.push_back(in.byte() % 4 == 0 ? in.between(0, length) : in.between(0, 4));
                if (in.byte() % 4 == 0) step.forgotten.push_back(row);
            }
            steps_.push_back(step);
        }
    }

    std::vector<float> run(const kvasir_test::Layer& layer) const {
        kvasir_test::Sequences sequences(layer, rows, length, block_size);
        for (const Step& step : steps_) {
            for (const int64_t row : step.forgotten) sequences.forget(row);
            sequences.advance(step.counts, step.threads);
        }
        sequences.advance(all(), 2);
        return sequences.out;
    }
    // All tokens in one step.
    std::vector<float> run_whole(const kvasir_test::Layer& layer) const {
        kvasir_test::Sequences sequences(layer, rows, length, block_size);
        sequences.advance(all(), 1);
        return sequences.out;
    }

    const int64_t rows, length;
    const int32_t block_size;  // at least as large as any number of taps

  private:
    std::vector<int64_t> all() const { return std::vector<int64_t>(static_cast<size_t>(rows), length); }
    std::vector<Step> steps_;
};

inline void fuzz_layer(const Plan& plan, const kvasir_test::Layer& layer) {
    on_all(
        [&] {
            const std::vector<float> whole = plan.run_whole(layer), steps = plan.run(layer);
            require(same(whole.data(), steps.data(), static_cast<int64_t>(whole.size())),
                    "the bits do not depend on the steps");
            return whole;
        },
        "all instruction sets give the same bits");
}

inline kvasir_test::Fill filled_by(Input& in) {
    return [&in](int64_t count, float) {
        std::vector<float> found(static_cast<size_t>(count));
        in.floats(found.data(), count);
        return found;
    };
}

// Sizes that no layer has.
inline int32_t hard_size(Input& in) {
    constexpr int32_t HARD[] = {0, -1, 1, 2, 8, 9, 16, 256, 257, 1 << 20, (1 << 20) + 1, 0x7fffffff, INT32_MIN};
    return in.one_of(HARD);
}

}  // namespace kvasir_fuzz
