#include "experts.h"

#include <cstring>

#include "dispatch.h"

namespace kvasir {
namespace {

// The sum by a halving tree: adds the second half to the first until one value is left. An odd length is padded with a
// zero. Overwrites `values`, which needs room for one more.
float tree_sum(float* values, int64_t count) {
    while (count > 1) {
        if (count % 2) values[count++] = 0.0f;
        for (int64_t i = 0; i < count / 2; ++i) values[i] += values[i + count / 2];
        count /= 2;
    }
    return values[0];
}

void sort_slots(const Experts& e, const int32_t* ids, int64_t rows) {
    std::memset(e.begins, 0, static_cast<size_t>(e.experts + 1) * sizeof *e.begins);
    for (int64_t i = 0; i < rows * e.top_k; ++i) ++e.begins[ids[i] + 1];
    for (int64_t x = 0; x < e.experts; ++x) e.begins[x + 1] += e.begins[x];
    for (int64_t i = 0; i < rows * e.top_k; ++i) {
        const int64_t slot = e.begins[ids[i]]++;
        e.slots[i] = slot;
        e.sources[slot] = i / e.top_k;
    }
    for (int64_t x = e.experts; x > 0; --x) e.begins[x] = e.begins[x - 1];
    e.begins[0] = 0;
}

struct Product {
    const Matrix* matrices;
    const float* const* biases;  // or null
    float* out;
    int64_t slot = -1;  // of adapters
};

// Multiplies each local expert's matrices by the rows in its slots. The panels of all selected experts form one list
// that is divided evenly by cost: a panel costs a constant for its bytes plus one unit for each slot.
// biased: whether it adds their biases.
void multiply(const Experts& e, const Product* products, int64_t num_products, bool biased, const Team& team) {
    const Matrix& first = products[0].matrices[0];
    const int64_t count = panels(first), row_bytes = activated_bytes(first);
    const auto cost = [&](int64_t x) {
        const int64_t slots = e.begins[x + 1] - e.begins[x];
        return slots ? slots + 8 : 0;
    };
    const int64_t first_id = e.first, last_id = e.first + e.held;
    int64_t total = 0, seen = 0;
    for (int64_t x = first_id; x < last_id; ++x) total += cost(x) * count * num_products;
    const int64_t begin = total * team.thread / team.threads, end = total * (team.thread + 1) / team.threads;
    for (int64_t x = first_id; x < last_id; ++x) {
        const int64_t each = cost(x), slots = e.begins[x + 1] - e.begins[x];
        for (int64_t i = 0; each && i < num_products; ++i, seen += each * count) {
            const auto border = [&](int64_t at) {
                const int64_t inside = at <= seen ? 0 : (at - seen) / each;
                return inside < count ? inside : count;
            };
            const int64_t from = border(begin), to = border(end);
            if (from >= to) continue;
            const Matrix& m = products[i].matrices[x - first_id];
            kernels().linear(m, e.activated + e.begins[x] * row_bytes, slots, from, to,
                             products[i].out + e.begins[x] * m.rows, m.rows,
                             biased && products[i].biases ? products[i].biases[x - first_id] : nullptr, nullptr, 0);
        }
    }
}

// This thread's share of the local experts' slots.
Range share_slots(const Experts& e, const Team& team) {
    const int64_t begin = e.begins[e.first];
    const Range mine = share(team, e.begins[e.first + e.held] - begin);
    return {begin + mine.begin, begin + mine.end};
}

// Calls f(slot, expert) for the slots of a range.
template <typename F>
void each_slot(const Experts& e, Range slots, F f) {
    for (int64_t expert = 0; expert < e.held; ++expert) {
        const int64_t* begins = e.begins + e.first + expert;
        const int64_t end = begins[1] < slots.end ? begins[1] : slots.end;
        for (int64_t s = begins[0] > slots.begin ? begins[0] : slots.begin; s < end; ++s) f(s, expert);
    }
}

// Applies adapters, then the biases, to products of these slots. x: their input rows [.., K], by slot or, with `sources`,
// by row. first: the token row of the pass.
void change_products(const Experts& e, const ExpertChanges& changes, const Product* products, int64_t num_products,
                     const float* x, const int64_t* sources, int64_t first, Range slots) {
    each_slot(e, slots, [&](int64_t s, int64_t expert) {
        for (int64_t i = 0; i < num_products; ++i) {
            const Matrix& m = products[i].matrices[expert];
            float* out = products[i].out + s * m.rows;
            const float* mine = x + (sources ? sources[s] : s) * m.cols;
            if (products[i].slot >= 0) {
                change_expert(*changes.all, products[i].slot, expert, first + e.sources[s], mine, out);
            }
            if (products[i].biases) kernels().add(out, out, products[i].biases[expert], m.rows);
        }
    });
}

// Whether ranks have parts of the sums of down.
bool splits_down(const Experts& e) { return e.meeting ? e.meeting->parts > 1 : e.meet_inner != nullptr; }

// Applies adapters to complete products of down, of whose inputs each rank has some columns: as change_products, level
// by level. first: the token row of the pass.
void change_split(const Experts& e, const ExpertChanges& changes, int64_t first, int64_t num_slots, Range slots,
                  const Team& team) {
    const Adapters& all = *changes.all;
    for (int64_t level = 0; level < all.tokens.levels; ++level) {
        each_slot(e, slots, [&](int64_t s, int64_t expert) {
            shrink_expert(all, changes.slots[2], expert, first + e.sources[s], level, e.gate_out + s * e.inner,
                          all.inner + s * all.rank);
        });
        team.barrier();
        if (e.meeting) {
            meet_sum(*e.meeting, all.inner, all.inner, num_slots, all.rank, nullptr, team);
        } else if (team.thread == 0) {
            e.meet_inner(nullptr, num_slots);
        }
        team.barrier();
        each_slot(e, slots, [&](int64_t s, int64_t expert) {
            expand_expert(all, changes.slots[2], expert, first + e.sources[s], level, all.inner + s * all.rank,
                          e.down_out + s * e.width);
        });
    }
    team.barrier();
}

// Writes the weighted inputs of all slots to down_out, which is free until the last product.
void weigh_inputs(const Experts& e, const float* x, const float* weights, int64_t rows, const Team& team) {
    const Range mine = share(team, rows * e.top_k);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        kernels().scale(e.down_out + e.slots[i] * e.width, x + i / e.top_k * e.width, weights[i], e.width);
    }
    team.barrier();
}

// The weighted inputs of slots, as activations.
void prepare_slots(const Experts& e, Range slots) {
    const int64_t row_bytes = activated_bytes(e.gate[0]);
    for (int64_t s = slots.begin; s < slots.end; ++s) {
        kernels().prepare(e.gate[0], e.activated + s * row_bytes, e.down_out + s * e.width, e.width, 1);
    }
}

// Rows as activations, once, in the slots of all their local experts.
void prepare_rows(const Experts& e, const float* x, Range rows) {
    const int64_t row_bytes = activated_bytes(e.gate[0]), first = e.begins[e.first], last = e.begins[e.first + e.held];
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const uint8_t* done = nullptr;
        for (int64_t j = 0; j < e.top_k; ++j) {
            const int64_t slot = e.slots[r * e.top_k + j];
            if (slot < first || slot >= last) continue;
            uint8_t* to = e.activated + slot * row_bytes;
            if (done) std::memcpy(to, done, static_cast<size_t>(row_bytes));
            else kernels().prepare(e.gate[0], to, x + r * e.width, e.width, 1);
            done = to;
        }
    }
}

