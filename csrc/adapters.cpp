#include "adapters.h"

#include "dispatch.h"

namespace kvasir {
namespace {

// Calls f(pair, first row, row count) for each run of adjacent rows with the same adapter, if it changes the slot.
template <typename F>
void each_run(const Adapters& adapters, int64_t slot, int64_t rows, F f) {
    for (int64_t row = 0; row < rows;) {
        const int64_t first = row;
        const int32_t id = adapters.of_rows[first];
        while (row < rows && adapters.of_rows[row] == id) ++row;
        if (!id) continue;
        const LowRank& pair = adapters.tables[id][slot];
        if (pair.a) f(pair, first, row - first);
    }
}

float* inner_of(const Adapters& adapters, int64_t part, int64_t row) {
    return adapters.inner + (part * adapters.max_tokens + row) * adapters.rank;
}

// Row stride in floats of a run's a x, which are the activations of b.
int64_t inner_stride(const LowRank& pair) { return activated_bytes(*pair.b) / static_cast<int64_t>(sizeof(float)); }

}  // namespace

void adapter_inner(const Adapters& adapters, int64_t slot, int64_t part, const float* x, int64_t rows,
                   const Team& team) {
    const Range mine = share(team, rows);
    each_run(adapters, slot, rows, [&](const LowRank& pair, int64_t first, int64_t count) {
        const Matrix& a = *pair.a;
        const int64_t begin = first > mine.begin ? first : mine.begin;
        const int64_t end = first + count < mine.end ? first + count : mine.end;
        // Activations of a are plain float32 rows. Padding may change their stride; rows are then computed one at a
        // time.
        const bool dense = activated_bytes(a) == a.cols * static_cast<int64_t>(sizeof(float));
        const int64_t batch = dense ? end - begin : 1, stride = inner_stride(pair);
        float* out = inner_of(adapters, part, first);
        for (int64_t row = begin; row < end; row += batch) {
            kernels().linear(a, reinterpret_cast<const uint8_t*>(x + row * a.cols), batch, 0, panels(a),
                             out + (row - first) * stride, stride, nullptr, nullptr, 0);
        }
    });
}

void adapter_add(const Adapters& adapters, int64_t slot, int64_t part, float* out, int64_t out_stride, int64_t rows,
                 int64_t first_panel, int64_t last_panel) {
    each_run(adapters, slot, rows, [&](const LowRank& pair, int64_t first, int64_t count) {
        float* run = out + first * out_stride;
        kernels().linear(*pair.b, reinterpret_cast<const uint8_t*>(inner_of(adapters, part, first)), count, first_panel,
                         last_panel, run, out_stride, nullptr, run, out_stride);
    });
}

}  // namespace kvasir
