// Programs built by hand, as kvasir/program/executor.py fills them, in memory that ends at forbidden pages; and the
// same instructions carried out plainly, in float64 and for a whole text at once.
#pragma once

#include <algorithm>
#include <map>
#include <memory>

#include "../kvasir_cpu.h"
#include "../program.h"
#include "check.h"

KVASIR_API int64_t kvasir_matrix_bytes(int32_t format, int64_t rows, int64_t cols, int32_t segments);
KVASIR_API int64_t kvasir_activated_bytes(int32_t format, int32_t activation, int64_t cols, int32_t segments);
KVASIR_API int32_t kvasir_pack(const kvasir::Matrix* m, int32_t source, const uint8_t* rows, int64_t row_bytes,
                               int64_t first_row, int64_t num_rows);
KVASIR_API void kvasir_lookup(const kvasir::Matrix* m, float* out, int64_t out_stride, const int64_t* ids,
                              int64_t count);
KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout);
KVASIR_API int64_t kvasir_attention_scratch(const kvasir::CacheLayout* layout, int32_t heads);
KVASIR_API int64_t kvasir_sample_scratch(int64_t vocab);

namespace kvasir_test {

using namespace kvasir;

constexpr uint8_t POISON = 0xff;  // NaN as floats, -1 as ids

// Arrays of exact sizes. Working ones are poisoned before each step, kept ones once.
class Memory {
  public:
    template <typename T>
    T* work(int64_t count) {
        return take<T>(count, working_);
    }
    template <typename T>
    T* keep(int64_t count) {
        return take<T>(count, kept_);
    }
    void poison() {
        for (Part& part : working_) std::memset(part.bytes->data, POISON, static_cast<size_t>(part.size));
    }
    std::vector<uint8_t> copy() const {
        std::vector<uint8_t> bytes;
        for (const std::vector<Part>* parts : {&working_, &kept_}) {
            for (const Part& p : *parts) bytes.insert(bytes.end(), p.bytes->data, p.bytes->data + p.size);
        }
        return bytes;
    }

  private:
    struct Part {
        std::unique_ptr<Guarded<uint8_t>> bytes;
        int64_t size;
    };
    template <typename T>
    T* take(int64_t count, std::vector<Part>& to) {
        const int64_t size = count * static_cast<int64_t>(sizeof(T));
        to.push_back({std::make_unique<Guarded<uint8_t>>(size), size});
        std::memset(to.back().bytes->data, POISON, static_cast<size_t>(size));
        return reinterpret_cast<T*>(to.back().bytes->data);
    }
    std::vector<Part> working_, kept_;
};

// How the matrices of a program hold their numbers, and its cache.
struct Numbers {
    int32_t format, activation, cache;
};
constexpr Numbers FLOAT = {FORMAT_F32, ACT_F32, CACHE_F32};
constexpr Numbers PAIRS = {FORMAT_BF16, ACT_BF16, CACHE_BF16};
constexpr Numbers BYTES = {FORMAT_Q8_0, ACT_Q8_32, CACHE_BF16};

struct Product {
    const Matrix* matrix;
    const float* bias;
    float* out;
    const float* residual;
};

struct Call {  // what a call out is given: out = -x
    const float* x;
    float* out;
    int64_t width, calls;
};

class Builder {
  public:
    static constexpr int64_t MAX_TOKENS = 40, MAX_CHOSEN = 2, MAX_ROWS = 5, BLOCK = 16, BLOCKS = 17;
    static constexpr int64_t GROUPS = 2;  // of layers: 0 sees all, 1 a window

    explicit Builder(int32_t team) : threads(team) {}

    // ---- memory

    Matrix* matrices(const Numbers& numbers, int64_t rows, int64_t cols, int32_t segments = 1, int64_t count = 1) {
        Matrix* all = memory.keep<Matrix>(count);
        for (int64_t i = 0; i < count; ++i) all[i] = packed(numbers, rows, cols, segments);
        return all;
    }
    float* vector(int64_t count, float centre = 0.0f) {
        float* to = memory.keep<float>(count);
        for (int64_t i = 0; i < count; ++i) to[i] = centre + 0.3f * normal(random);
        return to;
    }
    float* rows(int64_t width) {
        float* to = memory.work<float>((chosen_from < 0 ? MAX_TOKENS : MAX_CHOSEN) * width);
        widths[to] = width;
        return to;
    }

