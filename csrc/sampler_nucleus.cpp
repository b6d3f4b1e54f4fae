// Keeps the shortest head of the listed tokens whose probability reaches p, in a given order. Tokens are first sorted
// into coarse bins by their distance from the start of the order; only the tokens of the bin in which the head ends are
// compared exactly.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t BINS = 1024;
constexpr float BINS_PER_NAT = 64.0f;

// Tokens by descending logit, ties by ascending id.
struct ByLogit {
    const Left& left;

    f64x8 distance(f64x8 z) const { return sub(broadcast_f64(0.0), z); }
    uint64_t key(int64_t i) const { return key_of(left.logit(i), left.ids[i]); }
};

// Tokens by how far their surprise is from the entropy, ties by ascending id.
struct ByTypicality {
    const Left& left;
    double log_total, expected;

    f64x8 distance(f64x8 z) const {
        const f64x8 off = sub(sub(broadcast_f64(log_total), z), broadcast_f64(expected));
        return max(off, sub(broadcast_f64(0.0), off));
    }
    uint64_t key(int64_t i) const { return ~bits_as<uint64_t>(__builtin_fabs(log_total - left.z[i] - expected)); }
};

// The bins of 16 tokens: integers from 0 to BINS - 1 that increase with the distance.
template <typename Order>
KVASIR_INLINE f32x16 bins_of(const Order& order, f64x8 low, f64x8 high) {
    const f32x16 place = mul(to_single(order.distance(low), order.distance(high)), broadcast(BINS_PER_NAT));
    return round(min(place, broadcast(BINS - 1)));
}

template <typename Order>
KVASIR_INLINE f32x16 bins_at(const Left& left, const Order& order, int64_t i) {
    return bins_of(order, load_f64(left.z + i), load_f64(left.z + i + 8));
}

KVASIR_INLINE uint32_t equal(f32x16 a, f32x16 b) { return lanes(less_equal(a, b)) & lanes(less_equal(b, a)); }

template <typename Order>
void weigh_bins(int64_t (&sums)[BINS], const Left& left, const Order& order) {
    constexpr int WAYS = 2;  // separate sums, since additions to the same bin depend on each other
    int64_t ways[WAYS][BINS] = {};
    for (int64_t i = 0; i < left.count; i += LANES) {
        int32_t bin[LANES];
        store(bin, to_int(bins_at(left, order, i)));
        const int64_t part = lesser(LANES, left.count - i);
        for (int64_t j = 0; j < part; ++j) ways[j % WAYS][bin[j]] += left.weights[i + j];
    }
    for (int64_t b = 0; b < BINS; ++b) sums[b] = ways[0][b] + ways[1][b];
}

// Lists the tokens of a bin and returns their number.
template <typename Order>
int64_t list_bin(const Left& left, const Order& order, f32x16 bin) {
    int64_t count = 0;
    for (int64_t i = 0; i < left.count; i += LANES) {
        uint32_t found = equal(bins_at(left, order, i), bin) & within(left.count - i);
        for (; found; found &= found - 1) {
            const int64_t place = i + __builtin_ctz(found);
            left.list[count++] = {order.key(place), left.weights[place]};
        }
    }
    return count;
}

// total: the sum of left.weights.
template <typename Order>
void keep_head(Left& left, const Order& order, int64_t total, double p) {
    int64_t target = mass_of(total, p);
    if (total < target) return;  // the mass was rounded up: keep all
    int64_t sums[BINS], last = 0;
    weigh_bins(sums, left, order);
    while (target > sums[last]) target -= sums[last++];
    const f32x16 bin = broadcast(static_cast<float>(last));
    const Cut cut = head_end(left.list, list_bin(left, order, bin), target);
    int64_t rest = cut.rest;
    keep(left, [&](int64_t i, f64x8 low, f64x8 high) {
        const f32x16 bins = bins_of(order, low, high);
        uint32_t stay = lanes(less(bins, bin));
        for (uint32_t open = equal(bins, bin) & within(left.count - i); open; open &= open - 1) {
            const int64_t place = i + __builtin_ctz(open);
            const uint64_t key = order.key(place);
            const bool here = key > cut.key || (key == cut.key && rest > 0);
            if (key == cut.key) rest -= left.weights[place];
            stay |= here ? open & -open : 0u;
        }
        return stay;
    });
}

}  // namespace

void keep_nucleus(Left& left, double p) {
    const Weighed all = weigh(left.weights, left.z, left.count);
    keep_head(left, ByLogit{left}, all.total, p);
}

void keep_typical(Left& left, double p) {
    const Weighed all = weigh(left.weights, left.z, left.count);
    const double log_total = log_weight(all.total);
    const double expected = log_total + static_cast<double>(all.surprise) / static_cast<double>(all.total);
    keep_head(left, ByTypicality{left, log_total, expected}, all.total, p);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