void prepare_down(const Experts& e, int64_t slot) {
    const int64_t row_bytes = activated_bytes(e.down[0]);
    float* gate = e.gate_out + slot * e.inner;
    float* up = e.up_out + slot * e.inner;
    if (!e.up || e.limit > 0.0f) kernels().activate(e.function, gate, gate, e.inner);
    if (e.up && e.limit > 0.0f) {
        kernels().clamp(gate, gate, -e.limit, e.limit, e.inner);
        kernels().clamp(up, up, -e.limit, e.limit, e.inner);
        kernels().multiply(gate, gate, up, e.inner);
    } else if (e.up) {
        kernels().gated(e.function, gate, gate, up, e.inner);
    }
    kernels().prepare(e.down[0], e.activated + slot * row_bytes, gate, e.inner, 1);
}

void combine(const Experts& e, float* out, const float* weights, int64_t row) {
    std::memset(out, 0, static_cast<size_t>(e.width) * sizeof *out);
    for (int64_t j = 0; j < e.top_k; ++j) {
        float* part = e.down_out + e.slots[row * e.top_k + j] * e.width;
        if (!e.weigh_inputs) kernels().scale(part, part, weights[j], e.width);
        kernels().add(out, out, part, e.width);
    }
}

// Computes the token rows [first, first + rows) of a step; out, x, ids and weights are those of the whole step.
void run_pass(const Experts& e, float* out, const float* x, const int32_t* ids, const float* weights, int64_t first,
              int64_t rows, const ExpertChanges& changes, const Team& team) {
    const bool changed = changes.all;
    out += first * e.width, x += first * e.width, ids += first * e.top_k, weights += first * e.top_k;
    team.barrier();
    if (team.thread == 0) sort_slots(e, ids, rows);
    team.barrier();
    if (e.weigh_inputs) weigh_inputs(e, x, weights, rows, team);
    const Range slots = share_slots(e, team);
    if (e.weigh_inputs) {
        prepare_slots(e, slots);
    } else {
        prepare_rows(e, x, share(team, rows));
    }
    team.barrier();
    const Product in[] = {{e.gate, e.gate_bias, e.gate_out, changes.slots[0]},
                          {e.up, e.up_bias, e.up_out, changes.slots[1]}};
    const int64_t num_in = e.up ? 2 : 1;
    multiply(e, in, num_in, !changed, team);
    team.barrier();
    if (changed) {
        const float* read = e.weigh_inputs ? e.down_out : x;
        change_products(e, changes, in, num_in, read, e.weigh_inputs ? nullptr : e.sources, first, slots);
    }
    for (int64_t s = slots.begin; s < slots.end; ++s) prepare_down(e, s);
    team.barrier();
    // No barrier is needed after the call: gate_out, sources and begins are not written before the next pass, which
    // waits for thread 0.
    if (e.inputs && team.thread == 0) e.inputs(nullptr, first);
    const Product down[] = {{e.down, e.down_bias, e.down_out, changes.slots[2]}};
    multiply(e, down, 1, !changed, team);
    team.barrier();
    const bool split = changed && splits_down(e);
    if (changed && !split) {
        change_products(e, changes, down, 1, e.gate_out, nullptr, first, slots);
        team.barrier();
    }
    if (e.meeting) {
        meet_experts(*e.meeting, e.down_out, e.begins, rows * e.top_k, team);
        team.barrier();
    } else if (e.meet) {
        if (team.thread == 0) e.meet(nullptr, rows * e.top_k);
        team.barrier();
    }
    if (split && changes.slots[2] >= 0) change_split(e, changes, first, rows * e.top_k, slots, team);
    const Range mine = share(team, rows);
    for (int64_t r = mine.begin; r < mine.end; ++r) combine(e, out + r * e.width, weights + r * e.top_k, r);
}