    // ---- instructions

    // Threads meet before what does not split the rows as the instruction before it.
    Instr& add(Op op, std::initializer_list<const void*> p, std::initializer_list<int64_t> n, float f = 0.0f) {
        Instr in = {};
        in.op = op;
        std::copy(p.begin(), p.end(), in.p);
        std::copy(n.begin(), n.end(), in.n);
        in.f[0] = f;
        const bool alike = !instrs.empty() && by_row(op) && by_row(instrs.back().op) && op != OP_CHOOSE;
        in.flags = alike || instrs.empty() ? 0 : BARRIER;
        instrs.push_back(in);
        return instrs.back();
    }
    float* embed(const Numbers& numbers, int64_t width, int64_t count, bool by_position) {
        float* out = rows(width);
        add(OP_EMBED, {matrices(numbers, count, width), out}, {width, by_position});
        return out;
    }
    float* rms_norm(const float* x, int64_t width) {
        float* out = rows(width);
        add(OP_RMS_NORM, {out, x, vector(width, 1.0f)}, {1, width, width, width}, 1e-6f);
        return out;
    }
    float* layer_norm(const float* x, int64_t width) {
        float* out = rows(width);
        add(OP_LAYER_NORM, {out, x, vector(width, 1.0f), vector(width)}, {width}, 1e-5f);
        return out;
    }
    void linear(const float* x, std::initializer_list<Product> products) {
        LinearPart* parts = memory.keep<LinearPart>(static_cast<int64_t>(products.size()));
        std::map<std::pair<int32_t, int32_t>, uint8_t*> prepared;  // by activation and segments
        int64_t count = 0;
        for (const Product& product : products) {
            const Matrix& m = *product.matrix;
            uint8_t*& activated = prepared[{m.activation, m.segments}];
            if (activated == nullptr) {
                const int64_t bytes = kvasir_activated_bytes(m.format, m.activation, m.cols, m.segments);
                activated = memory.work<uint8_t>((chosen_from < 0 ? MAX_TOKENS : MAX_CHOSEN) * bytes);
                add(OP_PREPARE, {&m, activated, x}, {m.cols});
            }
            parts[count++] = {&m, activated, product.out, m.rows, product.bias, product.residual, m.rows, -1};
        }
        add(OP_LINEAR, {parts, x}, {count});
    }
    // Attention of a layer with its own cache.
    void attention(const Numbers& numbers, float* out, float* q, float* k, float* v, int32_t heads, int32_t kv_heads,
                   int32_t dim, int64_t group) {
        const CacheLayout layout = {numbers.cache, kv_heads, dim, static_cast<int32_t>(BLOCK)};
        const int64_t bytes = kvasir_cache_block_bytes(&layout) * BLOCKS;
        uint8_t* keys = memory.keep<uint8_t>(bytes);
        uint8_t* values = memory.keep<uint8_t>(bytes);
        caches.push_back({keys, values, bytes / BLOCKS});
        StoreArgs* store = memory.keep<StoreArgs>(1);
        *store = {layout, keys, values, k, v, kv_heads * dim, kv_heads * dim, nullptr, 0};
        add(OP_STORE, {store}, {group});
        AttentionArgs* args = memory.keep<AttentionArgs>(1);
        *args = {};
        args->layout = layout;
        args->k = keys;
        args->v = values;
        args->q = q;
        args->out = out;
        args->q_stride = args->out_stride = heads * dim;
        args->heads = heads;
        args->window = static_cast<int32_t>(windows[group]);
        args->scale = 1.0f / std::sqrt(static_cast<float>(dim));
        args->sinks = group == 1 ? vector(heads) : nullptr;
        add(OP_ATTENTION, {args}, {group});
        scratch_bytes = std::max(scratch_bytes, kvasir_attention_scratch(&layout, heads));
    }
    float* rope(float* x, int64_t heads, int64_t dim, int64_t half, int64_t positions) {
        RopeTable* table = memory.keep<RopeTable>(1);
        float* cos = memory.keep<float>(positions * half);
        float* sin = memory.keep<float>(positions * half);
        for (int64_t i = 0; i < positions * half; ++i) {
            const double angle = static_cast<double>(i / half) / std::pow(100.0, static_cast<double>(i % half) / half);
            cos[i] = static_cast<float>(std::cos(angle));
            sin[i] = static_cast<float>(std::sin(angle));
        }
        *table = {cos, sin};
        add(OP_ROPE, {x, x, table}, {heads, dim, half, heads * dim, heads * dim});
        return x;
    }
    // The end of every program: logits of the chosen rows, and their tokens.
    void head(const Numbers& numbers, float* x, int64_t width, int64_t tokens) {
        hidden = x;
        hidden_width = width;
        vocab = tokens;
        chosen_from = static_cast<int64_t>(instrs.size());
        float* chosen = rows(width);
        add(OP_CHOOSE, {chosen, x}, {width});
        logits = rows(vocab);
        linear(chosen, {{matrices(numbers, vocab, width), nullptr, logits, nullptr}});
        add(OP_SCALE, {logits, logits}, {vocab}, 3.0f);
        add(OP_SAMPLE, {logits}, {vocab});
        scratch_bytes = std::max(scratch_bytes, kvasir_sample_scratch(vocab));
    }

