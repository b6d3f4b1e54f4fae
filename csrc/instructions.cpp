// Executes one instruction of a program: each thread's share of it.
#include "instructions.h"

#include <algorithm>
#include <cstring>

#include "dispatch.h"

namespace kvasir {
namespace {

template <typename T>
T* at(const void* pointer) {
    return const_cast<T*>(static_cast<const T*>(pointer));
}

// The adapters of an instruction's rows.
struct Adapting {
    const Adapters* all;
    const AdaptedRows* rows;
    const int64_t* slots;  // of its parts
    const float* x;
};

// The adapters of the section's rows, if they may change one of the slots.
Adapting adapting(const Program& p, const int64_t* slots, int64_t count, bool chosen, const float* x) {
    const AdaptedRows* rows = p.adapted ? chosen ? &p.adapters->chosen : &p.adapters->tokens : nullptr;
    if (!rows || !slots || !changes_any(*rows, slots, count)) return {};
    return {p.adapters, rows, slots, x};
}

void run_panels(const LinearPart& part, int64_t i, const Adapting& by, int64_t rows, int64_t first, int64_t last) {
    const auto product = kernels().linear;
    const Matrix& m = *part.matrix;
    if (!by.all) {
        return product(m, part.activated, rows, first, last, part.out, part.out_stride, part.bias, part.residual,
                       part.residual_stride);
    }
    // Bias and residual follow after the adapters.
    float* sums = product_of(*by.all, part);
    product(m, part.activated, rows, first, last, sums, part.out_stride, nullptr, nullptr, 0);
    if (by.slots[i] >= 0) replace_adapted(*by.rows, by.slots[i], by.x, sums, part.out_stride, first, last);
}

// Computes piece `index` of `count` of the panels of all parts. A panel's cost is its size in bytes, the sum `total`.
void run_piece(const Instr& in, const Adapting& by, int64_t rows, int64_t total, int64_t index, int64_t count) {
    const LinearPart* parts = at<LinearPart>(in.p[0]);
    const int64_t begin = total / count * index, end = index + 1 == count ? total : total / count * (index + 1);
    int64_t seen = 0;
    for (int64_t i = 0; i < in.n[0]; ++i) {
        const LinearPart& part = parts[i];
        const Matrix& m = *part.matrix;
        const int64_t bytes = panel_bytes(m), all = panels(m);
        // Pieces begin and end at pairs of panels; adjacent ones round their common boundary in the same way.
        const auto border = [&](int64_t cost) {
            const int64_t inside = cost - seen;
            if (inside <= 0) return int64_t{0};
            const int64_t pairs = (inside / bytes + 1) / 2 * 2;
            return pairs < all ? pairs : all;
        };
        const int64_t first = border(begin), last = end == total ? all : border(end);
        if (first < last) run_panels(part, i, by, rows, first, last);
        seen += all * bytes;
    }
}

// Computes this thread's pieces. Few rows are bound by the bandwidth of memory, which is best in one run for each thread.
void run_products(const Instr& in, const Adapting& by, int64_t rows, const Team& team) {
    constexpr int64_t DRAWN_FROM = 8, PIECES = 8;  // rows, and pieces for each thread
    const LinearPart* parts = at<LinearPart>(in.p[0]);
    int64_t total = 0;
    for (int64_t i = 0; i < in.n[0]; ++i) total += panels(*parts[i].matrix) * panel_bytes(*parts[i].matrix);
    if (rows < DRAWN_FROM || team.threads == 1) return run_piece(in, by, rows, total, team.thread, team.threads);
    const uint64_t number = team.next_draw();
    const int64_t count = PIECES * team.threads;
    for (int64_t i; (i = team.draw(number, count)) >= 0;) run_piece(in, by, rows, total, i, count);
}

// Adds bias and residual to this thread's rows of the products, in the order of the linear kernel.
void finish_products(const Instr& in, const Adapting& by, Range r) {
    const Kernels& k = kernels();
    for (int64_t i = 0; i < in.n[0]; ++i) {
        const LinearPart& part = at<LinearPart>(in.p[0])[i];
        const int64_t width = part.matrix->rows;
        for (int64_t row = r.begin; row < r.end; ++row) {
            float* sum = product_of(*by.all, part) + row * part.out_stride;
            const Vectors own = {part.bias, nullptr};
            const float* bias = by.slots[i] < 0 ? part.bias : vectors_of(*by.all, *by.rows, by.slots[i], row, own).first;
            if (bias) k.add(sum, sum, bias, width);
            if (part.residual) {
                k.add(part.out + row * part.out_stride, part.residual + row * part.residual_stride, sum, width);
            }
        }
    }
}

void run_linear(const Instr& in, const Program& p, int64_t rows, const Team& team) {
    const Adapting by = adapting(p, at<int64_t>(in.p[2]), in.n[0], in.n[1], at<float>(in.p[1]));
    const bool low_rank = by.all && !in.n[2] && shrink_adapted(*by.all, *by.rows, by.slots, in.n[0], by.x, true, team);
    run_products(in, by, rows, team);
    if (!by.all) return;
    const LinearPart* parts = at<LinearPart>(in.p[0]);
    if (low_rank) {
        team.barrier();
        expand_adapted(*by.all, *by.rows, parts, by.slots, in.n[0], team);
    }
    const auto finishes = [](const LinearPart& part) { return part.bias || part.residual; };
    if (!std::any_of(parts, parts + in.n[0], finishes)) return;
    team.barrier();
    finish_products(in, by, share(team, rows));
}

void run_rope(const Instr& in, const int64_t* positions, Range r) {
    const RopeTable& table = *at<RopeTable>(in.p[2]);
    for (int64_t row = r.begin; row < r.end; ++row) {
        const int64_t angle = positions[row] * in.n[2];
        kernels().rope(at<float>(in.p[0]) + row * in.n[4], in.n[4], at<float>(in.p[1]) + row * in.n[3], in.n[3],
                       table.cos + angle, table.sin + angle, in.n[2], 1, in.n[0], in.n[1], in.n[2]);
    }
}

void prepare_heads(const Instr& in, Range r) {
    const Matrix& m = *at<Matrix>(in.p[0]);
    const int64_t stride = in.n[0] * m.cols;
    for (int64_t head = 0; head < in.n[0]; ++head) {
        kernels().prepare(m, at<uint8_t>(in.p[1]) + head * in.n[1] + r.begin * activated_bytes(m),
                          at<float>(in.p[2]) + r.begin * stride + head * m.cols, stride, r.end - r.begin);
    }
}

void join(const Instr& in, Range r) {
    const int64_t a_width = in.n[1], b_width = in.n[2];
    for (int64_t i = r.begin * in.n[0]; i < r.end * in.n[0]; ++i) {
        float* out = at<float>(in.p[0]) + i * (a_width + b_width);
        std::memcpy(out, at<float>(in.p[1]) + i * a_width, static_cast<size_t>(a_width) * sizeof *out);
        std::memcpy(out + a_width, at<float>(in.p[2]) + i * b_width, static_cast<size_t>(b_width) * sizeof *out);
    }
}

void run_attention(const Instr& in, const Run& run, const Team& team) {
    const Program& p = *run.program;
    AttentionArgs args = *at<AttentionArgs>(in.p[0]);
    args.pieces = p.pieces;
    args.num_pieces = run.num_pieces;
    args.group = in.n[0];
    args.scratch = p.scratch;
    kernels().attention(args, team);
}

void run_delta(const Instr& in, const Run& run, const Team& team) {
    DeltaArgs args = *at<DeltaArgs>(in.p[0]);
    args.pieces = run.program->pieces;
    args.num_pieces = run.num_pieces;
    kernels().gated_delta(args, team);
}

void run_select(const Instr& in, const Run& run, const Team& team) {
    IndexArgs args = *at<IndexArgs>(in.p[0]);
    args.pieces = run.program->pieces;
    args.num_pieces = run.num_pieces;
    args.scratch = run.program->scratch;
    kernels().select_tokens(args, team);
}

void run_selected_attention(const Instr& in, const Run& run, const Team& team) {
    SelectedArgs args = *at<SelectedArgs>(in.p[0]);
    args.attention.pieces = run.program->pieces;
    args.attention.num_pieces = run.num_pieces;
    args.attention.group = in.n[0];
    args.attention.scratch = run.program->scratch;
    kernels().selected_attention(args, team);
}

void run_short_conv(const Instr& in, const Run& run, const Team& team) {
    ShortConvArgs args = *at<ShortConvArgs>(in.p[0]);
    args.pieces = run.program->pieces;
    args.num_pieces = run.num_pieces;
    kernels().short_conv(args, team);
}

void run_scan(const Instr& in, const Run& run, const Team& team) {
    if (in.op == OP_CONVOLUTION) {
        ConvolutionArgs args = *at<ConvolutionArgs>(in.p[0]);
        args.pieces = run.program->pieces;
        args.num_pieces = run.num_pieces;
        return kernels().causal_convolution(args, team);
    }
    ScanArgs args = *at<ScanArgs>(in.p[0]);
    args.conv.pieces = run.program->pieces;
    args.conv.num_pieces = run.num_pieces;
    kernels().selective_scan(args, team);
}

void run_wkv(const Instr& in, const Run& run, const Team& team) {
    if (in.op == OP_TOKEN_SHIFT) {
        ShiftArgs args = *at<ShiftArgs>(in.p[0]);
        args.pieces = run.program->pieces;
        args.num_pieces = run.num_pieces;
        return kernels().token_shift(args, team);
    }
    WkvArgs args = *at<WkvArgs>(in.p[0]);
    args.pieces = run.program->pieces;
    args.num_pieces = run.num_pieces;
    kernels().wkv(args, team);
}

void run_store(const Instr& in, const Run& run, Range r) {
    StoreArgs args = *at<StoreArgs>(in.p[0]);
    args.slots = run.program->slots[in.n[0]];
    args.rows = run.rows;
    kernels().store_kv(args, r.begin, r.end);
}

void run_sample(const Instr& in, const Run& run, const Team& team) {
    const Program& p = *run.program;
    SampleArgs args = {};
    args.logits = at<float>(in.p[0]);
    args.stride = args.vocab = in.n[0];
    args.rows = run.sampling - run.chosen_first < run.chosen ? run.sampling - run.chosen_first : run.chosen;
    args.specs = p.specs + run.chosen_first;
    args.results = p.results + run.chosen_first;
    args.scratch = p.scratch;
    args.dry_room = p.dry_room;
    args.dry_ids = p.dry_ids;
    kernels().sample(args, team);
    team.barrier();
    if (team.thread != 0) return;
    for (int64_t i = 0; i < args.rows; ++i) {
        const Sampled& sampled = args.results[i];
        const int32_t row = p.sampler_rows[run.chosen_first + i];
        if (!sampled.error && row >= 0) p.states[row].ids[args.specs[i].position] = sampled.token;
    }
}

void scale_parts(const Instr& in, Range r) {
    const int64_t parts = in.n[1] ? in.n[1] : 1, width = in.n[0] / parts;
    for (int64_t i = r.begin * parts; i < r.end * parts; ++i) {
        kernels().scale(at<float>(in.p[0]) + i * width, at<float>(in.p[1]) + i * width, at<float>(in.p[2])[i], width);
    }
}

void run_elementwise(const Instr& in, Range r) {
    const int64_t width = in.n[0], first = r.begin * width, count = (r.end - r.begin) * width;
    float* out = at<float>(in.p[0]) + first;
    const float* a = at<float>(in.p[1]) + first;
    const Kernels& k = kernels();
    switch (in.op) {
        case OP_ACTIVATE: return k.activate(static_cast<int32_t>(in.n[1]), out, a, count);
        case OP_GATED: return k.gated(static_cast<int32_t>(in.n[1]), out, a, at<float>(in.p[2]) + first, count);
        case OP_ADD: return k.add(out, a, at<float>(in.p[2]) + first, count);
        case OP_MULTIPLY: return k.multiply(out, a, at<float>(in.p[2]) + first, count);
        case OP_SCALE: return k.scale(out, a, in.f[0], count);
        case OP_SOFTCAP: return k.softcap(out, a, in.f[0], count);
        case OP_CLAMP: return k.clamp(out, a, in.f[0], in.f[1], count);
        case OP_XIELU: return k.xielu(out, a, at<float>(in.p[2]), count);
        case OP_SCALE_ROWS:
            return scale_parts(in, r);
        default:
            for (int64_t row = 0; row < r.end - r.begin; ++row) {
                k.add(out + row * width, a + row * width, at<float>(in.p[2]), width);
            }
    }
}

void run_embed(const Instr& in, const Program& p, Range r) {
    const Matrix& table = *at<Matrix>(in.p[0]);
    const int64_t* ids = in.n[1] ? p.positions : p.tokens;
    const int64_t width = in.n[0], first = in.n[2];
    float* out = at<float>(in.p[1]) + r.begin * width;
    if (!in.n[3]) kernels().lookup(table, out, width, ids + r.begin, r.end - r.begin);
    for (int64_t row = r.begin; in.n[3] && row < r.end; ++row, out += width) {
        int64_t id = ids[row] - first;
        if ((id < 0 || id >= table.rows) && in.n[3] == 2) id = 0;
        if (id >= 0 && id < table.rows) kernels().lookup(table, out, width, &id, 1);
        else std::memset(out, 0, static_cast<size_t>(width) * sizeof *out);
    }
    if (!p.adapted || !in.n[4]) return;
    change_lookup(*p.adapters, in.n[4] - 1, {first, table.rows}, ids, at<float>(in.p[1]), width, r.begin, r.end);
}

// Adds rows to all streams but the first.
void add_to_streams(const Instr& in, Range r) {
    const int64_t width = in.n[0], streams = in.n[1];
    for (int64_t row = r.begin; row < r.end; ++row) {
        float* out = at<float>(in.p[0]) + row * streams * width;
        const float* x = at<float>(in.p[1]) + row * streams * width;
        if (out != x) std::memcpy(out, x, static_cast<size_t>(width) * sizeof *out);
        for (int64_t s = 1; s < streams; ++s) {
            kernels().add(out + s * width, x + s * width, at<float>(in.p[2]) + row * width, width);
        }
    }
}

// Operations on whole rows of `width`, of one stream or of several.
void run_streams(const Instr& in, Range r) {
    const Kernels& k = kernels();
    const int64_t width = in.n[0], streams = in.n[1], count = r.end - r.begin, first = r.begin * width;
    float* out = at<float>(in.p[0]);
    const float *x = at<float>(in.p[1]), *y = at<float>(in.p[2]), *coefs = at<float>(in.p[3]);
    switch (in.op) {
        case OP_SCALE_COLUMNS:
            for (int64_t i = first; i < r.end * width; i += width) k.multiply(out + i, x + i, y, width);
            return;
        case OP_GAUSSIAN_CUT: return k.gaussian_cut(out + first, x + first, count, width, in.f[0]);
        case OP_MATCH: return k.match(out + first, x + first, y + first, count, width, in.f[0]);
        case OP_PREDICT:
            return k.predict_streams(out + first * streams, x + first * streams, y + r.begin * streams * streams, count,
                                     streams, width);
        case OP_CORRECT:
            return k.correct_streams(out + first * streams, x + first * streams, y + first, coefs + r.begin * streams,
                                     count, streams, width, in.n[2]);
        default: return add_to_streams(in, r);
    }
}

void rms_norm(const Instr& in, Range r, const float* weight) {
    for (int64_t h = 0; h < in.n[0]; ++h) {
        kernels().rms_norm(at<float>(in.p[0]) + r.begin * in.n[3] + h * in.n[1], in.n[3],
                           at<float>(in.p[1]) + r.begin * in.n[2] + h * in.n[1], in.n[2], weight + h * in.n[4],
                           r.end - r.begin, in.n[1], in.f[0]);
    }
}

void layer_norm(const Instr& in, Range r, const float* weight, const float* bias) {
    for (int64_t h = 0, stride = in.n[0] * in.n[1]; h < in.n[0]; ++h) {
        const int64_t first = r.begin * stride + h * in.n[1], by_head = weight ? h * in.n[2] : 0;
        kernels().layer_norm(at<float>(in.p[0]) + first, stride, at<float>(in.p[1]) + first, stride, weight + by_head,
                             bias + by_head, r.end - r.begin, in.n[1], in.f[0]);
    }
}

void run_norm(const Instr& in, const Program& p, Range r) {
    const bool layer = in.op == OP_LAYER_NORM;
    const auto run = [&](Range rows, Vectors v) {
        if (layer) layer_norm(in, rows, v.first, v.second);
        else rms_norm(in, rows, v.first);
    };
    const Vectors own = {at<float>(in.p[2]), at<float>(in.p[3])};
    const int64_t slot = in.n[layer ? 3 : 5] - 1;
    if (!p.adapted || slot < 0) return run(r, own);
    const AdaptedRows& rows = in.n[layer ? 4 : 6] ? p.adapters->chosen : p.adapters->tokens;
    for (int64_t row = r.begin; row < r.end;) {  // runs of rows with the same weights
        const Vectors v = vectors_of(*p.adapters, rows, slot, row, own);
        Range same = {row, row + 1};
        for (; same.end < r.end; ++same.end) {
            const Vectors next = vectors_of(*p.adapters, rows, slot, same.end, own);
            if (next.first != v.first || next.second != v.second) break;
        }
        run(same, v);
        row = same.end;
    }
}

void run_rows(const Instr& in, const Run& run, int64_t rows, const Team& team) {
    const Range r = share(team, rows);
    const int64_t count = r.end - r.begin;
    if (count <= 0) return;
    const Program& p = *run.program;
    const Kernels& k = kernels();
    switch (in.op) {
        case OP_EMBED: return run_embed(in, p, r);
        case OP_RMS_NORM:
        case OP_LAYER_NORM: return run_norm(in, p, r);
        case OP_PREPARE: {
            const Matrix& m = *at<Matrix>(in.p[0]);
            return k.prepare(m, at<uint8_t>(in.p[1]) + r.begin * activated_bytes(m),
                             at<float>(in.p[2]) + r.begin * in.n[0], in.n[0], count);
        }
        case OP_PREPARE_HEADS: return prepare_heads(in, r);
        case OP_JOIN: return join(in, r);
        case OP_ROPE: return run_rope(in, p.positions, r);
        case OP_STORE: return run_store(in, run, r);
        case OP_ROUTE: {
            const Routing& routing = *at<Routing>(in.p[4]);
            float* room = at<float>(in.p[3]) + team.thread * route_room(routing.experts);
            for (int64_t row = r.begin; row < r.end; ++row) {
                route_row(at<int32_t>(in.p[0]) + row * routing.top_k, at<float>(in.p[1]) + row * routing.top_k,
                          at<float>(in.p[2]) + row * routing.experts, routing, room);
            }
            return;
        }
        case OP_SCALE_COLUMNS:
        case OP_GAUSSIAN_CUT:
        case OP_MATCH:
        case OP_PREDICT:
        case OP_CORRECT:
        case OP_ADD_TO_STREAMS: return run_streams(in, r);
        case OP_TAKE_COLUMNS:
            for (int64_t row = r.begin; row < r.end; ++row) {
                std::memcpy(at<float>(in.p[0]) + row * in.n[0], at<float>(in.p[1]) + row * in.n[1] + in.n[2],
                            static_cast<size_t>(in.n[0]) * sizeof(float));
            }
            return;
        case OP_CHOOSE:
            for (int64_t row = r.begin; row < r.end; ++row) {
                const int64_t from = p.chosen[run.chosen_first + row];
                std::memcpy(at<float>(in.p[0]) + row * in.n[0], at<float>(in.p[1]) + from * in.n[0],
                            static_cast<size_t>(in.n[0]) * sizeof(float));
            }
            return;
        default: return run_elementwise(in, r);
    }
}

void run_moe(const Instr& in, const Program& p, int64_t rows, const Team& team) {
    const int64_t slots[] = {in.n[0] - 1, in.n[1] - 1, in.n[2] - 1};
    const bool changes = p.adapted && changes_any(p.adapters->tokens, slots, 3);
    run_experts(*at<Experts>(in.p[0]), at<float>(in.p[1]), at<float>(in.p[2]), at<int32_t>(in.p[3]), at<float>(in.p[4]),
                rows, {changes ? p.adapters : nullptr, slots}, team);
}

void run_call(const Instr& in, int64_t rows) {
    using Function = void (*)(void*, int64_t);
    Function function;
    std::memcpy(&function, &in.p[0], sizeof function);
    function(at<void>(in.p[1]), rows);
}

void run_meet(const Instr& in, const Program& p, int64_t rows, const Team& team) {
    const Meeting& m = *at<Meeting>(in.p[2]);
    float *out = at<float>(in.p[0]), *x = at<float>(in.p[1]);
    if (m.kind == MEET_COLUMNS) return meet_columns(m, out, x, rows, team);
    if (m.kind == MEET_PICK) return meet_pick(m, out, x, p.tokens, rows, team);
    meet_sum(m, out, x, rows, m.width, nullptr, team);
    if (!in.n[0] || !p.adapted) return;
    const Adapters& all = *p.adapters;
    meet_sum(m, all.inner, all.inner, all.tokens.count, all.rank, all.tokens.scales, team);
}

void run_adapt(const Instr& in, const Program& p, const Team& team) {
    if (!p.adapted) return;
    const Adapters& all = *p.adapters;
    if (in.op == OP_ADAPT_INNER) {
        shrink_adapted(all, all.tokens, in.n, 1, at<float>(in.p[0]), in.n[1], team);
        return;
    }
    LinearPart part = {};
    part.out = at<float>(in.p[0]);
    part.out_stride = in.n[1];
    expand_adapted(all, all.tokens, &part, in.n, 1, team);
}

}  // namespace

void run_instr(const Instr& in, const Run& run, int64_t rows, const Team& team) {
    switch (in.op) {
        case OP_LINEAR: return run_linear(in, *run.program, rows, team);
        case OP_ATTENTION: return run_attention(in, run, team);
        case OP_GATED_DELTA: return run_delta(in, run, team);
        case OP_SELECT: return run_select(in, run, team);
        case OP_SELECTED_ATTENTION: return run_selected_attention(in, run, team);
        case OP_SHORT_CONV: return run_short_conv(in, run, team);
        case OP_CONVOLUTION:
        case OP_SCAN: return run_scan(in, run, team);
        case OP_TOKEN_SHIFT:
        case OP_WKV: return run_wkv(in, run, team);
        case OP_EXPERTS:
            return run_moe(in, *run.program, rows, team);
        case OP_SAMPLE: return run.sampling > run.chosen_first ? run_sample(in, run, team) : void();
        case OP_ADAPT_INNER:
        case OP_ADAPT_ADD: return run_adapt(in, *run.program, team);
        case OP_MEET: return run_meet(in, *run.program, rows, team);
        case OP_CALL: return team.thread == 0 ? run_call(in, rows) : void();
        default: return run_rows(in, run, rows, team);
    }
}

}  // namespace kvasir