// Whether value `a` at `i` precedes value `b` at `j` in descending order, ties by ascending index. NaN precedes nothing.
bool precedes(float a, int64_t i, float b, int64_t j) { return a > b || (a == b && i < j); }

// The scores of all experts, the values that decide the choice, and for a softmax the sum of its terms.
struct Scored {
    float* terms;   // softmax: e^(logit - maximum); else: the score
    float* choice;  // [experts]
    float total;
};

Scored score_row(const float* logits, const Routing& r, float* room) {
    const int64_t count = r.experts;
    float *terms = room, *choice = room + count, *sums = room + 2 * count;
    float total = 1.0f;
    if (r.scores == SCORES_SOFTMAX) {
        float greatest = logits[0];
        for (int64_t x = 1; x < count; ++x) greatest = logits[x] > greatest ? logits[x] : greatest;
        for (int64_t x = 0; x < count; ++x) terms[x] = logits[x] - greatest;
        kernels().activate(FUNCTION_EXP, terms, terms, count);
        std::memcpy(sums, terms, static_cast<size_t>(count) * sizeof *sums);
        total = tree_sum(sums, count);
    } else if (r.scores == SCORES_SIGMOID) {
        kernels().activate(FUNCTION_SIGMOID, terms, logits, count);
    } else {
        kernels().activate(FUNCTION_SOFTPLUS, terms, logits, count);
        for (int64_t x = 0; x < count; ++x) terms[x] = __builtin_sqrtf(terms[x]);
    }
    for (int64_t x = 0; x < count; ++x) choice[x] = r.bias ? terms[x] / total + r.bias[x] : logits[x];
    return {terms, choice, total};
}

