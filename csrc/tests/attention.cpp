// Tests attention over the paged cache: against a softmax in float64; that the bits of a row do not depend on anything
// else in the step; and that nothing is accessed out of bounds: caches and tables end at an inaccessible page, and
// unused slots hold NaN.
#include "../attention_layout.h"

#include <algorithm>

#include "../kvasir_cpu.h"
#include "check.h"

KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout, int32_t values);
KVASIR_API int32_t kvasir_store_kv(const kvasir::StoreArgs* args);
KVASIR_API int32_t kvasir_attention(kvasir::AttentionArgs* args, int32_t threads);

namespace {

using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::require_first_bits;
using kvasir_test::same;

// A sequence of `length` tokens and the parameters of attention.
struct Case {
    int32_t format, heads, kv_heads, dim, block;
    int64_t length;
    int32_t window = 0;
    bool causal = true, sinks = false, alibi = false;
    float softcap = 0.0f;
    int32_t distance = 0;
    bool indivisible = false;  // all its pieces, although it is causal
    int64_t reach = -1;  // of tables by relative position; -1 for none
    int32_t value = 0;  // the values' dimensions, 0 for dim
    bool latent = false;

    kvasir::CacheLayout layout() const { return {format, kv_heads, dim, block, value, latent}; }
    int64_t value_dim() const { return value ? value : dim; }
    int64_t v_row() const { return kv_heads * (latent ? dim : value_dim()); }  // from one token's values to the next's
    int64_t out_row() const { return heads * value_dim(); }
};

struct Data {
    std::vector<float> q, k, v, sinks, slopes, bias, keys, queries;

    // A column of the tables, of `heads` times `width` rows.
    static int64_t column(const Case& c, int64_t key, int64_t query) {
        return std::clamp(key - query, -c.reach, c.reach) + c.reach + kvasir::TILE_TOKENS;
    }
};

Data draw(const Case& c) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& to, int64_t count, float size) {
        to.resize(static_cast<size_t>(count));
        for (float& value : to) value = size * normal(random);
    };
    Data data;
    fill(data.q, c.length * c.heads * c.dim, 2.0f);
    fill(data.k, c.length * c.kv_heads * c.dim, 1.0f);
    fill(data.v, c.length * c.v_row(), 1.0f);
    if (c.latent) data.v = data.k;
    fill(data.sinks, c.heads, 2.0f);
    fill(data.slopes, c.heads, 0.05f);
    if (c.reach >= 0) {
        const int64_t columns = kvasir::Relative{nullptr, nullptr, nullptr, nullptr, 0, c.reach}.columns();
        const auto table = [&](std::vector<float>& to, int64_t rows) {
            fill(to, rows * columns, 0.3f);
            for (int64_t i = 0; i < rows * columns; ++i) {  // beyond the reach, the values of the reach
                const int64_t at = i % columns, first = kvasir::TILE_TOKENS, last = first + 2 * c.reach;
                to[static_cast<size_t>(i)] = to[static_cast<size_t>(i - at + std::clamp(at, first, last))];
            }
        };
        table(data.bias, c.heads);
        table(data.keys, c.heads * c.dim);
        table(data.queries, c.heads * c.dim);
    }
    return data;
}

kvasir::Piece part_of(const Case& c, int64_t first, int64_t start, int64_t count, const int32_t* const* tables) {
    return {0, c.causal && !c.indivisible ? 0 : kvasir::PIECE_BIDIRECTIONAL, start, count, 0, first, tables};
}

float scale_of(const Case& c) { return 1.0f / std::sqrt(static_cast<float>(c.dim)); }

