// Sequences of a layer whose state is kept in blocks, for the tests and the fuzzers of such layers: the same tokens in
// steps of any size, from the row's own state or from the block's start. What was never written holds NaN, and arrays
// end at inaccessible pages.
#pragma once

#include <algorithm>
#include <string>

#include "../piece.h"
#include "check.h"

namespace kvasir_test {

// Some rows of a larger array [rows, width], put together for one step.
class Chosen {
  public:
    Chosen(const std::vector<float>& from, int64_t width, const std::vector<int64_t>& tokens)
        : array_(static_cast<int64_t>(tokens.size()) * width) {
        for (size_t i = 0; i < tokens.size(); ++i) {
            std::copy_n(from.begin() + tokens[i] * width, width, array_.data + static_cast<int64_t>(i) * width);
        }
    }
    float* data() { return array_.data; }

  private:
    Guarded<float> array_;
};

// Normally distributed numbers.
inline std::vector<float> normals(std::mt19937& random, int64_t count, float size) {
    std::normal_distribution<float> normal;
    std::vector<float> found(static_cast<size_t>(count));
    for (float& value : found) value = size * normal(random);
    return found;
}

// A step of a layer: what the kernel reads and writes besides the layer's inputs.
struct Step {
    float* blocks;
    int64_t block_stride;
    int32_t block_size;
    float* states;  // [rows of the runner, state]
    float* out;     // [tokens, width]
    const kvasir::Piece* pieces;
    int64_t num_pieces;
    int32_t threads;
};

class Layer {
  public:
    virtual ~Layer() = default;
    virtual int64_t state() const = 0;   // floats of a row's state, 0 for none
    virtual int64_t inputs() const = 0;  // floats that a block keeps of a token
    virtual int64_t width() const = 0;   // floats of a token's output
    virtual int64_t taps() const = 0;
    // Computes a step of those tokens, by their numbers in the layer's inputs. Returns what the kernel returns.
    virtual int32_t run(const Step& step, const std::vector<int64_t>& tokens) const = 0;
};

// `rows` sequences of the layer, each of `length` tokens: sequence r has the tokens from r * length on. Row 0 of the
// runner belongs to none of them.
class Sequences {
  public:
    Sequences(const Layer& layer, int64_t rows, int64_t length, int32_t block_size)
        : layer_(layer), rows_(rows), length_(length), of_a_row_((length + block_size - 1) / block_size),
          block_size_(block_size), stride_(layer.state() + (layer.taps() - 1 + block_size) * layer.inputs()),
          blocks_(rows * of_a_row_ * stride_), states_((1 + rows) * layer.state()), reached_(static_cast<size_t>(rows)),
          done_(static_cast<size_t>(rows)), out(static_cast<size_t>(rows * length * layer.width())) {
        std::fill_n(blocks_.data, rows * of_a_row_ * stride_, std::nanf(""));
        std::fill_n(states_.data, (1 + rows) * layer.state(), std::nanf(""));
        for (int64_t i = rows * of_a_row_; i > 0; --i) blocks_of_.push_back(static_cast<int32_t>(i - 1));
        for (int64_t r = 0; r < rows; ++r) tables_.push_back(blocks_of_.data() + r * of_a_row_);
    }

    int64_t done(int64_t row) const { return done_[static_cast<size_t>(row)]; }

    // The next counts[r] tokens of each row r; 0 leaves a row out.
    void advance(const std::vector<int64_t>& counts, int32_t threads) {
        std::vector<int64_t> tokens;
        std::vector<kvasir::Piece> pieces;
        for (int64_t row = 0; row < rows_; ++row) {
            const auto at = static_cast<size_t>(row);
            const int64_t start = done_[at], count = std::min(counts[at], length_ - start);
            if (count <= 0) continue;
            const auto first = static_cast<int64_t>(tokens.size());
            pieces.push_back({static_cast<int32_t>(row + 1), 0, start, count, 0, first, &tables_[at], reached_[at]});
            for (int64_t t = start; t < start + count; ++t) tokens.push_back(row * length_ + t);
            done_[at] = reached_[at] = start + count;
        }
        const auto count = static_cast<int64_t>(tokens.size());
        Guarded<float> computed(count * layer_.width());
        const Step step = {blocks_.data, stride_, block_size_, states_.data, computed.data,
                           pieces.data(), static_cast<int64_t>(pieces.size()), threads};
        require(layer_.run(step, tokens) == 0, "the kernel refuses");
        for (size_t i = 0; i < tokens.size(); ++i) {
            std::copy_n(computed.data + static_cast<int64_t>(i) * layer_.width(), layer_.width(),
                        out.begin() + tokens[i] * layer_.width());
        }
    }

    // Makes a row's own state useless, so that its next step starts from the block.
    void forget(int64_t row) {
        std::fill_n(states_.data + (row + 1) * layer_.state(), layer_.state(), std::nanf(""));
        reached_[static_cast<size_t>(row)] = 0;
    }

  private:
    const Layer& layer_;
    const int64_t rows_, length_, of_a_row_;
    const int32_t block_size_;
    const int64_t stride_;
    Guarded<float> blocks_, states_;
    std::vector<int64_t> reached_, done_;
    std::vector<int32_t> blocks_of_;  // scattered: in descending order
    std::vector<const int32_t*> tables_;

  public:
    std::vector<float> out;  // [rows * length, width]
};

// The same tokens at once, one by one, and in steps from the blocks alone: `expected` within `tolerance` of its greatest
// value, and equal bits, also on all instruction sets.
inline void check_steps(const Layer& layer, const std::vector<double>& expected, double tolerance, const char* name) {
    constexpr int32_t BLOCK = 16;
    const int64_t tokens = static_cast<int64_t>(expected.size()) / layer.width();
    const auto holds = [&](bool held, const char* what) { require(held, (std::string(name) + " " + what).c_str()); };
    Sequences whole(layer, 1, tokens, BLOCK), singles(layer, 1, tokens, BLOCK), walks(layer, 1, tokens, BLOCK);
    whole.advance({tokens}, 1);
    double scale = 0;
    for (const double value : expected) scale = std::fmax(scale, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
        holds(std::fabs(static_cast<double>(whole.out[i]) - expected[i]) <= tolerance * scale, "differs from float64");
    }
    const auto count = static_cast<int64_t>(expected.size());
    require_first_bits(whole.out.data(), count, name);
    for (int64_t t = 0; t < tokens; ++t) singles.advance({1}, 2);
    holds(same(whole.out.data(), singles.out.data(), count), "has other bits for single tokens");
    for (int64_t size = 1; walks.done(0) < tokens; size = size % 7 + 1) {
        walks.forget(0);
        walks.advance({size}, 3);
    }
    holds(same(whole.out.data(), walks.out.data(), count), "has other bits from the block's start");
}

}  // namespace kvasir_test
