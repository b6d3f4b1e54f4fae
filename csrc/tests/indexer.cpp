// Tests sparse attention: the selection and attention to it against float64; that the bits of a row do not depend on the
// steps or on the threads; that a selection of all has the bits of attention to all; that bad sizes are refused; and
// that nothing is accessed out of bounds: caches end at an inaccessible page, and what was never written holds NaN.
#include "../indexer.h"

#include <algorithm>

#include "../attention_layout.h"
#include "../kvasir_cpu.h"
#include "check.h"

KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout, int32_t values);
KVASIR_API int32_t kvasir_store_kv(const kvasir::StoreArgs* args);
KVASIR_API int32_t kvasir_attention(kvasir::AttentionArgs* args, int32_t threads);
KVASIR_API int64_t kvasir_selected_scratch(const kvasir::CacheLayout* layout, int32_t heads, int64_t top_k);
KVASIR_API int32_t kvasir_select_tokens(kvasir::IndexArgs* args, int32_t threads);
KVASIR_API int32_t kvasir_selected_attention(kvasir::SelectedArgs* args, int32_t threads);

namespace {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::require_first_bits;
using kvasir_test::same;

struct Case {
    int32_t format, heads, dim, value, block, index_heads, index_dim, top_k;
    int64_t length;

    kvasir::CacheLayout layout() const { return {format, 1, dim, block, value, 1}; }
};

struct Data {
    std::vector<float> q, k, index_q, index_k, weights;
};

Data draw(const Case& c) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& to, int64_t count) {
        to.resize(static_cast<size_t>(count));
        for (float& value : to) value = normal(random);
    };
    Data d;
    fill(d.q, c.length * c.heads * c.dim);
    fill(d.k, c.length * c.dim);
    fill(d.index_q, c.length * c.index_heads * c.index_dim);
    fill(d.index_k, c.length * c.index_dim);
    fill(d.weights, c.length * c.index_heads);
    return d;
}

constexpr float SCALE = 0.2f;

// The positions that a row selects, ascending.
std::vector<int64_t> best(const Case& c, const Data& d, int64_t row) {
    std::vector<std::pair<double, int64_t>> scores;
    for (int64_t key = 0; key <= row; ++key) {
        double total = 0.0;
        for (int64_t h = 0; h < c.index_heads; ++h) {
            double sum = 0.0;
            for (int64_t i = 0; i < c.index_dim; ++i) {
                sum += static_cast<double>(d.index_q[(row * c.index_heads + h) * c.index_dim + i]) *
                       d.index_k[key * c.index_dim + i];
            }
            total += d.weights[row * c.index_heads + h] * std::max(0.0, sum * SCALE);
        }
        scores.push_back({-total, key});
    }
    std::sort(scores.begin(), scores.end());
    std::vector<int64_t> found;
    for (size_t i = 0; i < scores.size() && i < static_cast<size_t>(c.top_k); ++i) found.push_back(scores[i].second);
    std::sort(found.begin(), found.end());
    return found;
}

struct Result {
    std::vector<int32_t> selected;
    std::vector<float> mixed;
};