void expect(const Case& c, const Data& data, std::vector<double>& out) {
    out.assign(static_cast<size_t>(c.length * c.out_row()), 0.0);
    std::vector<double> weight(static_cast<size_t>(c.length));
    const int64_t group = c.heads / c.kv_heads;
    for (int64_t p = 0; p < c.length; ++p) {
        int64_t first = c.window < 0 ? p - p % -c.window : std::max<int64_t>(0, c.window ? p - c.window + 1 : 0);
        int64_t last = c.causal ? p + 1 : c.length;
        if (c.distance) {
            first = std::max<int64_t>(0, p - c.distance);
            last = std::min(c.length, p + c.distance + 1);
        }
        for (int64_t h = 0; h < c.heads; ++h) {
            double sum = c.sinks ? std::exp(static_cast<double>(data.sinks[h])) : 0.0;
            for (int64_t j = first; j < last; ++j) {
                double x = 0.0;
                for (int64_t i = 0; i < c.dim; ++i) {
                    x += static_cast<double>(data.q[(p * c.heads + h) * c.dim + i]) *
                         data.k[(j * c.kv_heads + h / group) * c.dim + i];
                    if (c.reach >= 0) {
                        const int64_t columns = 2 * (c.reach + kvasir::TILE_TOKENS), at = Data::column(c, j, p);
                        const int64_t cell = (h * c.dim + i) * columns + at;
                        x += static_cast<double>(data.q[(p * c.heads + h) * c.dim + i]) * data.keys[cell];
                        x += static_cast<double>(data.k[(j * c.kv_heads + h / group) * c.dim + i]) *
                             data.queries[cell];
                    }
                }
                x *= scale_of(c);
                if (c.reach >= 0) x += data.bias[h * 2 * (c.reach + kvasir::TILE_TOKENS) + Data::column(c, j, p)];
                if (c.softcap > 0.0f) x = c.softcap * std::tanh(x / c.softcap);
                if (c.alibi) x += static_cast<double>(data.slopes[h]) * static_cast<double>(j - p);
                sum += weight[j] = std::exp(x);
            }
            for (int64_t j = first; j < last; ++j) {
                for (int64_t i = 0; i < c.value_dim(); ++i) {
                    out[(p * c.heads + h) * c.value_dim() + i] +=
                        weight[j] / sum * data.v[j * c.v_row() + h / group * c.value_dim() + i];
                }
            }
        }
    }
}

// Computes a sequence in steps of the given sizes (the last one repeats) on `threads` threads. The cache is initialised
// with NaN, and its blocks are in descending order.
std::vector<float> attend(const Case& c, const Data& data, std::vector<int64_t> sizes, int32_t threads) {
    const kvasir::CacheLayout layout = c.layout();
    const int64_t k_bytes = kvasir_cache_block_bytes(&layout, 0), v_bytes = kvasir_cache_block_bytes(&layout, 1);
    const int64_t blocks = (c.length + c.block - 1) / c.block;
    Guarded<uint8_t> k(blocks * k_bytes), v(blocks * v_bytes);
    std::memset(k.data, 0xff, static_cast<size_t>(blocks * k_bytes));
    std::memset(v.data, 0xff, static_cast<size_t>(blocks * v_bytes));
    Guarded<int32_t> table(blocks);
    const int64_t scratch_bytes = kvasir::attention_scratch(layout, c.heads);
    Guarded<uint8_t> scratch(threads * scratch_bytes);
    std::vector<float> out(static_cast<size_t>(c.length * c.out_row()), 5.0f);
    std::vector<int64_t> slots;
    const int64_t q_row = c.heads * c.dim, k_row = c.kv_heads * c.dim;
    for (int64_t start = 0, step = 0; start < c.length; ++step) {
        const int64_t size = sizes[std::min(static_cast<size_t>(step), sizes.size() - 1)];
        const int64_t count = std::min(size, c.length - start);
        for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
        const int64_t low = c.window < 0   ? start - start % -c.window
                            : c.window > 0 ? std::max<int64_t>(0, start - c.window + 1)
                                           : 0;
        for (int64_t i = 0; i < low / c.block; ++i) table[i] = 1 << 30;  // stale: must not be read
        slots.clear();
        for (int64_t p = start; p < start + count; ++p) slots.push_back(table[p / c.block] * c.block + p % c.block);
        const kvasir::StoreArgs store{layout, k.data, v.data, &data.k[start * k_row], &data.v[start * c.v_row()],
                                      k_row, c.v_row(), slots.data(), count};
        require(kvasir_store_kv(&store) == 0, "store_kv accepts the layout");
        const int32_t* tables = table.data;
        const kvasir::Piece piece = part_of(c, 0, start, count, &tables);
        kvasir::AttentionArgs args{};
        args.layout = layout;
        args.k = k.data;
        args.v = v.data;
        Guarded<float> q(count * q_row), mixed(count * c.out_row());
        std::memcpy(q.data, &data.q[start * q_row], static_cast<size_t>(count * q_row) * sizeof(float));
        args.q = q.data;
        args.out = mixed.data;
        args.q_stride = q_row;
        args.out_stride = c.out_row();
        args.heads = c.heads;
        args.window = c.window;
        args.distance = c.distance;
        args.causal = c.indivisible;
        args.scale = scale_of(c);
        args.softcap = c.softcap;
        args.sinks = c.sinks ? data.sinks.data() : nullptr;
        args.alibi_slopes = c.alibi ? data.slopes.data() : nullptr;
        args.pieces = &piece;
        args.num_pieces = 1;
        args.scratch = scratch.data;
        Guarded<float> bias(static_cast<int64_t>(data.bias.size())), keys(static_cast<int64_t>(data.keys.size()));
        Guarded<float> queries(static_cast<int64_t>(data.queries.size())), rows(count * k_row);
        std::copy(data.bias.begin(), data.bias.end(), bias.data);
        std::copy(data.keys.begin(), data.keys.end(), keys.data);
        std::copy(data.queries.begin(), data.queries.end(), queries.data);
        std::copy_n(&data.k[start * k_row], count * k_row, rows.data);
        const kvasir::Relative relative{bias.data, keys.data, queries.data, rows.data, k_row, c.reach};
        args.relative = c.reach >= 0 ? &relative : nullptr;
        require(kvasir_attention(&args, threads) == 0, "attention accepts the layout");
        std::memcpy(&out[start * c.out_row()], mixed.data, static_cast<size_t>(count * c.out_row()) * sizeof(float));
        start += count;
    }
    return out;
}

