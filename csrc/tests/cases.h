// The programs of the tests: decoder layers with and without adapters, all other instructions, and mixtures of experts.
#pragma once

#include <atomic>

#include "plain.h"

namespace kvasir_test {

constexpr int64_t VOCAB = 300, WIDTH = 32, ANSWER = 6, GROUPS = Builder::GROUPS;
constexpr int64_t PROMPTS[] = {33, 17, 1, 40, 5};
constexpr int64_t SEQUENCES = 5, MAX_IDS = 40 + ANSWER;

// adapted: adapters change all products and the head; the last product of a layer uses OP_ADAPT_INNER and OP_ADAPT_ADD.
inline void layers(Builder& b, const Numbers& numbers, bool adapted) {
    constexpr int64_t HEADS = 4, KV_HEADS = 2, DIM = 8, KV = KV_HEADS * DIM, INNER = 96;
    const Numbers plain = {FORMAT_F32, ACT_F32, numbers.cache};
    float* x = b.embed(numbers, WIDTH, VOCAB, false);
    for (int64_t layer = 0; layer < 2; ++layer) {
        float *q = b.rows(WIDTH), *k = b.rows(KV), *v = b.rows(KV), *mixed = b.rows(WIDTH);
        b.linear(b.rms_norm(x, WIDTH), {{b.matrices(numbers, WIDTH, WIDTH), b.vector(WIDTH), q, nullptr, adapted},
                                        {b.matrices(plain, KV, WIDTH), b.vector(KV), k, nullptr, adapted},
                                        {b.matrices(numbers, KV, WIDTH), nullptr, v, nullptr, adapted}});
        b.add(OP_RMS_NORM, {q, q, b.vector(DIM, 1.0f)}, {HEADS, DIM, WIDTH, WIDTH}, 1e-6f);
        b.add(OP_RMS_NORM, {v, v, nullptr}, {KV_HEADS, DIM, KV, KV}, 1e-6f);
        b.rope(q, HEADS, DIM, 3, MAX_IDS);
        b.rope(k, KV_HEADS, DIM, 3, MAX_IDS);
        b.attention(numbers, mixed, q, k, v, HEADS, KV_HEADS, DIM, layer);
        b.linear(mixed, {{b.matrices(plain, WIDTH, WIDTH, 8), b.vector(WIDTH), x, x, adapted}});
        float *gate = b.rows(INNER), *up = b.rows(INNER);
        b.linear(b.rms_norm(x, WIDTH), {{b.matrices(numbers, INNER, WIDTH), nullptr, gate, nullptr, adapted},
                                        {b.matrices(numbers, INNER, WIDTH), b.vector(INNER), up, nullptr, adapted}});
        b.add(OP_GATED, {gate, gate, up}, {INNER, FUNCTION_SILU});
        const Matrix* down = b.matrices(numbers, WIDTH, INNER, numbers.format == FORMAT_Q8_0 ? 1 : 4);
        if (!adapted) {
            b.linear(gate, {{down, nullptr, x, x}});
            continue;
        }
        float* sum = b.rows(WIDTH);
        b.linear(gate, {{down, nullptr, sum, nullptr}});
        b.adapt(gate, sum, *down);
        b.add(OP_ADD, {x, x, sum}, {WIDTH});
    }
    b.head(numbers, b.rms_norm(x, WIDTH), WIDTH, VOCAB, adapted);
}

inline void decoder(Builder& b, const Numbers& numbers) { layers(b, numbers, false); }
inline void adapted_decoder(Builder& b, const Numbers& numbers) { layers(b, numbers, true); }

// Latent attention: all heads read one row per token, by matrices of their own.
inline void latent(Builder& b, const Numbers& numbers) {
    constexpr int64_t HEADS = 20, NOPE = 32, RANK = 48, ROPE = 6, VALUE = 16;
    float *x = b.embed(numbers, WIDTH, VOCAB, false), *n = b.rms_norm(x, WIDTH);
    float *nope = b.rows(HEADS * NOPE), *turned = b.rows(HEADS * ROPE), *c = b.rows(RANK), *shared = b.rows(ROPE);
    b.linear(n, {{b.matrices(numbers, HEADS * NOPE, WIDTH), nullptr, nope, nullptr},
                 {b.matrices(numbers, HEADS * ROPE, WIDTH), nullptr, turned, nullptr},
                 {b.matrices(numbers, RANK, WIDTH), nullptr, c, nullptr},
                 {b.matrices(numbers, ROPE, WIDTH), nullptr, shared, nullptr}});
    b.rope(turned, HEADS, ROPE, ROPE / 2, MAX_IDS);
    b.rope(shared, 1, ROPE, ROPE / 2, MAX_IDS);
    float *q = b.rows(HEADS * (RANK + ROPE)), *key = b.rows(RANK + ROPE), *absorbed = b.rows(HEADS * RANK);
    b.head_linear(b.matrices(numbers, RANK, NOPE, 1, HEADS), HEADS, nope, absorbed);
    b.add(OP_JOIN, {q, absorbed, turned}, {HEADS, RANK, ROPE});
    b.add(OP_JOIN, {key, b.rms_norm(c, RANK), shared}, {1, RANK, ROPE});
    float *mixed = b.rows(HEADS * RANK), *values = b.rows(HEADS * VALUE);
    b.attention(numbers, mixed, q, key, key, HEADS, 1, RANK + ROPE, 0, RANK);
    const Numbers floats = {FORMAT_F32, ACT_F32, numbers.cache};
    b.head_linear(b.matrices(numbers.format == FORMAT_Q8_0 ? floats : numbers, VALUE, RANK, 1, HEADS), HEADS, mixed,
                  values);
    b.linear(values, {{b.matrices(numbers, WIDTH, HEADS * VALUE), nullptr, x, x}});
    b.head(numbers, b.rms_norm(x, WIDTH), WIDTH, VOCAB);
}

inline void negate(void* context, int64_t rows) {
    Call& call = *static_cast<Call*>(context);
    ++call.calls;
    for (int64_t i = 0; i < rows * call.width; ++i) call.out[i] = -call.x[i];
}

inline void other_ops(Builder& b, const Numbers& numbers) {
    constexpr int64_t HEADS = 2, DIM = 14, KV = HEADS * DIM, INNER = 50;
    float* x = b.embed(numbers, WIDTH, VOCAB, false);
    b.add(OP_ADD, {x, b.embed(numbers, WIDTH, MAX_IDS, true), x}, {WIDTH});
    float *q = b.rows(KV), *k = b.rows(KV), *v = b.rows(KV), *mixed = b.rows(KV), *y = b.rows(WIDTH);
    b.linear(b.layer_norm(x, WIDTH), {{b.matrices(numbers, KV, WIDTH), b.vector(KV), q, nullptr},
                                      {b.matrices(numbers, KV, WIDTH), b.vector(KV), k, nullptr},
                                      {b.matrices(numbers, KV, WIDTH), b.vector(KV), v, nullptr}});
    b.attention(numbers, mixed, q, k, v, HEADS, HEADS, DIM, 0);
    b.linear(mixed, {{b.matrices(numbers, WIDTH, KV, 2), nullptr, y, nullptr}});
    b.add(OP_ADD_VECTOR, {y, y, b.vector(WIDTH)}, {WIDTH});
    b.add(OP_SCALE, {y, y}, {WIDTH}, 0.7f);
    b.add(OP_ADD, {x, x, y}, {WIDTH});
    float *h = b.rows(INNER), *up = b.rows(INNER), *negated = b.rows(INNER);
    b.linear(b.layer_norm(x, WIDTH), {{b.matrices(numbers, INNER, WIDTH), nullptr, h, nullptr},
                                      {b.matrices(numbers, INNER, WIDTH), nullptr, up, nullptr}});
    b.add(OP_ACTIVATE, {h, h}, {INNER, FUNCTION_GELU});
    b.add(OP_MULTIPLY, {h, h, up}, {INNER});
    Call* call = b.memory.keep<Call>(1);
    *call = {h, negated, INNER, 0};
    const void* function;
    void (*address)(void*, int64_t) = negate;
    std::memcpy(&function, &address, sizeof function);
    b.add(OP_CALL, {function, call}, {});
    b.add(OP_ACTIVATE, {negated, negated}, {INNER, FUNCTION_RELU});
    b.linear(negated, {{b.matrices(numbers, WIDTH, INNER), nullptr, y, nullptr}});
    b.add(OP_SOFTCAP, {y, y}, {WIDTH}, 0.5f);
    b.add(OP_ADD, {x, x, y}, {WIDTH});
    b.add(OP_TAKE_COLUMNS, {y, up}, {WIDTH, INNER, 13});
    b.add(OP_ADD, {x, x, y}, {WIDTH});
    b.head(numbers, b.layer_norm(x, WIDTH), WIDTH, VOCAB);
}

// Which experts the rows select: any, never the last one, or the same two for all rows.
enum Choice { ANY, NOT_LAST, SAME };

constexpr int64_t EXPERTS = 5;

inline const Experts* last_mixture = nullptr;  // the mixture of the program that was built last; for complete()
inline std::atomic<int64_t> meetings{0};

// Experts::meet of a mixture that is split over two ranks: completes down_out as the second rank would (elsewhere).
inline void complete(void*, int64_t slots) {
    const Experts& e = *last_mixture;
    ++meetings;
    require(slots == e.begins[e.experts], "ranks exchange all rows of a pass");
    for (int64_t x = 0; x < e.experts; ++x) {
        const bool here = x >= e.first && x < e.first + e.held;
        for (int64_t i = e.begins[x] * e.width; i < e.begins[x + 1] * e.width; ++i) {
            e.down_out[i] = here ? 2 * e.down_out[i] : elsewhere(x, i % e.width);
        }
    }
}

// A mixture of experts on a rank that holds `held` experts from `first` on. limit: as in Experts.
inline void mixture(Builder& b, const Numbers& numbers, Choice choice, bool normalise, int64_t first = 0,
             int64_t held = EXPERTS, float limit = 0.0f) {
    constexpr int64_t TOP_K = 2, INNER = 32, ROOM = 4;
    float *x = b.embed(numbers, WIDTH, VOCAB, false), *scores = b.rows(EXPERTS), *out = b.rows(WIDTH);
    float* n = b.rms_norm(x, WIDTH);
    float* bias = b.vector(EXPERTS);
    if (choice == NOT_LAST) bias[EXPERTS - 1] = -100.0f;
    if (choice == SAME) bias[1] = bias[3] = 100.0f;
    b.linear(n, {{b.matrices(FLOAT, EXPERTS, WIDTH), bias, scores, nullptr}});
    int32_t* ids = b.memory.work<int32_t>(Builder::MAX_TOKENS * TOP_K);
    float* weights = b.rows(TOP_K);
    Routing* routing = b.memory.keep<Routing>(1);
    *routing = {EXPERTS, TOP_K, 1, 1, 1, SCORES_SOFTMAX, normalise, 1.0f, 0.0f, nullptr, b.vector(EXPERTS, 1.0f)};
    b.add(OP_ROUTE, {ids, weights, scores, b.memory.work<float>(route_room(EXPERTS) * b.threads), routing}, {});
    const int64_t slots = ROOM * TOP_K;
    Experts* e = b.memory.keep<Experts>(1);
    *e = {};
    e->experts = EXPERTS;
    e->first = first;
    e->held = held;
    last_mixture = e;
    if (held < EXPERTS) e->meet = complete;
    e->top_k = TOP_K;
    e->width = WIDTH;
    e->inner = INNER;
    e->at_once = ROOM;
    e->function = FUNCTION_SILU;
    e->limit = limit;
    e->gate = b.matrices(numbers, INNER, WIDTH, 1, held);
    e->up = b.matrices(numbers, INNER, WIDTH, 1, held);
    e->down = b.matrices(numbers, WIDTH, INNER, 1, held);
    e->begins = b.memory.work<int64_t>(EXPERTS + 1);
    e->slots = b.memory.work<int64_t>(slots);
    e->sources = b.memory.work<int64_t>(slots);
    e->activated =
        b.memory.work<uint8_t>(slots * kvasir_activated_bytes(numbers.format, numbers.activation, WIDTH, 1));
    e->gate_out = b.memory.work<float>(slots * INNER);
    e->up_out = b.memory.work<float>(slots * INNER);
    e->down_out = b.memory.work<float>(slots * WIDTH);
    b.add(OP_EXPERTS, {e, out, n, ids, weights}, {});
    b.add(OP_ADD, {x, x, out}, {WIDTH});
    b.head(numbers, b.rms_norm(x, WIDTH), WIDTH, VOCAB);
}

struct Case {
    const char* name;
    Numbers numbers;
    void (*build)(Builder& b, const Numbers& numbers);
    double tolerance;  // against float64, relative to the greatest value
};

const Case CASES[] = {
    {"decoder, float32", FLOAT, decoder, 2e-5},
    {"decoder, Q8_0", BYTES, decoder, 0.05},
    {"other ops, float32", FLOAT, other_ops, 2e-5},
    {"other ops, bfloat16", PAIRS, other_ops, 0.05},
    {"latent attention, float32", FLOAT, latent, 2e-5},
    {"latent attention, Q8_0", BYTES, latent, 0.05},
    {"latent attention, int8 cache", {FORMAT_F32, ACT_F32, CACHE_INT8}, latent, 0.05},
    {"mixture", FLOAT, [](Builder& b, const Numbers& n) { mixture(b, n, ANY, true); }, 2e-5},
    {"mixture, one expert unused", BYTES, [](Builder& b, const Numbers& n) { mixture(b, n, NOT_LAST, false); }, 0.05},
    {"mixture, two experts used", PAIRS, [](Builder& b, const Numbers& n) { mixture(b, n, SAME, true); }, 0.05},
    {"mixture, limited", FLOAT, [](Builder& b, const Numbers& n) { mixture(b, n, ANY, true, 0, EXPERTS, 0.3f); }, 2e-5},
    {"mixture, middle rank", FLOAT, [](Builder& b, const Numbers& n) { mixture(b, n, ANY, true, 1, 3); }, 2e-5},
    {"mixture, last rank", BYTES, [](Builder& b, const Numbers& n) { mixture(b, n, ANY, false, 3, 2); }, 0.05},
    {"mixture, idle rank", FLOAT, [](Builder& b, const Numbers& n) { mixture(b, n, SAME, true, 4, 1); }, 2e-5},
    {"adapters, float32", FLOAT, adapted_decoder, 2e-5},
    {"adapters, Q8_0", BYTES, adapted_decoder, 0.05},
    {"adapters, bfloat16", PAIRS, adapted_decoder, 0.05},
};

}  // namespace kvasir_test
