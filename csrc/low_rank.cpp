// The products of low-rank changes. A panel of A is one vector wide, so a row's sum over K is a single chain that waits
// for each of its own additions: several jobs run side by side.
#include "low_rank.h"

#include "float_weights.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

constexpr int SIDE_BY_SIDE = 4;

// N jobs whose matrices have the same format, columns and segments.
template <class Weight, int N>
void shrink_together(const Shrink* jobs) {
    const Matrix& m = *jobs[0].a;
    const int64_t cols = m.cols / m.segments, steps = cols / Weight::COLUMNS;
    const int64_t segment_bytes = segment_cols(m) / Weight::COLUMNS * Weight::BYTES;
    const uint8_t* w[N];
    const float* x[N];
    for (int n = 0; n < N; ++n) {
        w[n] = jobs[n].a->data + jobs[n].panel * panel_bytes(m);
        x[n] = jobs[n].x;
    }
    f32x16 part[4][N];  // pending sums of 1, 2, 4 and 8 segments of the balanced tree
    int level = 0;
    int32_t s = 0;
    do {  // there is a first segment
        f32x16 sum[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[n] = broadcast(0.0f);
        for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                sum[n] = Weight(w[n] + step * Weight::BYTES).add_to(sum[n], x[n] + step * Weight::COLUMNS);
            }
        }
        for (int n = 0; n < N; ++n) {
            if (steps * Weight::COLUMNS < cols) {
                sum[n] = Weight(w[n] + steps * Weight::BYTES).add_first_to(sum[n], x[n] + steps * Weight::COLUMNS);
            }
            w[n] += segment_bytes;
            x[n] += cols;
        }
        for (level = 0; s >> level & 1; ++level) {
            for (int n = 0; n < N; ++n) sum[n] = add(part[level][n], sum[n]);
        }
        for (int n = 0; n < N; ++n) part[level][n] = sum[n];
    } while (++s < m.segments);
    for (int n = 0; n < N; ++n) store(jobs[n].out, mul(part[level][n], broadcast(jobs[n].scale)));
}

template <class Weight>
void shrink_of(const Shrink* jobs, int64_t count) {
    if (count == SIDE_BY_SIDE) return shrink_together<Weight, SIDE_BY_SIDE>(jobs);
    for (int64_t i = 0; i < count; ++i) shrink_together<Weight, 1>(jobs + i);
}

bool alike(const Matrix& a, const Matrix& b) {
    return a.format == b.format && a.cols == b.cols && a.segments == b.segments;
}

// The rows [first, first + ROWS) of a job, for PANELS panels of B.
template <class Weight, int ROWS, int PANELS>
void expand_tile(const Expand& job, int64_t panel_bytes, int64_t panel, int64_t first) {
    const LowRank& change = *job.change;
    const Matrix& b = *change.b;
    const uint8_t* w = b.data + panel * panel_bytes;
    const int64_t steps = b.cols / Weight::COLUMNS;
    const float* t[ROWS];
    f32x16 y[ROWS][PANELS];
    const auto out = [&](int r, int p) { return job.out + job.rows[first + r] * job.out_stride + (panel + p) * PANEL; };
    const auto some = [&](int p, const float* from) {
        const int64_t count = b.rows - (panel + p) * PANEL;
        return count < PANEL ? load_first(from, count) : load(from);
    };
    for (int r = 0; r < ROWS; ++r) {
        t[r] = job.inner + (first + r) * job.inner_stride;
        for (int p = 0; p < PANELS; ++p) y[r][p] = some(p, out(r, p));
    }
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            const Weight weight(w + p * panel_bytes + step * Weight::BYTES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) y[r][p] = weight.add_to(y[r][p], t[r] + step * Weight::COLUMNS);
        }
    }
    for (int p = 0; p < PANELS; ++p) {
        const int64_t n = (panel + p) * PANEL, count = b.rows - n;
        for (int r = 0; r < ROWS; ++r) {
            f32x16 sum = y[r][p];
            if (steps * Weight::COLUMNS < b.cols) {
                const Weight weight(w + p * panel_bytes + steps * Weight::BYTES);
                sum = weight.add_first_to(sum, t[r] + steps * Weight::COLUMNS);
            }
            if (change.bias) sum = fma(some(p, change.bias + n), broadcast(job.scales[first + r]), sum);
            if (change.factors) sum = mul(some(p, change.factors + n), sum);
            if (count < PANEL) store_first(out(r, p), sum, count);
            else store(out(r, p), sum);
        }
    }
}