    // The program of these instructions, with buffers for any step.
    Program program() {
        Program p = {};
        p.instrs = instrs.data();
        p.count = static_cast<int64_t>(instrs.size());
        p.chosen_from = chosen_from;
        p.max_tokens = MAX_TOKENS;
        p.max_chosen = MAX_CHOSEN;
        p.max_rows = MAX_ROWS;
        p.groups = GROUPS;
        p.block_size = BLOCK;
        p.tokens = memory.work<int64_t>(MAX_TOKENS);
        p.positions = memory.work<int64_t>(MAX_TOKENS);
        for (int64_t g = 0; g < GROUPS; ++g) {
            p.num_blocks[g] = BLOCKS;
            p.windows[g] = windows[g];
            p.slots[g] = memory.work<int64_t>(MAX_TOKENS);
        }
        p.pieces = memory.work<Piece>(MAX_ROWS);
        p.chosen = memory.work<int64_t>(MAX_ROWS);
        p.sampler_rows = memory.work<int32_t>(MAX_ROWS);
        p.specs = memory.work<SampleRow>(MAX_ROWS);
        p.states = memory.keep<RowState>(MAX_ROWS);
        std::memset(static_cast<void*>(p.states), 0, MAX_ROWS * sizeof *p.states);
        p.results = memory.work<Sampled>(MAX_ROWS);
        p.scratch_bytes = scratch_bytes;
        p.scratch = memory.work<uint8_t>(threads * scratch_bytes);
        return p;
    }

    struct Cache {
        uint8_t *k, *v;
        int64_t block_bytes;
    };

    const int32_t threads;
    Memory memory;
    std::vector<Instr> instrs;
    std::vector<Cache> caches;
    std::map<const void*, int64_t> widths;  // of buffers
    int64_t windows[GROUPS] = {0, 20};
    int64_t chosen_from = -1, vocab = 0, hidden_width = 0, scratch_bytes = 64;
    float *hidden = nullptr, *logits = nullptr;
    std::mt19937 random{11};
    std::normal_distribution<float> normal;