// Computes a sequence in steps of the given sizes (the last one repeats). whole: attention to all positions.
Result run(const Case& c, const Data& d, const std::vector<int64_t>& sizes, int32_t threads, bool whole = false) {
    const kvasir::CacheLayout layout = c.layout();
    const int64_t k_bytes = kvasir_cache_block_bytes(&layout, 0), v_bytes = kvasir_cache_block_bytes(&layout, 1);
    const int64_t blocks = (c.length + c.block - 1) / c.block, numbers = int64_t{c.block} * c.index_dim;
    Guarded<uint8_t> k(blocks * k_bytes), v(blocks * v_bytes);
    Guarded<float> keys(blocks * numbers);
    std::memset(k.data, 0xff, static_cast<size_t>(blocks * k_bytes));
    std::memset(v.data, 0xff, static_cast<size_t>(blocks * v_bytes));
    std::memset(keys.data, 0xff, static_cast<size_t>(blocks * numbers) * sizeof(float));
    Guarded<int32_t> table(blocks);
    for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
    const int32_t* tables = table.data;
    Guarded<uint8_t> room(threads * kvasir::index_scratch(c.length));
    Guarded<uint8_t> scratch(threads * kvasir_selected_scratch(&layout, c.heads, c.top_k));
    Result all;
    for (int64_t start = 0, step = 0; start < c.length; ++step) {
        const int64_t size = sizes[std::min(static_cast<size_t>(step), sizes.size() - 1)];
        const int64_t count = std::min(size, c.length - start);
        std::vector<int64_t> slots;
        for (int64_t p = start; p < start + count; ++p) slots.push_back(table[p / c.block] * c.block + p % c.block);
        const float* rows = &d.k[static_cast<size_t>(start * c.dim)];
        const kvasir::StoreArgs store{layout, k.data, v.data, rows, rows, c.dim, c.dim, slots.data(), count};
        require(kvasir_store_kv(&store) == 0, "store_kv accepts the layout");
        const kvasir::Piece piece = {0, 0, start, count, 0, 0, &tables};
        Guarded<int32_t> selected(count * c.top_k);
        Guarded<float> mixed(count * c.heads * c.value);
        kvasir::IndexArgs index = {c.index_heads, c.index_dim, c.top_k, c.block, 0, SCALE, keys.data,
                                   &d.index_q[static_cast<size_t>(start * c.index_heads * c.index_dim)],
                                   &d.weights[static_cast<size_t>(start * c.index_heads)],
                                   &d.index_k[static_cast<size_t>(start * c.index_dim)], selected.data, &piece, 1,
                                   room.data, c.length};
        require(kvasir_select_tokens(&index, threads) == 0, "the indexer accepts the sizes");
        kvasir::SelectedArgs args = {};
        args.attention.layout = layout;
        args.attention.k = k.data, args.attention.v = v.data;
        args.attention.q = &d.q[static_cast<size_t>(start * c.heads * c.dim)], args.attention.out = mixed.data;
        args.attention.q_stride = int64_t{c.heads} * c.dim, args.attention.out_stride = int64_t{c.heads} * c.value;
        args.attention.heads = c.heads, args.attention.scale = SCALE;
        args.attention.pieces = &piece, args.attention.num_pieces = 1;
        args.attention.scratch = scratch.data;
        args.selected = selected.data, args.top_k = c.top_k;
        const int32_t done = whole ? kvasir_attention(&args.attention, threads) : kvasir_selected_attention(&args, threads);
        require(done == 0, "attention accepts the sizes");
        all.selected.insert(all.selected.end(), selected.data, selected.data + count * c.top_k);
        all.mixed.insert(all.mixed.end(), mixed.data, mixed.data + count * c.heads * c.value);
        start += count;
    }
    return all;
}

bool equal(const Result& a, const Result& b) {
    return a.selected == b.selected && same(a.mixed.data(), b.mixed.data(), static_cast<int64_t>(a.mixed.size()));
}

void check_row(const Case& c, const Data& d, const Result& found, int64_t row) {
    const std::vector<int64_t> positions = best(c, d, row);
    for (int64_t i = 0; i < c.top_k; ++i) {
        const int64_t expected = i < static_cast<int64_t>(positions.size()) ? positions[static_cast<size_t>(i)] : -1;
        require(found.selected[static_cast<size_t>(row * c.top_k + i)] == expected, "the greatest scores are selected");
    }
    const double tolerance[] = {5e-6, 3e-2, 4e-3, 1e-1};  // F32, BF16, F16, INT8
    for (int64_t h = 0; h < c.heads; ++h) {
        std::vector<double> out(static_cast<size_t>(c.value));
        double sum = 0.0;
        for (const int64_t key : positions) {
            double x = 0.0;
            for (int64_t i = 0; i < c.dim; ++i) {
                x += static_cast<double>(d.q[(row * c.heads + h) * c.dim + i]) * d.k[key * c.dim + i];
            }
            const double weight = std::exp(x * SCALE);
            sum += weight;
            for (int64_t i = 0; i < c.value; ++i) out[i] += weight * d.k[key * c.dim + i];
        }
        for (int64_t i = 0; i < c.value; ++i) {
            const double error = std::fabs(out[i] / sum - found.mixed[(row * c.heads + h) * c.value + i]);
            require(error < tolerance[c.format], "attention to selected positions agrees with float64");
        }
    }
}