// All rows, in tiles of four rows of a panel, or of one row of four panels.
template <class Weight>
void expand_of(const Expand& job, int64_t first_panel, int64_t last_panel) {
    constexpr int SIDE = 4;
    const int64_t bytes = panel_bytes(*job.change->b), together = job.count / SIDE * SIDE;
    for (int64_t panel = first_panel; panel < last_panel && together > 0; ++panel) {
        for (int64_t row = 0; row < together; row += SIDE) expand_tile<Weight, SIDE, 1>(job, bytes, panel, row);
    }
    for (int64_t row = together; row < job.count; ++row) {
        int64_t panel = first_panel;
        for (; panel + SIDE <= last_panel; panel += SIDE) expand_tile<Weight, 1, SIDE>(job, bytes, panel, row);
        for (; panel < last_panel; ++panel) expand_tile<Weight, 1, 1>(job, bytes, panel, row);
    }
}

void change_row(const ChangedRow& row) {
    for (int64_t k = 0; k < row.cols; k += LANES) {
        const int64_t count = row.cols - k;
        const bool whole = count >= LANES;
        f32x16 sum = mul(whole ? load(row.w + k) : load_first(row.w + k, count), broadcast(row.scale));
        for (int64_t r = 0; r < row.rank; ++r) {
            const float* a = row.a + r * row.cols + k;
            sum = fma(whole ? load(a) : load_first(a, count), broadcast(row.b[r]), sum);
        }
        if (whole) store(row.w + k, sum);
        else store_first(row.w + k, sum, count);
    }
}

}  // namespace

void shrink(const Shrink* jobs, int64_t count) {
    while (count > 0) {
        const Matrix& m = *jobs[0].a;
        int64_t same = 1;
        while (same < count && same < SIDE_BY_SIDE && alike(*jobs[same].a, m)) ++same;
        switch (m.format) {
            case FORMAT_F32: shrink_of<WeightF32>(jobs, same); break;
            case FORMAT_F16: shrink_of<WeightF16>(jobs, same); break;
            default: shrink_of<WeightBF16>(jobs, same); break;
        }
        jobs += same;
        count -= same;
    }
}

void expand(const Expand& job, int64_t first_panel, int64_t last_panel) {
    switch (job.change->b->format) {
        case FORMAT_F32: return expand_of<WeightF32>(job, first_panel, last_panel);
        case FORMAT_F16: return expand_of<WeightF16>(job, first_panel, last_panel);
        default: return expand_of<WeightBF16>(job, first_panel, last_panel);
    }
}

void squares(const ChangedRow& row, double* out) {
    constexpr int64_t CHAINS = 8;
    change_row(row);
    const int64_t cols = row.cols / row.segments;
    for (int32_t s = 0; s < row.segments; ++s) {
        const float* w = row.w + s * cols;
        double chain[CHAINS] = {}, total = 0;
        int64_t k = 0;
        for (; k + CHAINS <= cols; k += CHAINS) {
            for (int64_t i = 0; i < CHAINS; ++i) chain[i] += static_cast<double>(w[k + i]) * static_cast<double>(w[k + i]);
        }
        for (int64_t i = 0; k + i < cols; ++i) chain[i] += static_cast<double>(w[k + i]) * static_cast<double>(w[k + i]);
        for (const double one : chain) total += one;
        out[s] = total;
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
