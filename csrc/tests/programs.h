// Builds programs by hand, in the form that kvasir/program/marshal.py produces, in memory that ends at inaccessible
// pages.
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
KVASIR_API int64_t kvasir_cache_block_bytes(const kvasir::CacheLayout* layout, int32_t values);
KVASIR_API int64_t kvasir_attention_scratch(const kvasir::CacheLayout* layout, int32_t heads);
KVASIR_API int64_t kvasir_sample_scratch(int64_t vocab);

namespace kvasir_test {

using namespace kvasir;

constexpr uint8_t POISON = 0xff;  // NaN as floats, -1 as ids

// Allocates arrays of exact sizes. Working arrays are poisoned before each step, kept arrays only once.
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

// The formats of a program's matrices, activations and cache.
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
    bool adapted = false;  // adapters may change it
};

struct Call {  // the context of OP_CALL in these programs: out = -x
    const float* x;
    float* out;
    int64_t width, calls;
};

class Builder {
  public:
    static constexpr int64_t MAX_TOKENS = 40, MAX_CHOSEN = 2, MAX_ROWS = 5, BLOCK = 16, BLOCKS = 17;
    static constexpr int64_t MAX_SAMPLED = 25, MAX_IDS = 64;
    static constexpr int64_t GROUPS = 2;  // cache groups: 0 has full attention, 1 a window
    static constexpr int64_t ADAPTERS = 4, RANK = 16;

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