  private:
    static bool by_row(int32_t op) {
        return op != OP_LINEAR && op != OP_ATTENTION && op != OP_SAMPLE && op != OP_EXPERTS && op != OP_CALL;
    }
    Matrix packed(const Numbers& numbers, int64_t rows, int64_t cols, int32_t segments) {
        const int64_t bytes = kvasir_matrix_bytes(numbers.format, rows, cols, segments);
        uint8_t* data = memory.keep<uint8_t>(bytes);
        const Matrix m = {numbers.format, numbers.activation, segments, 0, rows, cols, data};
        const bool blocks = numbers.format == FORMAT_Q8_0;  // 32 bytes under a float16, from 2^-9 on
        const int64_t row_bytes = blocks ? cols / 32 * 34 : cols * 4;
        std::vector<uint8_t> file(static_cast<size_t>(rows * row_bytes));
        for (int64_t i = 0; i < rows * row_bytes; ++i) file[static_cast<size_t>(i)] = static_cast<uint8_t>(random());
        for (size_t i = 1; blocks && i < file.size(); i += 34) file[i] = 6 << 2;
        const float size = 1.0f / std::sqrt(static_cast<float>(cols));
        for (size_t i = 0; !blocks && i < file.size(); i += 4) {
            const float value = size * normal(random);
            std::memcpy(&file[i], &value, sizeof value);
        }
        require(kvasir_pack(&m, blocks ? 8 : 0, file.data(), row_bytes, 0, rows) == 0, "pack");
        return m;
    }
};

// A program's instructions over a whole text, each written out from its description in program.h and experts.h.
class Plain {
  public:
    using Rows = std::vector<double>;  // [tokens, width]

    Plain(const Builder& b, const int32_t* ids, int64_t count, bool causal)
        : builder_(b), ids_(ids), count_(count), causal_(causal) {
        for (const Instr& in : b.instrs) run(in);
    }
    const Rows& hidden() { return rows_[builder_.hidden]; }
    const Rows& logits() { return rows_[builder_.logits]; }

  private:
    // out[row] = f of row r
    template <typename F>
    void by_row(const void* out, int64_t width, F f) {
        Rows made(static_cast<size_t>(count_ * width));
        for (int64_t r = 0; r < count_; ++r) f(r, &made[static_cast<size_t>(r * width)]);
        rows_[out] = made;
    }
    template <typename F>
    void each(const Instr& in, F f) {
        const Rows a = rows_[in.p[1]], b = rows_[in.p[2]];
        by_row(in.p[0], in.n[0], [&](int64_t r, double* out) {
            for (int64_t i = 0; i < in.n[0]; ++i) {
                const size_t at = static_cast<size_t>(r * in.n[0] + i);
                out[i] = f(a[at], b.empty() ? 0.0 : b[at], i);
            }
        });
    }
    const double* row(const void* x, int64_t r) {
        const Rows& all = rows_.at(x);
        return &all[all.size() / static_cast<size_t>(count_) * static_cast<size_t>(r)];
    }
    static const float* floats(const void* p) { return static_cast<const float*>(p); }

    const float* weights(const Matrix* m) {
        std::vector<float>& values = weights_[m];
        if (values.empty()) {
            values.resize(static_cast<size_t>(m->rows * m->cols));
            std::vector<int64_t> all(static_cast<size_t>(m->rows));
            for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
            kvasir_lookup(m, values.data(), m->cols, all.data(), m->rows);
        }
        return values.data();
    }
    Rows product(const Matrix* m, const double* x) {
        Rows out(static_cast<size_t>(m->rows));
        const float* w = weights(m);
        for (int64_t n = 0; n < m->rows; ++n) {
            for (int64_t k = 0; k < m->cols; ++k) out[static_cast<size_t>(n)] += x[k] * w[n * m->cols + k];
        }
        return out;
    }
    static double activated(int64_t function, double x) {
        switch (function) {
            case FUNCTION_SILU: return x / (1 + std::exp(-x));
            case FUNCTION_GELU: return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
            case FUNCTION_RELU: return x > 0 ? x : 0;
            default: return x;
        }
    }