void check(const Case& c) {
    const Data d = draw(c);
    const Result one = run(c, d, {c.length}, 1);
    for (int64_t row = 0; row < c.length; ++row) check_row(c, d, one, row);
    require(equal(run(c, d, {c.length}, 3), one), "sparse attention: the bits do not depend on the threads");
    require(equal(run(c, d, {1}, 1), one), "sparse attention: the same bits token by token");
    require(equal(run(c, d, {1}, 4), one), "sparse attention: the same bits if threads share a row");
    require(equal(run(c, d, {3, 17, 2, 40}, 2), one), "sparse attention: the bits do not depend on the chunks");
    require_first_bits(one.mixed.data(), static_cast<int64_t>(one.mixed.size()), "sparse attention");
    const std::vector<float> chosen(one.selected.begin(), one.selected.end());
    require_first_bits(chosen.data(), static_cast<int64_t>(chosen.size()), "selection");
    const Result whole = run(c, d, {c.length}, 1, true);
    const int64_t size = c.top_k * int64_t{c.heads} * c.value;
    require(same(one.mixed.data(), whole.mixed.data(), std::min(size, static_cast<int64_t>(one.mixed.size()))),
            "a selection of all has the bits of attention to all");
}

// NaN and equal scores: as many positions as ever, and of equal ones the first.
void check_hostile() {
    const Case c = {kvasir::CACHE_F32, 1, 16, 16, 16, 2, 8, 5, 40};
    Data d = draw(c);
    std::fill(d.index_k.begin(), d.index_k.end(), 0.0f);
    const Result equals = run(c, d, {40}, 2);
    for (int32_t i = 0; i < c.top_k; ++i) require(equals.selected[39 * 5 + i] == i, "equal scores: the earlier positions");
    for (int64_t i = 0; i < c.index_dim; ++i) d.index_k[7 * c.index_dim + i] = NAN;
    const Result found = run(c, d, {13}, 2);
    for (int64_t row = 0; row < c.length; ++row) {
        for (int64_t i = 0; i < c.top_k; ++i) {
            const int32_t at = found.selected[row * c.top_k + i];
            const int32_t before = i ? found.selected[row * c.top_k + i - 1] : -1;
            require(i > row ? at == -1 : at > before && at <= row, "positions ascend, whatever the scores");
        }
    }
}

void test_sizes() {
    const auto refuses_index = [](auto change) {
        kvasir::IndexArgs args = {2, 8, 5, 16, 0, 1.0f, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr, 1};
        require(kvasir_select_tokens(&args, 1) == 0, "good sizes are accepted");
        change(args);
        require(kvasir_select_tokens(&args, 1) == -1, "bad sizes of an indexer are accepted");
    };
    refuses_index([](kvasir::IndexArgs& a) { a.heads = 0; });
    refuses_index([](kvasir::IndexArgs& a) { a.heads = 1 << 30; });
    refuses_index([](kvasir::IndexArgs& a) { a.dim = 257; });
    refuses_index([](kvasir::IndexArgs& a) { a.top_k = 0; });
    refuses_index([](kvasir::IndexArgs& a) { a.top_k = (1 << 16) + 1; });
    refuses_index([](kvasir::IndexArgs& a) { a.block_size = 24; });
    refuses_index([](kvasir::IndexArgs& a) { a.max_tokens = 0; });
    const auto refuses = [](auto change) {
        kvasir::SelectedArgs args = {};
        args.attention.layout = {kvasir::CACHE_BF16, 1, 32, 16, 16, 1};
        args.attention.heads = 2;
        args.top_k = 5;
        change(args);
        require(kvasir_selected_attention(&args, 1) == -1, "bad sizes of sparse attention are accepted");
    };
    refuses([](kvasir::SelectedArgs& a) { a.attention.layout.format = 4; });
    refuses([](kvasir::SelectedArgs& a) { a.attention.layout.kv_heads = 2; });
    refuses([](kvasir::SelectedArgs& a) { a.attention.layout.head_dim = 578; });
    refuses([](kvasir::SelectedArgs& a) { a.attention.layout.block_size = 8; });
    refuses([](kvasir::SelectedArgs& a) { a.attention.heads = 0; });
    refuses([](kvasir::SelectedArgs& a) { a.attention.window = 3; });
    refuses([](kvasir::SelectedArgs& a) { a.top_k = -1; });
    refuses([](kvasir::SelectedArgs& a) { a.top_k = int64_t{1} << 40; });
}

}  // namespace

void test_indexer() {
    check({kvasir::CACHE_F32, 5, 24, 16, 16, 3, 16, 21, 83});
    check({kvasir::CACHE_BF16, 20, 54, 48, 32, 8, 24, 16, 70});
    check({kvasir::CACHE_F16, 4, 40, 32, 16, 5, 7, 37, 90});
    check({kvasir::CACHE_INT8, 17, 70, 64, 64, 4, 32, 24, 100});
    check({kvasir::CACHE_F32, 2, 16, 16, 16, 2, 8, 200, 30});
    check_hostile();
    test_sizes();
}