    // Sets BARRIER unless this instruction and the previous one split the rows in the same way.
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
    // Of each head by itself, with its own weights.
    float* layer_norm(const float* x, int64_t width, int64_t heads = 1) {
        float* out = rows(width);
        add(OP_LAYER_NORM, {out, x, vector(width, 1.0f), vector(width)}, {heads, width / heads, width / heads}, 1e-5f);
        return out;
    }
    void linear(const float* x, std::initializer_list<Product> products) {
        LinearPart* parts = memory.keep<LinearPart>(static_cast<int64_t>(products.size()));
        int64_t* places = memory.keep<int64_t>(static_cast<int64_t>(products.size()));
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
            places[count] = product.adapted ? slot_of(m) : -1;
            parts[count++] = {&m, activated, product.out, m.rows, product.bias, product.residual, m.rows};
        }
        widest_linear = std::max(widest_linear, count);
        const bool adapted = std::any_of(places, places + count, [](int64_t slot) { return slot >= 0; });
        add(OP_LINEAR, {parts, x, adapted ? places : nullptr}, {count, chosen_from >= 0});
    }
    // out [heads, rows of a matrix] = each head of x times its own matrix.
    void head_linear(const Matrix* matrices, int64_t heads, const float* x, float* out) {
        const Matrix& m = matrices[0];
        const int64_t bytes = MAX_TOKENS * kvasir_activated_bytes(m.format, m.activation, m.cols, m.segments);
        uint8_t* activated = memory.work<uint8_t>(heads * bytes);
        add(OP_PREPARE_HEADS, {&m, activated, x}, {heads, bytes});
        LinearPart* parts = memory.keep<LinearPart>(heads);
        for (int64_t h = 0; h < heads; ++h) {
            parts[h] = {matrices + h, activated + h * bytes, out + h * m.rows, heads * m.rows, nullptr, nullptr, 0};
        }
        add(OP_LINEAR, {parts, x, nullptr}, {heads});
    }
    int64_t slot_of(const Matrix& m) {
        slots.push_back(&m);
        return static_cast<int64_t>(slots.size()) - 1;
    }
    // The adapter's sum as separate instructions, between which ranks would exchange partial sums.
    void adapt(const float* x, float* out, const Matrix& m) {
        const int64_t slot = slot_of(m);
        apart.push_back(slot);
        add(OP_ADAPT_INNER, {x}, {slot, 1});
        add(OP_ADAPT_ADD, {out}, {slot, m.rows});
    }
    // The attention of a layer, with its own cache.
    void attention(const Numbers& numbers, float* out, float* q, float* k, float* v, int32_t heads, int32_t kv_heads,
                   int32_t dim, int64_t group, int32_t latent_value = 0) {
        const bool latent = latent_value > 0;
        const CacheLayout layout = {numbers.cache, kv_heads, dim, static_cast<int32_t>(BLOCK), latent_value, latent};
        const int64_t k_bytes = kvasir_cache_block_bytes(&layout, 0), v_bytes = kvasir_cache_block_bytes(&layout, 1);
        uint8_t* keys = memory.keep<uint8_t>(k_bytes * BLOCKS);
        uint8_t* values = memory.keep<uint8_t>(v_bytes * BLOCKS);
        caches.push_back({keys, k_bytes});
        caches.push_back({values, v_bytes});
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
        args->q_stride = heads * dim;
        args->out_stride = heads * (latent ? latent_value : dim);
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
    // The end of every program: the logits of the chosen rows, and sampling.
    void head(const Numbers& numbers, float* x, int64_t width, int64_t tokens, bool adapted = false) {
        hidden = x;
        hidden_width = width;
        vocab = tokens;
        chosen_from = static_cast<int64_t>(instrs.size());
        float* chosen = rows(width);
        add(OP_CHOOSE, {chosen, x}, {width});
        logits = rows(vocab);
        linear(chosen, {{matrices(numbers, vocab, width), nullptr, logits, nullptr, adapted}});
        add(OP_SCALE, {logits, logits}, {vocab}, 3.0f);
        add(OP_SAMPLE, {logits}, {vocab});
        scratch_bytes = std::max(scratch_bytes, kvasir_sample_scratch(vocab));
    }

    // The program of these instructions, with buffers for steps of any size.
    Program program() {
        Program p = {};
        p.instrs = instrs.data();
        p.count = static_cast<int64_t>(instrs.size());
        p.chosen_from = chosen_from;
        p.max_tokens = MAX_TOKENS;
        p.max_chosen = MAX_CHOSEN;
        p.max_rows = MAX_ROWS;
        p.max_sampled = MAX_SAMPLED;
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
        p.chosen = memory.work<int64_t>(MAX_SAMPLED);
        p.sampler_rows = memory.work<int32_t>(MAX_SAMPLED);
        p.specs = memory.work<SampleRow>(MAX_SAMPLED);
        p.states = memory.keep<RowState>(MAX_ROWS);
        std::memset(static_cast<void*>(p.states), 0, MAX_ROWS * sizeof *p.states);
        p.results = memory.work<Sampled>(MAX_SAMPLED);
        p.dry_ids = MAX_IDS;
        p.dry_room = memory.work<int32_t>(threads * MAX_IDS);
        p.scratch_bytes = scratch_bytes;
        p.scratch = memory.work<uint8_t>(threads * scratch_bytes);
        if (!slots.empty()) p.adapters = adapters = make_adapters();
        return p;
    }

    struct Cache {
        uint8_t* blocks;
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
    std::vector<const Matrix*> slots;  // that adapters may change
    std::vector<int64_t> apart;  // those whose changes are instructions of their own
    Adapters* adapters = nullptr;
    std::mt19937 random{11};
    std::normal_distribution<float> normal;

  private:
    static bool by_row(int32_t op) {
        return op != OP_LINEAR && op != OP_ATTENTION && op != OP_SAMPLE && op != OP_EXPERTS && op != OP_CALL &&
               op != OP_ADAPT_INNER && op != OP_ADAPT_ADD;
    }
    // Replaces a whole matrix, or every third of its rows.
    void replace(LowRank& change, const Matrix& m, const Numbers& numbers, bool whole) {
        if (whole) {
            change.replacement = matrices(numbers, m.rows, m.cols, m.segments);
            return;
        }
        const int64_t count = (m.rows + 2) / 3;
        int32_t* ids = memory.keep<int32_t>(count);
        for (int64_t i = 0; i < count; ++i) ids[i] = static_cast<int32_t>(3 * i);
        change.rows = matrices(numbers, count, m.cols, m.segments);
        change.ids = ids;
    }
    // Adapter 1 changes all slots, some with a bias or factors; 2, in BF16, every other slot, and replaces others; 3 does
    // not exist.
    Adapters* make_adapters() {
        const int64_t count = static_cast<int64_t>(slots.size());
        LowRank** tables = memory.keep<LowRank*>(ADAPTERS);
        std::memset(static_cast<void*>(tables), 0, ADAPTERS * sizeof *tables);
        int64_t widest = 0;
        for (int64_t id : {1, 2}) {
            tables[id] = memory.keep<LowRank>(count);
            for (int64_t slot = 0; slot < count; ++slot) {
                const Matrix& m = *slots[static_cast<size_t>(slot)];
                const int64_t rank = id == 1 ? 3 : RANK;
                LowRank& change = tables[id][slot] = {};
                widest = std::max(widest, m.rows);
                const Numbers numbers = {id == 1 ? FORMAT_F32 : FORMAT_BF16, ACT_F32, CACHE_F32};
                if (id == 2 && slot % 2) {
                    if (!std::count(apart.begin(), apart.end(), slot)) replace(change, m, numbers, slot % 4 == 1);
                    continue;
                }
                change.a = matrices(numbers, rank, m.cols, m.segments);
                change.b = matrices(numbers, m.rows, rank);
                if (id == 1 && slot % 3 == 0) change.bias = vector(m.rows);
                if (id == 1 && slot % 3 != 1) change.factors = vector(m.rows, 1.0f);
            }
        }
        Adapters* all = memory.keep<Adapters>(1);
        *all = {tables, ADAPTERS, RANK, memory.work<InEffect>(MAX_TOKENS * MAX_APPLIED), memory.work<int32_t>(ADAPTERS),
                adapted_rows(MAX_TOKENS), adapted_rows(MAX_CHOSEN),
                memory.work<float>(widest_linear * MAX_TOKENS * MAX_APPLIED * RANK),
                memory.work<float>(MAX_TOKENS * widest)};
        return all;
    }
    AdaptedRows adapted_rows(int64_t rows) {
        const int64_t count = rows * MAX_APPLIED;
        return {0, 0, memory.work<AdapterGroup>(count), memory.work<int32_t>(count), memory.work<float>(count), nullptr,
                0, {}};
    }
    int64_t widest_linear = 1;  // maximum products in one instruction
    Matrix packed(const Numbers& numbers, int64_t rows, int64_t cols, int32_t segments) {
        const int64_t bytes = kvasir_matrix_bytes(numbers.format, rows, cols, segments);
        uint8_t* data = memory.keep<uint8_t>(bytes);
        const Matrix m = {numbers.format, numbers.activation, segments, 0, rows, cols, data};
        const bool blocks = numbers.format == FORMAT_Q8_0;  // Q8_0: a float16 scale of about 2^-9, then 32 bytes
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

}  // namespace kvasir_test