    void run(const Instr& in) {
        switch (in.op) {
            case OP_EMBED: return embed(in);
            case OP_RMS_NORM: return norm(in, in.n[0], in.n[1], true);
            case OP_LAYER_NORM: return norm(in, 1, in.n[0], false);
            case OP_PREPARE: rows_[in.p[1]] = rows_.at(in.p[2]); return;
            case OP_LINEAR: return linear(in);
            case OP_ROPE: return rope(in);
            case OP_STORE: return store(*static_cast<const StoreArgs*>(in.p[0]));
            case OP_ATTENTION: return attention(*static_cast<const AttentionArgs*>(in.p[0]));
            case OP_ACTIVATE: return each(in, [&](double a, double, int64_t) { return activated(in.n[1], a); });
            case OP_GATED: return each(in, [&](double a, double b, int64_t) { return activated(in.n[1], a) * b; });
            case OP_ADD: return each(in, [](double a, double b, int64_t) { return a + b; });
            case OP_MULTIPLY: return each(in, [](double a, double b, int64_t) { return a * b; });
            case OP_ADD_VECTOR: return each(in, [&](double a, double, int64_t i) { return a + floats(in.p[2])[i]; });
            case OP_SCALE: return each(in, [&](double a, double, int64_t) { return a * in.f[0]; });
            case OP_SOFTCAP:
                return each(in, [&](double a, double, int64_t) { return in.f[0] * std::tanh(a / in.f[0]); });
            case OP_CHOOSE: rows_[in.p[0]] = rows_.at(in.p[1]); return;
            case OP_SAMPLE: return;
            case OP_ROUTE: return route(in);
            case OP_EXPERTS: return experts(in);
            case OP_CALL: return call(*static_cast<const Call*>(in.p[1]));
            default: require(false, "an instruction is known");
        }
    }

