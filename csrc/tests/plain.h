// A reference interpreter of programs: plain float64 code over a whole sequence at once.
#pragma once

#include "programs.h"

namespace kvasir_test {

// The simulated second rank's output for an expert that this rank does not hold. For the experts of this rank, the
// second rank adds the same sum once more.
inline float elsewhere(int64_t expert, int64_t column) {
    return 0.25f * static_cast<float>(expert + 1) - 0.125f * static_cast<float>(column % 5);
}

// Interprets a program's instructions over a whole sequence, each as described in program.h and experts.h.
class Plain {
  public:
    using Rows = std::vector<double>;  // [tokens, width]

    Plain(const Builder& b, const int32_t* ids, int64_t count, bool causal, const RowState* state = nullptr)
        : builder_(b), ids_(ids), count_(count), causal_(causal), state_(state) {
        for (const Instr& in : b.instrs) run(in);
    }
    const Rows& hidden() { return rows_[builder_.hidden]; }
    const Rows& logits() { return rows_[builder_.logits]; }

  private:
    // Computes all rows of `out` [tokens, width]: f(r, row) writes row r.
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
            case OP_LAYER_NORM: return norm(in, in.n[0], in.n[1], false);
            case OP_PREPARE: rows_[in.p[1]] = rows_.at(in.p[2]); return;
            case OP_PREPARE_HEADS: return prepare_heads(in);
            case OP_LINEAR: return linear(in);
            case OP_JOIN: return join(in);
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
            case OP_TAKE_COLUMNS: return take_columns(in);
            case OP_CLAMP:
                return each(in, [&](double a, double, int64_t) { return std::clamp<double>(a, in.f[0], in.f[1]); });
            case OP_CHOOSE: rows_[in.p[0]] = rows_.at(in.p[1]); return;
            case OP_SAMPLE: return;
            case OP_ROUTE: return route(in);
            case OP_EXPERTS: return experts(in);
            case OP_CALL: return call(*static_cast<const Call*>(in.p[1]));
            case OP_ADAPT_INNER: inner_of_ = rows_.at(in.p[0]); return;
            case OP_ADAPT_ADD: return adapt_add(in);
            default: require(false, "an instruction is supported");
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
                    const int64_t at = rms ? i : h * in.n[2] + i;
                    out[h * width + i] = (a[i] - mean) / std::sqrt(square + in.f[0]) * (in.p[2] ? floats(in.p[2])[at] : 1.0f);
                    if (!rms) out[h * width + i] += floats(in.p[3])[at];
                }
            }
        });
    }
    void prepare_heads(const Instr& in) {
        const int64_t heads = in.n[0], width = static_cast<const Matrix*>(in.p[0])->cols;
        for (int64_t h = 0; h < heads; ++h) {
            by_row(static_cast<const uint8_t*>(in.p[1]) + h * in.n[1], width, [&](int64_t r, double* out) {
                std::copy_n(row(in.p[2], r) + h * width, width, out);
            });
        }
    }
    void join(const Instr& in) {
        const int64_t heads = in.n[0], a = in.n[1], b = in.n[2];
        by_row(in.p[0], heads * (a + b), [&](int64_t r, double* out) {
            for (int64_t h = 0; h < heads; ++h, out += a + b) {
                std::copy_n(row(in.p[1], r) + h * a, a, out);
                std::copy_n(row(in.p[2], r) + h * b, b, out + a);
            }
        });
    }
    // Products that write columns of one buffer: the matrices of heads.
    void columns(const LinearPart* parts, int64_t count) {
        by_row(parts[0].out, parts[0].out_stride, [&](int64_t r, double* out) {
            for (int64_t i = 0; i < count; ++i) {
                const Rows made = product(parts[i].matrix, row(parts[i].activated, r));
                std::copy(made.begin(), made.end(), out + (parts[i].out - parts[0].out));
            }
        });
    }
    void linear(const Instr& in) {
        const LinearPart* parts = static_cast<const LinearPart*>(in.p[0]);
        const int64_t* slots = static_cast<const int64_t*>(in.p[2]);
        if (parts[0].out_stride > parts[0].matrix->rows) return columns(parts, in.n[0]);
        for (int64_t i = 0; i < in.n[0]; ++i) {
            const LinearPart& part = parts[i];
            const Rows residual = part.residual ? rows_.at(part.residual) : Rows();
            by_row(part.out, part.out_stride, [&](int64_t r, double* out) {
                Rows made = product(part.matrix, row(part.activated, r));
                if (slots && slots[i] >= 0) {
                    replace(slots[i], row(in.p[1], r), made, r);
                    adapt(slots[i], row(in.p[1], r), made.data(), r);
                }
                for (int64_t n = 0; n < part.matrix->rows; ++n) {
                    out[n] = made[static_cast<size_t>(n)] + (part.bias ? part.bias[n] : 0.0f);
                    if (part.residual) out[n] += residual[static_cast<size_t>(r * part.residual_stride + n)];
                }
            });
        }
    }
    // Replaces rows of a slot's matrix by those of the sequence's adapters at a position.
    void replace(int64_t slot, const double* x, Rows& out, int64_t position) {
        for (int64_t i = 0; state_ && i < state_->num_adapters; ++i) {
            const Applied& applied = state_->adapters[i];
            const LowRank& change = builder_.adapters->tables[applied.id][slot];
            if (applied.start > position) continue;
            if (change.replacement) out = product(change.replacement, x);
            if (!change.rows) continue;
            const Rows made = product(change.rows, x);
            for (size_t n = 0; n < made.size(); ++n) out[static_cast<size_t>(change.ids[n])] = made[n];
        }
    }
    // Applies the sequence's adapters to a slot's product at a position.
    void adapt(int64_t slot, const double* x, double* out, int64_t position) {
        for (int64_t i = 0; state_ && i < state_->num_adapters; ++i) {
            const Applied& applied = state_->adapters[i];
            const LowRank& change = builder_.adapters->tables[applied.id][slot];
            if (change.a == nullptr || applied.start > position) continue;
            const Rows more = product(change.b, product(change.a, x).data());
            for (size_t n = 0; n < more.size(); ++n) {
                out[n] += applied.scale * (more[n] + (change.bias ? change.bias[n] : 0.0));
                if (change.factors) out[n] *= change.factors[n];
            }
        }
    }
    void adapt_add(const Instr& in) {
        const size_t width = inner_of_.size() / static_cast<size_t>(count_);
        double* out = rows_.at(in.p[0]).data();
        for (int64_t r = 0; r < count_; ++r) {
            adapt(in.n[0], &inner_of_[static_cast<size_t>(r) * width], out + r * in.n[1], r);
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
        const int64_t value_dim = args.layout.value_dim ? args.layout.value_dim : dim;
        const int64_t values = args.layout.latent ? dim : value_dim;  // from one KV head's values to the next's
        by_row(args.out, args.heads * value_dim, [&](int64_t r, double* out) {
            for (int64_t h = 0; h < args.heads; ++h, out += value_dim) {
                const int64_t first = args.window && r >= args.window ? r - args.window + 1 : 0;
                double sum = args.sinks ? std::exp(static_cast<double>(args.sinks[h])) : 0.0;
                for (int64_t j = first; j < (causal_ ? r + 1 : count_); ++j) {
                    const double* q = row(args.q, r) + h * dim;
                    const double* k = row(args.k, j) + h / group * dim;
                    double score = 0;
                    for (int64_t i = 0; i < dim; ++i) score += q[i] * k[i];
                    const double weight = std::exp(score * args.scale);
                    sum += weight;
                    const double* v = row(args.v, j) + h / group * values;
                    for (int64_t i = 0; i < value_dim; ++i) out[i] += weight * v[i];
                }
                for (int64_t i = 0; i < value_dim; ++i) out[i] /= sum;
            }
        });
    }
    void take_columns(const Instr& in) {
        by_row(in.p[0], in.n[0], [&](int64_t r, double* out) {
            const double* from = row(in.p[1], r) + in.n[2];
            std::copy(from, from + in.n[0], out);
        });
    }
    void route(const Instr& in) {
        const Routing& routing = *static_cast<const Routing*>(in.p[4]);
        const int64_t experts = routing.experts, top_k = routing.top_k;
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
            for (int64_t x = 0; x < experts && !routing.normalise; ++x) sum += std::exp(row(in.p[2], r)[x]);
            for (int64_t j = 0; j < top_k && routing.normalise; ++j) sum += out[j];
            for (int64_t j = 0; j < top_k; ++j) out[j] *= routing.scales[static_cast<int64_t>(ids[j])] / sum;
        });
    }
    void experts(const Instr& in) {
        const Experts& e = *static_cast<const Experts*>(in.p[0]);
        by_row(in.p[1], e.width, [&](int64_t r, double* out) {
            for (int64_t j = 0; j < e.top_k; ++j) {
                const int64_t x = static_cast<int64_t>(row(in.p[3], r)[j]);
                const double weight = row(in.p[4], r)[j];
                if (x < e.first || x >= e.first + e.held) {
                    for (int64_t i = 0; i < e.width; ++i) out[i] += weight * elsewhere(x, i);
                    continue;
                }
                Rows gate = product(e.gate + x - e.first, row(in.p[2], r));
                const Rows up = product(e.up + x - e.first, row(in.p[2], r));
                const double most = e.limit > 0.0f ? e.limit : HUGE_VAL;
                for (size_t i = 0; i < gate.size(); ++i) {
                    gate[i] = std::min(activated(e.function, gate[i]), most) * std::max(-most, std::min(up[i], most));
                }
                const Rows down = product(e.down + x - e.first, gate.data());
                const double parts = e.meet ? 2 : 1;
                for (int64_t i = 0; i < e.width; ++i) out[i] += weight * parts * down[static_cast<size_t>(i)];
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
    const RowState* state_;  // with the sequence's adapters, or null
    Rows inner_of_;  // the input rows of the last OP_ADAPT_INNER
    std::map<const void*, Rows> rows_;  // by the address of the program's buffer
    std::map<const Matrix*, std::vector<float>> weights_;
};

}  // namespace kvasir_test