// Computes the last `counts[i]` rows of sequences of `lengths[i]` tokens in one step on `threads` threads. Adds to
// `cuts` the number of threads that started inside an item.
std::vector<float> attend_last(const Case& c, const std::vector<int64_t>& lengths, const std::vector<int64_t>& counts,
                               int32_t threads, int64_t& cuts) {
    const kvasir::CacheLayout layout = c.layout();
    std::vector<int64_t> slots;
    std::vector<kvasir::Piece> pieces;
    std::vector<std::vector<int32_t>> tables(lengths.size());
    std::vector<const int32_t*> first_blocks(lengths.size());
    int64_t blocks = 0, rows = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        for (int64_t p = 0; p < lengths[i]; ++p) {
            if (p % c.block == 0) tables[i].push_back(static_cast<int32_t>(blocks++));
            slots.push_back(tables[i].back() * c.block + p % c.block);
        }
        first_blocks[i] = tables[i].data();
        pieces.push_back(part_of(c, rows, lengths[i] - counts[i], counts[i], &first_blocks[i]));
        rows += counts[i];
    }
    Case all = c;
    all.length = static_cast<int64_t>(slots.size());
    const Data data = draw(all);
    const int64_t k_bytes = kvasir_cache_block_bytes(&layout, 0), v_bytes = kvasir_cache_block_bytes(&layout, 1);
    const int64_t k_row = c.kv_heads * c.dim, q_row = c.heads * c.dim;
    Guarded<uint8_t> k(blocks * k_bytes), v(blocks * v_bytes);
    std::memset(k.data, 0xff, static_cast<size_t>(blocks * k_bytes));
    std::memset(v.data, 0xff, static_cast<size_t>(blocks * v_bytes));
    const kvasir::StoreArgs store{layout, k.data, v.data, data.k.data(), data.v.data(), k_row, c.v_row(), slots.data(),
                                  all.length};
    require(kvasir_store_kv(&store) == 0, "store_kv accepts the layout");
    const int64_t scratch_bytes = kvasir::attention_scratch(layout, c.heads);
    Guarded<uint8_t> scratch(threads * scratch_bytes);
    std::memset(scratch.data, 0x7f, static_cast<size_t>(threads * scratch_bytes));
    std::vector<float> out(static_cast<size_t>(rows * c.out_row()), 5.0f);
    kvasir::AttentionArgs args{};
    args.layout = layout;
    args.k = k.data;
    args.v = v.data;
    args.q = data.q.data();
    args.out = out.data();
    args.q_stride = q_row;
    args.out_stride = c.out_row();
    args.heads = c.heads;
    args.window = c.window;
    args.distance = c.distance;
    args.scale = scale_of(c);
    args.sinks = c.sinks ? data.sinks.data() : nullptr;
    args.pieces = pieces.data();
    args.num_pieces = static_cast<int64_t>(pieces.size());
    args.scratch = scratch.data;
    require(kvasir_attention(&args, threads) == 0, "attention accepts the layout");
    for (int32_t t = 0; t < threads; ++t) {
        cuts += reinterpret_cast<const kvasir::AttentionState*>(scratch.data + t * scratch_bytes)->kept_end > 0;
    }
    return out;
}