// Makes the choices outside the best groups -inf.
void leave_groups(float* choice, const Routing& r, float* ranks) {
    const int64_t size = r.experts / r.groups;
    for (int64_t g = 0; g < r.groups; ++g) {
        float best = -__builtin_inff(), second = best;
        for (int64_t x = g * size; x < (g + 1) * size; ++x) {
            if (choice[x] > best) second = best, best = choice[x];
            else if (choice[x] > second) second = choice[x];
        }
        ranks[g] = r.best_of_group == 2 ? best + second : best;
    }
    for (int64_t g = 0; g < r.groups; ++g) {
        int64_t before = 0;
        for (int64_t h = 0; h < r.groups; ++h) before += precedes(ranks[h], h, ranks[g], g);
        if (before < r.top_groups) continue;
        for (int64_t x = g * size; x < (g + 1) * size; ++x) choice[x] = -__builtin_inff();
    }
}

void choose_experts(int32_t* ids, const float* choice, const Routing& r) {
    int64_t chosen = 0;
    for (int64_t x = 0; x < r.experts && chosen < r.top_k; ++x) {
        int64_t before = 0;
        for (int64_t y = 0; y < r.experts; ++y) before += precedes(choice[y], y, choice[x], x);
        if (before < r.top_k) ids[chosen++] = static_cast<int32_t>(x);
    }
    // NaN has no order and may leave too few: any distinct ids complete the list, since the weights are NaN.
    for (int32_t x = 0; chosen < r.top_k; ++x) {
        bool taken = false;
        for (int64_t j = 0; j < chosen; ++j) taken = taken || ids[j] == x;
        if (!taken) ids[chosen++] = x;
    }
}

// The greatest logit besides expert `left_out`, and its weight: a softmax over the experts whose logits are not much
// smaller (SparseMixer, arXiv:2310.00811). `left_out` is -1 for none.
int32_t mix(float* weight, const float* logits, int64_t left_out, const Routing& r, float* room) {
    const int64_t count = r.experts;
    int64_t best = left_out == 0 ? 1 : 0;
    for (int64_t x = best + 1; x < count; ++x) {
        if (x != left_out && logits[x] > logits[best]) best = x;
    }
    for (int64_t x = 0; x < count; ++x) {
        const float size = __builtin_fabsf(logits[x]), below = logits[best] - logits[x];
        const float factor = size < logits[best] ? logits[best] : size;
        room[x] = x == left_out || below / factor > 2.0f * r.epsilon ? -__builtin_inff() : -below;
    }
    kernels().activate(FUNCTION_EXP, room, room, count);
    const float term = room[best];
    *weight = term / tree_sum(room, count);
    return static_cast<int32_t>(best);
}

// The two experts of a row, and weights that do not add up to 1.
void mix_sparsely(int32_t* ids, float* weights, const float* logits, const Routing& r, float* room) {
    float first, second;
    const int32_t best = mix(&first, logits, -1, r, room), next = mix(&second, logits, best, r, room);
    const bool ascends = best < next;
    ids[!ascends] = best, weights[!ascends] = first * r.scale;
    ids[ascends] = next, weights[ascends] = second * r.scale;
}

}  // namespace

void route_row(int32_t* ids, float* weights, const float* logits, const Routing& r, float* room) {
    if (r.scores == SCORES_SPARSEMIXER) return mix_sparsely(ids, weights, logits, r, room);
    const Scored row = score_row(logits, r, room);
    float* sums = room + 2 * r.experts;
    if (r.top_groups < r.groups) leave_groups(row.choice, r, sums);
    choose_experts(ids, row.choice, r);
    float divisor = row.total;
    if (r.normalise) {
        for (int64_t j = 0; j < r.top_k; ++j) sums[j] = row.terms[ids[j]];
        divisor = tree_sum(sums, r.top_k) + r.epsilon * row.total;
    }
    for (int64_t j = 0; j < r.top_k; ++j) weights[j] = row.terms[ids[j]] / divisor * r.scale;
    for (int64_t j = 0; r.scales && j < r.top_k; ++j) weights[j] *= r.scales[ids[j]];
}

void run_experts(const Experts& e, float* out, const float* x, const int32_t* ids, const float* weights, int64_t rows,
                 const ExpertChanges& changes, const Team& team) {
    for (int64_t first = 0; first < rows; first += e.at_once) {
        const int64_t count = rows - first < e.at_once ? rows - first : e.at_once;
        run_pass(e, out, x, ids, weights, first, count, changes, team);
    }
}

}  // namespace kvasir
