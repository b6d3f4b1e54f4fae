#include "adapters.h"

#include <cstring>

#include "dispatch.h"

namespace kvasir {
namespace {

// What one adapter changes in one product.
struct Unit {
    const LowRank* change;
    const AdapterGroup* group;
    int64_t part;
};

// Calls f(unit) for each change of the groups [first, last).
template <typename F>
void each_unit(const AdaptedRows& rows, int64_t first, int64_t last, const int64_t* slots, int64_t count, F f) {
    for (int64_t part = 0; part < count; ++part) {
        if (slots[part] < 0) continue;
        for (int64_t g = first; g < last; ++g) {
            const LowRank& change = rows.group[g].changes[slots[part]];
            if (change.a) f(Unit{&change, &rows.group[g], part});
        }
    }
}

float* inner_of(const Adapters& all, const AdaptedRows& rows, int64_t part, int64_t entry) {
    return all.inner + (part * rows.count + entry) * all.rank;
}

// Calls f(begin, end) for the parts of [0, total) that this thread takes, in whole runs of `unit`. They are drawn, so
// that a slow processor delays the others little, unless there are too few.
template <typename F>
void each_share(const Team& team, int64_t total, int64_t unit, F f) {
    constexpr int64_t PIECES = 8;
    const int64_t units = (total + unit - 1) / unit, most = PIECES * team.threads;
    const int64_t pieces = units < most ? units : most;
    if (team.threads == 1 || pieces <= team.threads) {
        const Range mine = share(team, total, unit);
        return f(mine.begin, mine.end);
    }
    const uint64_t number = team.next_draw();
    for (int64_t i; (i = team.draw(number, pieces)) >= 0;) {
        const int64_t end = units * (i + 1) / pieces * unit;
        f(units * i / pieces * unit, end < total ? end : total);
    }
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

// The first place in ascending ids [count] from which on they are at least `id`.
int64_t first_from(const int32_t* ids, int64_t count, int64_t id) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (ids[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Products of the rows of a matrix that replace others: those of the panels [first, last) of out for one row.
void replace(const LowRank& change, const float* x, float* out, int64_t out_stride, int64_t row, int64_t first_panel,
             int64_t last_panel) {
    float* to = out + row * out_stride;
    float sums[PANEL];
    if (const Matrix* m = change.replacement) {
        const float* mine = x + row * m->cols;
        Jobs jobs;
        for (int64_t panel = first_panel; panel < last_panel && (panel + 1) * PANEL <= m->rows; ++panel) {
            jobs.add({m, panel, mine, to + panel * PANEL, 1.0f});
        }
        if (last_panel * PANEL > m->rows) {
            const Shrink rest = {m, last_panel - 1, mine, sums, 1.0f};
            kernels().shrink(&rest, 1);
            const int64_t n = (last_panel - 1) * PANEL;
            std::memcpy(to + n, sums, static_cast<size_t>(m->rows - n) * sizeof *sums);
        }
    }
    const Matrix* m = change.rows;
    if (!m) return;
    const int64_t begin = first_from(change.ids, m->rows, first_panel * PANEL);
    const int64_t end = first_from(change.ids, m->rows, last_panel * PANEL);
    for (int64_t i = begin; i < end;) {
        const int64_t panel = i / PANEL;
        const Shrink job = {m, panel, x + row * m->cols, sums, 1.0f};
        kernels().shrink(&job, 1);
        for (; i < end && i < (panel + 1) * PANEL; ++i) to[change.ids[i]] = sums[i % PANEL];
    }
}

// Adds B t to one row. inner: t.
void expand_one(const LowRank& change, const float* inner, float scale, float* out) {
    const int32_t row = 0;
    const Expand job = {&change, inner, 0, &row, &scale, 1, out, 0};
    kernels().expand(job, 0, panels(*change.b));
}

// What a row's adapter of a level changes in an expert; null for nothing.
const LowRank* expert_change(const Adapters& all, int64_t slot, int64_t expert, InEffect found) {
    const LowRank* experts = found.id ? all.tables[found.id][slot].experts : nullptr;
    return experts && experts[expert].b ? experts + expert : nullptr;
}

void shrink_one(const LowRank& change, const float* x, float scale, float* inner) {
    Jobs jobs;
    for (int64_t panel = 0; panel < panels(*change.a); ++panel) {
        jobs.add({change.a, panel, x, inner + panel * PANEL, scale});
    }
}

// The groups of one level, with their rows.
void list_level(const Adapters& all, AdaptedRows& to, int64_t level, const int64_t* tokens, int64_t rows) {
    const int64_t first_group = level ? to.ends[level - 1] : 0;
    int64_t groups = first_group, begin = to.count;
    const auto at = [&](int64_t row) { return all.in_effect[(tokens ? tokens[row] : row) * MAX_APPLIED + level]; };
    for (int64_t row = 0; row < rows; ++row) {
        const int32_t id = at(row).id;
        if (!id) continue;
        int32_t& g = all.group_of[id];  // of this level, or of another, or of an earlier step
        if (g < first_group || g >= groups || to.group[g].id != id) {
            g = static_cast<int32_t>(groups++);
            to.group[g] = {all.tables[id], 0, 0, id, 0};
        }
        ++to.group[g].count;
        ++to.count;
    }
    for (int64_t g = first_group; g < groups; begin += to.group[g++].count) to.group[g].first = begin;
    for (int64_t row = 0; row < rows; ++row) {
        const InEffect found = at(row);
        if (!found.id) continue;
        const int64_t entry = to.group[all.group_of[found.id]].first++;
        to.rows[entry] = static_cast<int32_t>(row);
        to.scales[entry] = found.scale;
    }
    for (int64_t g = first_group; g < groups; ++g) to.group[g].first -= to.group[g].count;
    to.groups = to.ends[level] = groups;
}

}  // namespace

void list_adapted(const Adapters& all, AdaptedRows& to, const int64_t* tokens, int64_t rows) {
    to.groups = to.count = to.levels = 0;
    to.tokens = tokens;
    for (int64_t level = 0, before = 0; level < MAX_APPLIED; ++level, before = to.count) {
        list_level(all, to, level, tokens, rows);
        if (to.count == before) return;
        to.levels = level + 1;
    }
}

bool shrink_adapted(const Adapters& all, const AdaptedRows& rows, const int64_t* slots, int64_t count, const float* x,
                    bool scaled, const Team& team) {
    constexpr int64_t TOGETHER = 8;  // a multiple of what the kernel runs side by side
    const auto jobs_of = [](const Unit& unit) { return panels(*unit.change->a) * unit.group->count; };
    int64_t total = 0;
    each_unit(rows, 0, rows.groups, slots, count, [&](const Unit& unit) { total += jobs_of(unit); });
    if (!total) return false;
    each_share(team, total, TOGETHER, [&](int64_t begin, int64_t end) {
        Jobs jobs;
        int64_t seen = 0;
        each_unit(rows, 0, rows.groups, slots, count, [&](const Unit& unit) {
            const int64_t size = jobs_of(unit), before = seen;
            seen += size;
            const Matrix& a = *unit.change->a;
            for (int64_t i = begin > before ? begin - before : 0; i < size && before + i < end; ++i) {
                const int64_t panel = i / unit.group->count, entry = unit.group->first + i % unit.group->count;
                float* out = inner_of(all, rows, unit.part, entry) + panel * PANEL;
                jobs.add({&a, panel, x + rows.rows[entry] * a.cols, out, scaled ? rows.scales[entry] : 1.0f});
            }
        });
    });
    return true;
}

bool changes_any(const AdaptedRows& rows, const int64_t* slots, int64_t count) {
    for (int64_t g = 0; g < rows.groups; ++g) {
        for (int64_t i = 0; i < count; ++i) {
            if (slots[i] < 0) continue;
            const LowRank& c = rows.group[g].changes[slots[i]];
            if (c.b || c.replacement || c.rows || c.vector || c.second || c.experts) return true;
        }
    }
    return false;
}

void replace_adapted(const AdaptedRows& rows, int64_t slot, const float* x, float* out, int64_t out_stride,
                     int64_t first_panel, int64_t last_panel) {
    for (int64_t g = 0; g < rows.groups; ++g) {
        const AdapterGroup& group = rows.group[g];
        for (int64_t i = group.first; i < group.first + group.count; ++i) {
            replace(group.changes[slot], x, out, out_stride, rows.rows[i], first_panel, last_panel);
        }
    }
}

void expand_adapted(const Adapters& all, const AdaptedRows& rows, const LinearPart* parts, const int64_t* slots,
                    int64_t count, const Team& team) {
    // To read a panel costs as much as to compute so many rows of it. Each share is long enough to be fetched ahead: the
    // matrices of a group are read from one end to the other, by one thread if there are enough groups.
    constexpr int64_t READ = 4, UNIT = 64;
    for (int64_t level = 0; level < rows.levels; ++level) {
        const int64_t first = level ? rows.ends[level - 1] : 0, last = rows.ends[level];
        const auto cost_of = [&](const Unit& unit) { return READ + unit.group->count; };
        int64_t total = 0;
        each_unit(rows, first, last, slots, count,
                  [&](const Unit& unit) { total += panels(*unit.change->b) * cost_of(unit); });
        if (!total) continue;
        if (level) team.barrier();  // a row's changes follow each other
        each_share(team, total, UNIT, [&](int64_t begin, int64_t end) {
            int64_t seen = 0;
            each_unit(rows, first, last, slots, count, [&](const Unit& unit) {
                const int64_t all_panels = panels(*unit.change->b), cost = cost_of(unit);
                // A panel belongs to the share in which its cost begins.
                const auto border = [&](int64_t at) {
                    const int64_t inside = at > seen ? (at - seen + cost - 1) / cost : 0;
                    return inside < all_panels ? inside : all_panels;
                };
                const int64_t first_panel = border(begin), last_panel = border(end);
                seen += all_panels * cost;
                if (first_panel >= last_panel) return;
                const AdapterGroup& group = *unit.group;
                const LinearPart& part = parts[unit.part];
                const Expand job = {unit.change, inner_of(all, rows, unit.part, group.first), all.rank,
                                    rows.rows + group.first, rows.scales + group.first, group.count,
                                    product_of(all, part), part.out_stride};
                kernels().expand(job, first_panel, last_panel);
            });
        });
    }
}

Vectors vectors_of(const Adapters& all, const AdaptedRows& rows, int64_t slot, int64_t row, Vectors own) {
    const InEffect* found = all.in_effect + (rows.tokens ? rows.tokens[row] : row) * MAX_APPLIED;
    for (int64_t level = 0; level < MAX_APPLIED && found[level].id; ++level) {
        const LowRank& change = all.tables[found[level].id][slot];
        if (change.vector) own.first = change.vector;
        if (change.second) own.second = change.second;
    }
    return own;
}

void change_lookup(const Adapters& all, int64_t slot, const TableRows& table, const int64_t* ids, float* out,
                   int64_t width, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t at = ids[row] - table.first;
        if (at < 0 || at >= table.count) continue;
        const InEffect* found = all.in_effect + row * MAX_APPLIED;
        float* to = out + row * width;
        for (int64_t level = 0; level < MAX_APPLIED && found[level].id; ++level) {
            const LowRank& change = all.tables[found[level].id][slot];
            if (change.replacement) kernels().lookup(*change.replacement, to, width, &at, 1);
            if (!change.rows) continue;
            const int32_t id = static_cast<int32_t>(at);
            const int64_t place = first_from(change.ids, change.rows->rows, id);
            if (place < change.rows->rows && change.ids[place] == id) {
                kernels().lookup(*change.rows, to, width, &place, 1);
            }
        }
        for (int64_t level = 0; level < MAX_APPLIED && found[level].id; ++level) {
            const LowRank& change = all.tables[found[level].id][slot];
            if (!change.b) continue;
            float inner[MAX_RANK];
            kernels().lookup(*change.a, inner, MAX_RANK, &at, 1);
            kernels().scale(inner, inner, found[level].scale, change.a->cols);
            expand_one(change, inner, found[level].scale, to);
        }
    }
}

void change_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, const float* x, float* out) {
    const InEffect* found = all.in_effect + row * MAX_APPLIED;
    for (int64_t level = 0; level < MAX_APPLIED && found[level].id; ++level) {
        const LowRank* change = expert_change(all, slot, expert, found[level]);
        if (!change) continue;
        float inner[MAX_RANK];
        shrink_one(*change, x, found[level].scale, inner);
        expand_one(*change, inner, found[level].scale, out);
    }
}

void shrink_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, int64_t level, const float* x,
                   float* inner) {
    std::memset(inner, 0, static_cast<size_t>(all.rank) * sizeof *inner);
    const LowRank* change = expert_change(all, slot, expert, all.in_effect[row * MAX_APPLIED + level]);
    if (change) shrink_one(*change, x, 1.0f, inner);
}

void expand_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, int64_t level, float* inner,
                   float* out) {
    const InEffect found = all.in_effect[row * MAX_APPLIED + level];
    const LowRank* change = expert_change(all, slot, expert, found);
    if (!change) return;
    kernels().scale(inner, inner, found.scale, change->a->rows);
    expand_one(*change, inner, found.scale, out);
}

}  // namespace kvasir
