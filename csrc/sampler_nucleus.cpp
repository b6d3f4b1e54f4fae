// The shortest head of what is left whose probability reaches a share, in an order of its own. Most tokens are told
// apart by the coarse bin of their distance from the head's begin; only those of the bin in which the head ends are
// compared.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int64_t BINS = 2048;
constexpr double BINS_PER_NAT = 64.0;

// Tokens by descending logit, ties by ascending id.
struct ByLogit {
    const Left& left;

    double distance(int64_t i) const { return -left.z[i]; }
    uint64_t key(int64_t i) const { return key_of(left.logit(i), left.ids[i]); }
};

// Tokens by how far their surprise is from the entropy, ties by ascending id.
struct ByTypicality {
    const Left& left;
    double log_total, expected;

    double distance(int64_t i) const { return __builtin_fabs(log_total - left.z[i] - expected); }
    uint64_t key(int64_t i) const { return ~bits_as<uint64_t>(distance(i)); }
};

template <typename Order>
void sort_into_bins(int64_t (&sums)[BINS], const Left& left, const Order& order) {
    constexpr int WAYS = 2;  // neighbours may share a bin and would wait for each other
    int64_t ways[WAYS][BINS] = {};
    for (int64_t i = 0; i < left.count; ++i) {
        const double place = order.distance(i) * BINS_PER_NAT;
        left.bins[i] = static_cast<uint16_t>(static_cast<int32_t>(place < BINS - 1 ? place : BINS - 1));
    }
    for (int64_t i = 0; i < left.count; ++i) ways[i % WAYS][left.bins[i]] += left.weights[i];
    for (int64_t b = 0; b < BINS; ++b) sums[b] = ways[0][b] + ways[1][b];
}

// total: the sum of left.weights.
template <typename Order>
void keep_head(Left& left, const Order& order, int64_t total, double p) {
    int64_t target = mass_of(total, p);
    if (total < target) return;  // a mass that was rounded up
    int64_t sums[BINS];
    sort_into_bins(sums, left, order);
    int64_t bin = 0, count = 0;
    while (target > sums[bin]) target -= sums[bin++];
    for (int64_t i = 0; i < left.count; ++i) {
        if (left.bins[i] == bin) left.list[count++] = {order.key(i), left.weights[i]};
    }
    const Cut cut = head_end(left.list, count, target);
    int64_t rest = cut.rest;
    keep(left, [&](int64_t i) {
        if (left.bins[i] != bin) return left.bins[i] < bin;
        const uint64_t key = order.key(i);
        if (key != cut.key) return key > cut.key;
        const bool here = rest > 0;
        rest -= left.weights[i];
        return here;
    });
}

}  // namespace

void keep_nucleus(Left& left, double p) {
    const int64_t total = weigh(left.weights, left.z, left.count);
    keep_head(left, ByLogit{left}, total, p);
}

void keep_typical(Left& left, double p) {
    const int64_t total = weigh(left.weights, left.z, left.count);
    const double log_total = log_weight(total);
    const int64_t surprised = surprise(left.weights, left.z, left.count);
    const double expected = log_total + static_cast<double>(surprised) / static_cast<double>(total);
    keep_head(left, ByTypicality{left, log_total, expected}, total, p);
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
