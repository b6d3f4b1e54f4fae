// Fuzzes the choice of experts: whatever the logits, a row chooses distinct experts in ascending order, within its
// groups, and all instruction sets choose the same ones with the same weights.
#include "../dispatch.h"
#include "../experts.h"
#include "input.h"

namespace {

using namespace kvasir_fuzz;
using kvasir::FloatMode;
using kvasir::Routing;

Routing routing_of(Input& in) {
    Routing r = {};
    r.scores = static_cast<int32_t>(in.between(kvasir::SCORES_SOFTMAX, kvasir::SCORES_SPARSEMIXER));
    r.groups = in.one_of({1, 1, 2, 4});
    r.experts = r.groups * in.between(r.scores == kvasir::SCORES_SPARSEMIXER && r.groups == 1 ? 2 : 1, 40);
    r.top_groups = in.between(1, r.groups);
    r.top_k = in.between(1, r.experts / r.groups * r.top_groups);
    if (r.scores == kvasir::SCORES_SPARSEMIXER) r.top_k = 2;
    r.best_of_group = in.between(1, 2);
    r.normalise = in.flag();
    r.scale = in.number(true);
    r.epsilon = in.one_of({0.0f, 1e-20f, 0.01f, 1.0f});
    return r;
}

void check_choice(const int32_t* ids, const Routing& r, bool has_nan) {
    const int64_t size = r.experts / r.groups;
    int64_t groups = 0;
    for (int64_t i = 0; i < r.top_k; ++i) {
        require(ids[i] >= 0 && ids[i] < r.experts, "router: the experts exist");
        // Rows without an order, whose weights are NaN, are only complete.
        for (int64_t j = 0; j < i; ++j) require(ids[i] != ids[j], "router: the experts differ");
        if (!has_nan && i > 0) require(ids[i - 1] < ids[i], "router: the experts ascend");
        groups += i == 0 || ids[i] / size != ids[i - 1] / size;
    }
    if (!has_nan && r.scores != kvasir::SCORES_SPARSEMIXER) {
        require(groups <= r.top_groups, "router: the experts are of the best groups");
    }
}

}  // namespace

void fuzz_router(const uint8_t* data, size_t size) {
    Input in(data, size);
    Routing r = routing_of(in);
    Guarded<float> logits(r.experts), bias(r.experts), scales(r.experts);
    in.floats(logits.data, r.experts);
    in.floats(bias.data, r.experts);
    in.floats(scales.data, r.experts);
    r.bias = in.flag() ? bias.data : nullptr;
    r.scales = in.flag() ? scales.data : nullptr;
    bool has_hard = false;
    for (int64_t i = 0; i < r.experts; ++i) {
        has_hard = has_hard || !std::isfinite(logits[i]) || !std::isfinite(bias[i]) || std::fabs(bias[i]) > 1e37f;
    }
    on_all(
        [&] {
            [[maybe_unused]] const FloatMode mode;
            Guarded<int32_t> ids(r.top_k);
            Guarded<float> weights(r.top_k), room(kvasir::route_room(r.experts));
            std::fill_n(ids.data, r.top_k, -1);
            kvasir::route_row(ids.data, weights.data, logits.data, r, room.data);
            check_choice(ids.data, r, has_hard);
            std::vector<float> found(weights.data, weights.data + r.top_k);
            for (int64_t i = 0; i < r.top_k; ++i) found.push_back(static_cast<float>(ids[i]));
            return found;
        },
        "router: all instruction sets give the same bits");
}