void check(const Case& c) {
    const Data data = draw(c);
    std::vector<double> expected;
    expect(c, data, expected);
    const std::vector<float> whole = attend(c, data, {c.length}, 1);
    const double of_format[] = {2e-6, 1.2e-2, 1.5e-3, 4e-2};  // F32, BF16, F16, INT8
    const double tolerance = of_format[c.format] * (c.dim > 256 ? 2.0 : 1.0);  // the rounding of long scores
    double max_error = 0.0;
    for (size_t i = 0; i < whole.size(); ++i) max_error = std::max(max_error, std::fabs(whole[i] - expected[i]));
    if (!(max_error < 2.5 * tolerance)) {
        std::fprintf(stderr, "format %d, %d heads of %d, %lld tokens: off by %g\n", c.format, c.heads, c.dim,
                     static_cast<long long>(c.length), max_error);
    }
    require(max_error < 2.5 * tolerance, "attention agrees with float64");
    const int64_t size = static_cast<int64_t>(whole.size());
    require(same(attend(c, data, {c.length}, 3).data(), whole.data(), size),
            "attention: the bits do not depend on the threads");
    require_first_bits(whole.data(), size, "attention");
    if (!c.causal) return;
    require(same(attend(c, data, {1}, 1).data(), whole.data(), size), "attention: the same bits token by token");
    require(same(attend(c, data, {3, 17, 1, 40}, 2).data(), whole.data(), size),
            "attention: the bits do not depend on the chunks");
}

// Sequences long enough to be split between threads, alone and in a batch. fits: whether an item may be split.
void check_cuts(const Case& c, const std::vector<int64_t>& lengths, const std::vector<int64_t>& counts,
                const std::vector<int32_t>& teams = {2, 3, 5, 16}, bool fits = true) {
    int64_t cuts = 0;
    const std::vector<float> whole = attend_last(c, lengths, counts, 1, cuts);
    require(cuts == 0, "attention: one thread splits no item");
    const int64_t size = static_cast<int64_t>(whole.size());
    require_first_bits(whole.data(), size, "attention");
    for (const int32_t threads : teams) {
        const std::vector<float> found = attend_last(c, lengths, counts, threads, cuts);
        require(same(found.data(), whole.data(), size), "attention: the bits do not depend on where items are split");
    }
    require((cuts > 0) == fits, "attention: long items are split if their chunks fit");
}

// A NaN in one token's key or value affects exactly the rows that attend to it.
void check_poison(Case c, bool in_values) {
    const int64_t bad = 21, row = c.heads * c.dim;
    Data data = draw(c);
    const std::vector<float> clean = attend(c, data, {c.length}, 1);
    (in_values ? data.v : data.k)[bad * c.kv_heads * c.dim] = NAN;
    const std::vector<float> found = attend(c, data, {c.length}, 1);
    const int64_t reach = c.window < 0 ? (bad / -c.window + 1) * -c.window : c.window ? bad + c.window : c.length;
    const int64_t until = std::min(c.length, reach);
    require(same(&found[0], &clean[0], bad * row), "attention: a NaN does not affect earlier rows");
    require(until == c.length || same(&found[until * row], &clean[until * row], (c.length - until) * row),
            "attention: a NaN outside of the window affects no row");
    for (int64_t p = bad; p < until; ++p) {
        require(std::isnan(found[p * row]), "attention: a row that attends to NaN is NaN");
    }
}

}  // namespace

