#include "adapters.h"

#include "dispatch.h"

namespace kvasir {
namespace {

// The products of one adapter and slot: panels of A times rows, the rows of a panel after each other.
struct Unit {
    const LowRank* change;
    const AdapterGroup* group;
    int64_t part, jobs;
};

template <typename F>
void each_unit(const AdaptedRows& rows, const int64_t* slots, int64_t count, F f) {
    for (int64_t part = 0; part < count; ++part) {
        if (slots[part] < 0) continue;
        for (int64_t g = 0; g < rows.groups; ++g) {
            const AdapterGroup& group = rows.group[g];
            const LowRank& change = group.changes[slots[part]];
            if (change.a) f(Unit{&change, &group, part, panels(*change.a) * group.count});
        }
    }
}

float* inner_of(const Adapters& all, const AdaptedRows& rows, int64_t part, int64_t entry) {
    return all.inner + (part * rows.count + entry) * all.rank;
}

// Collects jobs and runs them several at a time.
class Jobs {
  public:
    ~Jobs() { run(); }
    void add(const Shrink& job) {
        jobs_[count_++] = job;
        if (count_ == MOST) run();
    }

  private:
    static constexpr int64_t MOST = 16;
    void run() {
        kernels().shrink(jobs_, count_);
        count_ = 0;
    }
    Shrink jobs_[MOST];
    int64_t count_ = 0;
};

}  // namespace

void list_adapted(const Adapters& all, AdaptedRows& to, const int64_t* tokens, int64_t rows) {
    to.groups = to.count = 0;
    for (int64_t level = 0; level < MAX_APPLIED; ++level) {
        const int64_t first_group = to.groups, first = to.count;
        const auto at = [&](int64_t row) {
            return all.in_effect[(tokens ? tokens[row] : row) * MAX_APPLIED + level];
        };
        for (int64_t row = 0; row < rows; ++row) {
            const int32_t id = at(row).id;
            if (!id) continue;
            int32_t& g = all.group_of[id];  // of any level, or of an earlier step
            if (g < first_group || g >= to.groups || to.group[g].id != id) {
                g = static_cast<int32_t>(to.groups++);
                to.group[g] = {all.tables[id], 0, 0, id, 0};
            }
            ++to.group[g].count;
            ++to.count;
        }
        if (to.count == first) return;
        int64_t begin = first;
        for (int64_t g = first_group; g < to.groups; begin += to.group[g++].count) to.group[g].first = begin;
        for (int64_t row = 0; row < rows; ++row) {
            const InEffect found = at(row);
            if (!found.id) continue;
            const int64_t entry = to.group[all.group_of[found.id]].first++;
            to.rows[entry] = static_cast<int32_t>(row);
            to.scales[entry] = found.scale;
        }
        for (int64_t g = first_group; g < to.groups; ++g) to.group[g].first -= to.group[g].count;
    }
}

bool shrink_adapted(const Adapters& all, const AdaptedRows& rows, const int64_t* slots, int64_t count, const float* x,
                    bool scaled, const Team& team) {
    constexpr int64_t PIECES = 8;  // drawn by each thread, so that a slow processor delays the others little
    int64_t total = 0;
    each_unit(rows, slots, count, [&](const Unit& unit) { total += unit.jobs; });
    if (!total) return false;
    const auto run = [&](int64_t begin, int64_t end) {
        Jobs jobs;
        int64_t seen = 0;
        each_unit(rows, slots, count, [&](const Unit& unit) {
            const int64_t from = begin > seen ? begin - seen : 0, to = end - seen < unit.jobs ? end - seen : unit.jobs;
            seen += unit.jobs;
            const Matrix& a = *unit.change->a;
            for (int64_t job = from; job < to; ++job) {
                const int64_t panel = job / unit.group->count, entry = unit.group->first + job % unit.group->count;
                float* out = inner_of(all, rows, unit.part, entry) + panel * PANEL;
                jobs.add({&a, panel, x + rows.rows[entry] * a.cols, out, scaled ? rows.scales[entry] : 1.0f});
            }
        });
    };
    const int64_t pieces = PIECES * team.threads;
    if (team.threads == 1 || total < pieces) {
        const Range mine = share(team, total);
        run(mine.begin, mine.end);
        return true;
    }
    const uint64_t number = team.next_draw();
    for (int64_t i; (i = team.draw(number, pieces)) >= 0;) run(total * i / pieces, total * (i + 1) / pieces);
    return true;
}

void expand_adapted(const Adapters& all, const AdaptedRows& rows, int64_t slot, int64_t part, float* out,
                    int64_t out_stride, int64_t first_panel, int64_t last_panel) {
    for (int64_t g = 0; g < rows.groups; ++g) {
        const AdapterGroup& group = rows.group[g];
        const LowRank& change = group.changes[slot];
        if (!change.b) continue;
        const Expand job = {&change,    inner_of(all, rows, part, group.first), all.rank, rows.rows + group.first,
                            rows.scales + group.first, group.count, out, out_stride};
        kernels().expand(job, first_panel, last_panel);
    }
}

}  // namespace kvasir