    void embed(const Instr& in) {
        const float* table = weights(static_cast<const Matrix*>(in.p[0]));
        by_row(in.p[1], in.n[0], [&](int64_t r, double* out) {
            const float* from = table + (in.n[1] ? r : ids_[r]) * in.n[0];
            std::copy(from, from + in.n[0], out);
        });
    }
    void norm(const Instr& in, int64_t heads, int64_t width, bool rms) {
        const Rows x = rows_.at(in.p[1]);
        by_row(in.p[0], heads * width, [&](int64_t r, double* out) {
            for (int64_t h = 0; h < heads; ++h) {
                const double* a = &x[static_cast<size_t>((r * heads + h) * width)];
                double mean = 0, square = 0;
                for (int64_t i = 0; i < width && !rms; ++i) mean += a[i];
                mean /= static_cast<double>(width);
                for (int64_t i = 0; i < width; ++i) square += (a[i] - mean) * (a[i] - mean);
                square /= static_cast<double>(width);
                for (int64_t i = 0; i < width; ++i) {
                    out[h * width + i] = (a[i] - mean) / std::sqrt(square + in.f[0]) * floats(in.p[2])[i];
                    if (!rms) out[h * width + i] += floats(in.p[3])[i];
                }
            }
        });
    }
    void linear(const Instr& in) {
        const LinearPart* parts = static_cast<const LinearPart*>(in.p[0]);
        for (int64_t i = 0; i < in.n[0]; ++i) {
            const LinearPart& part = parts[i];
            const Rows residual = part.residual ? rows_.at(part.residual) : Rows();
            by_row(part.out, part.out_stride, [&](int64_t r, double* out) {
                const Rows made = product(part.matrix, row(part.activated, r));
                for (int64_t n = 0; n < part.matrix->rows; ++n) {
                    out[n] = made[static_cast<size_t>(n)] + (part.bias ? part.bias[n] : 0.0f);
                    if (part.residual) out[n] += residual[static_cast<size_t>(r * part.residual_stride + n)];
                }
            });
        }
    }
    void rope(const Instr& in) {
        const RopeTable& table = *static_cast<const RopeTable*>(in.p[2]);
        const Rows x = rows_.at(in.p[1]);
        const int64_t heads = in.n[0], dim = in.n[1], half = in.n[2];
        by_row(in.p[0], heads * dim, [&](int64_t r, double* out) {
            for (int64_t i = 0; i < heads * dim; ++i) {
                const double* a = &x[static_cast<size_t>(r * heads * dim + i / dim * dim)];
                const int64_t d = i % dim, angle = r * half + d % half;
                out[i] = d < half       ? a[d] * table.cos[angle] - a[d + half] * table.sin[angle]
                         : d < 2 * half ? a[d] * table.cos[angle] + a[d - half] * table.sin[angle]
                                        : a[d];
            }
        });
    }
    void store(const StoreArgs& args) {
        rows_[args.k] = rows_.at(args.k_rows);
        rows_[args.v] = rows_.at(args.v_rows);
    }
    void attention(const AttentionArgs& args) {
        const int64_t dim = args.layout.head_dim, group = args.heads / args.layout.kv_heads;
        by_row(args.out, args.heads * dim, [&](int64_t r, double* out) {
            for (int64_t h = 0; h < args.heads; ++h, out += dim) {
                const int64_t first = args.window && r >= args.window ? r - args.window + 1 : 0;
                double sum = args.sinks ? std::exp(static_cast<double>(args.sinks[h])) : 0.0;
                for (int64_t j = first; j < (causal_ ? r + 1 : count_); ++j) {
                    const double* q = row(args.q, r) + h * dim;
                    const double* k = row(args.k, j) + h / group * dim;
                    double score = 0;
                    for (int64_t i = 0; i < dim; ++i) score += q[i] * k[i];
                    const double weight = std::exp(score * args.scale);
                    sum += weight;
                    for (int64_t i = 0; i < dim; ++i) out[i] += weight * row(args.v, j)[h / group * dim + i];
                }
                for (int64_t i = 0; i < dim; ++i) out[i] /= sum;
            }
        });
    }
    void route(const Instr& in) {
        const int64_t experts = in.n[0], top_k = in.n[1];
        by_row(in.p[0], top_k, [&](int64_t r, double* out) {
            const double* logits = row(in.p[2], r);
            std::vector<int64_t> ids(static_cast<size_t>(experts));
            for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
            std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
            std::sort(ids.begin(), ids.begin() + top_k);
            std::copy(ids.begin(), ids.begin() + top_k, out);
        });
        by_row(in.p[1], top_k, [&](int64_t r, double* out) {
            double sum = 0;
            const double* ids = row(in.p[0], r);
            for (int64_t j = 0; j < top_k; ++j) out[j] = std::exp(row(in.p[2], r)[static_cast<int64_t>(ids[j])]);
            for (int64_t x = 0; x < experts && !in.n[2]; ++x) sum += std::exp(row(in.p[2], r)[x]);
            for (int64_t j = 0; j < top_k && in.n[2]; ++j) sum += out[j];
            for (int64_t j = 0; j < top_k; ++j) out[j] /= sum;
        });
    }
    void experts(const Instr& in) {
        const Experts& e = *static_cast<const Experts*>(in.p[0]);
        by_row(in.p[1], e.width, [&](int64_t r, double* out) {
            for (int64_t j = 0; j < e.top_k; ++j) {
                const int64_t x = static_cast<int64_t>(row(in.p[3], r)[j]);
                Rows gate = product(e.gate + x, row(in.p[2], r));
                const Rows up = product(e.up + x, row(in.p[2], r));
                for (size_t i = 0; i < gate.size(); ++i) gate[i] = activated(e.function, gate[i]) * up[i];
                const Rows down = product(e.down + x, gate.data());
                for (int64_t i = 0; i < e.width; ++i) out[i] += row(in.p[4], r)[j] * down[static_cast<size_t>(i)];
            }
        });
    }
    void call(const Call& call) {
        by_row(call.out, call.width, [&](int64_t r, double* out) {
            for (int64_t i = 0; i < call.width; ++i) out[i] = -row(call.x, r)[i];
        });
    }

    const Builder& builder_;
    const int32_t* ids_;
    const int64_t count_;
    const bool causal_;
    std::map<const void*, Rows> rows_;  // by where the program keeps them
    std::map<const Matrix*, std::vector<float>> weights_;
};

}  // namespace kvasir_test