void test_attention() {
    for (int32_t format = 0; format < 4; ++format) {
        check({format, 2, 1, 10, 16, 70});
        check({format, 3, 3, 8, 32, 67, 20});
        check({format, 3, 3, 8, 32, 67, -20});
        check({format, 14, 2, 16, 48, 85});
        Case soft{format, 4, 2, 80, 16, 66, 33};
        soft.softcap = 5.0f;
        soft.sinks = true;
        check(soft);
        Case both{format, 17, 1, 16, 128, 40};
        both.causal = false;
        both.alibi = true;
        check(both);
        Case block{format, 6, 3, 16, 16, 90, 40};
        block.indivisible = true;
        check(block);
        Case near{format, 6, 3, 16, 16, 210};
        near.causal = false;
        near.distance = 24;
        check(near);
        Case placed{format, 4, 2, 10, 16, 150};
        placed.causal = false;
        placed.reach = 40;
        check(placed);
        placed.reach = 0;
        check(placed);
        Case wide{format, 6, 2, 24, 16, 85};
        wide.value = 36;
        wide.sinks = true;
        check(wide);
        Case latent{format, 20, 1, 576, 32, 70};
        latent.value = 512;
        latent.latent = true;
        check(latent);
        latent.heads = 3, latent.dim = 22, latent.value = 14;
        check(latent);
        check_poison({format, 4, 2, 16, 16, 60}, false);
        check_poison({format, 4, 2, 16, 16, 60, 25}, true);
        check_poison({format, 4, 2, 16, 16, 60, -25}, true);
        check_poison({format, 4, 4, 16, 64, 60}, true);
    }
    check({kvasir::CACHE_BF16, 1, 1, 2, 64, 1100});
    for (int32_t format = 0; format < 4; ++format) {
        const Case one{format, 2, 1, 8, 64, 0};
        check_cuts(one, {9001}, {1});
        check_cuts(one, {100, 5000, 0, 17}, {1, 1, 0, 1});
    }
    Case latent{kvasir::CACHE_BF16, 20, 1, 38, 32, 0};
    latent.value = 32;
    latent.latent = true;
    check_cuts(latent, {4100}, {1});
    Case window{kvasir::CACHE_BF16, 3, 3, 10, 16, 0, 3000};
    window.sinks = true;
    check_cuts(window, {6200}, {1});
    check_cuts({kvasir::CACHE_BF16, 2, 1, 10, 16, 0, 3096}, {4123}, {7});  // a chunk that only some rows attend to
    check_cuts({kvasir::CACHE_BF16, 2, 1, 10, 16, 0, -3096}, {3090, 6200}, {9, 1});  // rows of two chunks
    check_cuts({kvasir::CACHE_BF16, 17, 1, 16, 32, 0}, {4100}, {7});
    check_cuts({kvasir::CACHE_F32, 1, 1, 256, 128, 0}, {2048, 2100}, {1, 2});
    Case both{kvasir::CACHE_BF16, 2, 2, 16, 16, 0};
    both.causal = false;
    check_cuts(both, {3500, 60}, {3, 60});
    both.distance = 1500;
    check_cuts(both, {4100}, {4100});
    // Full items for which the second thread would have to store more chunks than fit its scratch.
    check_cuts({kvasir::CACHE_F32, 16, 1, 2, 64, 0}, {130 * 1024, 132 * 1024}, {1, 1}, {2}, false);
    kvasir::CacheLayout odd{kvasir::CACHE_BF16, 1, 7, 16, 0, 0};
    require(kvasir_cache_block_bytes(&odd, 0) == -1, "an odd head_dim is rejected");
    kvasir::CacheLayout longer{kvasir::CACHE_BF16, 1, 8, 16, 10, 1};
    require(kvasir_cache_block_bytes(&longer, 1) == -1, "a value that is longer than the row that it begins is rejected");
}
