// Tests the meetings of ranks, as threads over one segment and as processes that die in the middle.
#include "../ranks.h"

#include <signal.h>
#include <sys/wait.h>

#include <thread>

#include "../pool.h"
#include "check.h"

using kvasir::Meeting;
using kvasir_test::Guarded;
using kvasir_test::require;
using kvasir_test::same;

extern "C" {
int64_t kvasir_ranks_bytes(int32_t size, int32_t stages);
void* kvasir_ranks_open(void* segment, int32_t rank, int32_t size, int32_t stage, int32_t stages, int32_t pauses,
                        int32_t periods);
void kvasir_ranks_close(void* ranks);
void kvasir_ranks_abort(void* ranks);
int32_t kvasir_ranks_aborted(const void* ranks);
void kvasir_ranks_give(void* ranks, int32_t parts);
int32_t kvasir_ranks_settle(void* ranks);
int32_t kvasir_ranks_next(void* ranks);
void kvasir_ranks_done(void* ranks);
int32_t kvasir_ranks_receive(void* ranks);
void kvasir_ranks_send(void* ranks);
int64_t kvasir_ranks_progress(const void* ranks, int32_t number);
int32_t kvasir_ranks_behind(const void* ranks, int32_t number);
int32_t kvasir_ranks_exchange(void* ranks, void* out, const void* mine, int64_t bytes);
}

namespace {

constexpr int32_t LONG = 6000, SHORT = 2;  // periods of a wait

// Memory that child processes share.
struct Shared {
    explicit Shared(int32_t size, int32_t stages = 1) : bytes(static_cast<size_t>(kvasir_ranks_bytes(size, stages))) {
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
        if (memory == MAP_FAILED) std::abort();
    }
    ~Shared() { munmap(memory, bytes); }

    size_t bytes;
    void* memory;
};

// Runs act(ranks, rank, team) for each of `size` ranks at once, with so many threads each.
template <typename Act>
void each_rank(int32_t size, int32_t threads, const Act& act) {
    Shared shared(size);
    std::vector<std::thread> running;
    for (int32_t rank = 0; rank < size; ++rank) {
        running.emplace_back([&, rank] {
            void* ranks = kvasir_ranks_open(shared.memory, rank, size, 0, 1, 0, LONG);
            struct Call {
                const Act& act;
                void* ranks;
                int32_t rank;
            } call = {act, ranks, rank};
            kvasir::Pool* pool = kvasir::pool_create(threads, false);
            kvasir::pool_run(pool, [](const kvasir::Team& team, void* context) {
                const Call& c = *static_cast<Call*>(context);
                c.act(static_cast<kvasir::Ranks*>(c.ranks), c.rank, team);
                team.barrier();
            }, &call);
            kvasir::pool_destroy(pool);
            require(!kvasir_ranks_aborted(ranks), "no rank was aborted");
            kvasir_ranks_close(ranks);
        });
    }
    for (std::thread& one : running) one.join();
}

float number(int64_t i, int64_t part) {
    return static_cast<float>((i * 7919 + part * 104729) % 2003 - 1001) * (part % 2 ? 1e-3f : 1.7f);
}

float tree(int64_t i, int32_t first, int32_t parts) {
    if (parts == 1) return number(i, first);
    return tree(i, first, parts / 2) + tree(i, first + parts / 2, parts / 2);
}

void check_sums(int32_t size, int32_t parts, int32_t threads, int64_t rows, int64_t width, bool scaled) {
    const int64_t count = rows * width;
    std::vector<float> expected(static_cast<size_t>(count)), scales(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) scales[static_cast<size_t>(r)] = 0.37f * static_cast<float>(r + 1);
    for (int64_t i = 0; i < count; ++i) {
        float& to = expected[static_cast<size_t>(i)] = tree(i, 0, parts);
        if (scaled) to *= scales[static_cast<size_t>(i / width)];
    }
    std::vector<Guarded<float>*> arrays;
    for (int32_t rank = 0; rank < size; ++rank) arrays.push_back(new Guarded<float>(count));
    each_rank(size, threads, [&](kvasir::Ranks* ranks, int32_t rank, const kvasir::Team& team) {
        float* x = arrays[static_cast<size_t>(rank)]->data;
        const Meeting m = {ranks, kvasir::MEET_SUM, parts, 1, 0, width, {}};
        for (int32_t round = 0; round < 3; ++round) {
            team.barrier();
            if (team.thread == 0) {
                for (int64_t i = 0; i < count; ++i) x[i] = number(i, rank * parts / size);
            }
            team.barrier();
            kvasir::meet_sum(m, x, x, rows, width, scaled ? scales.data() : nullptr, team);
            team.barrier();
            require(same(x, expected.data(), count), "the ranks' sums are those of the tree");
        }
    });
    for (Guarded<float>* one : arrays) delete one;
}

// Borders of `parts` uneven parts of `count` things.
Meeting cut(kvasir::Ranks* ranks, int32_t kind, int32_t parts, int64_t count, int64_t width) {
    Meeting m = {ranks, kind, parts, 1, 0, width, {}};
    for (int32_t p = 0; p <= parts; ++p) m.borders[p] = count * p * (p + 1) / (parts * (parts + 1));
    return m;
}

void check_columns(int32_t size, int32_t parts, int32_t threads, int64_t rows, int64_t columns, bool lead_only) {
    each_rank(size, threads, [&](kvasir::Ranks* ranks, int32_t rank, const kvasir::Team& team) {
        Meeting m = cut(ranks, kvasir::MEET_COLUMNS, parts, columns, columns);
        m.lead_only = lead_only;
        const int32_t part = rank * parts / size;
        const int64_t width = m.borders[part + 1] - m.borders[part];
        static std::vector<float> own[kvasir::MAX_RANKS], out[kvasir::MAX_RANKS];
        team.barrier();
        if (team.thread == 0) {
            own[rank].assign(static_cast<size_t>(rows * width), 0.0f);
            out[rank].assign(static_cast<size_t>(rows * columns), -1.0f);
            for (int64_t i = 0; i < rows * width; ++i) {
                own[rank][static_cast<size_t>(i)] = number(i / width * columns + m.borders[part] + i % width, 1);
            }
        }
        team.barrier();
        kvasir::meet_columns(m, out[rank].data(), own[rank].data(), rows, team);
        team.barrier();
        for (int64_t i = 0; i < rows * columns; ++i) {
            const float expected = lead_only && rank ? -1.0f : number(i, 1);
            require(out[rank][static_cast<size_t>(i)] == expected, "columns lie side by side where they are needed");
        }
        team.barrier();
    });
}

void check_rows(int32_t size, int32_t parts, int32_t threads, int64_t rows, int64_t width) {
    constexpr int64_t TABLE = 50;
    std::vector<int64_t> ids(static_cast<size_t>(rows)), begins(TABLE + 1);
    for (int64_t r = 0; r < rows; ++r) ids[static_cast<size_t>(r)] = r * 31 % TABLE;
    for (int64_t e = 0; e <= TABLE; ++e) begins[static_cast<size_t>(e)] = rows * e / TABLE;
    each_rank(size, threads, [&](kvasir::Ranks* ranks, int32_t rank, const kvasir::Team& team) {
        static std::vector<float> x[kvasir::MAX_RANKS];
        Meeting m = cut(ranks, kvasir::MEET_PICK, parts, TABLE, width);
        const int32_t part = rank * parts / size;
        const auto holds = [&](int64_t id) { return id >= m.borders[part] && id < m.borders[part + 1]; };
        const auto fill = [&](bool by_expert) {
            team.barrier();
            if (team.thread == 0) {
                x[rank].assign(static_cast<size_t>(rows * width), NAN);
                for (int64_t i = 0; i < rows * width; ++i) {
                    int64_t id = ids[static_cast<size_t>(i / width)];
                    if (by_expert) {
                        for (id = 0; begins[static_cast<size_t>(id + 1)] <= i / width; ++id) {}
                    }
                    if (holds(id)) x[rank][static_cast<size_t>(i)] = i % 9 ? number(i, 1) : -0.0f;
                }
            }
            team.barrier();
        };
        const auto check = [&](const char* what) {
            team.barrier();
            for (int64_t i = 0; i < rows * width; ++i) {
                const float expected = i % 9 ? number(i, 1) : -0.0f;
                require(same(&x[rank][static_cast<size_t>(i)], &expected, 1), what);
            }
            team.barrier();
        };
        fill(false);
        kvasir::meet_pick(m, x[rank].data(), x[rank].data(), ids.data(), rows, team);
        check("rows come from the rank that has their id");
        fill(true);
        m.kind = kvasir::MEET_EXPERTS, m.shares = parts, m.parts = 1;
        kvasir::meet_experts(m, x[rank].data(), begins.data(), rows, team);
        check("rows of experts come from the rank that has them");
    });
}

void check_exchange() {
    constexpr int64_t COUNT = 2 * kvasir::SLOT_FLOATS + 3;
    each_rank(4, 1, [&](kvasir::Ranks* ranks, int32_t rank, const kvasir::Team&) {
        std::vector<int32_t> mine(COUNT), all(4 * COUNT);
        for (int64_t i = 0; i < COUNT; ++i) mine[static_cast<size_t>(i)] = static_cast<int32_t>(i * 4 + rank);
        require(kvasir_ranks_exchange(ranks, all.data(), mine.data(), 4 * COUNT) == 0, "all ranks came");
        for (int64_t i = 0; i < 4 * COUNT; ++i) {
            require(all[static_cast<size_t>(i)] == i % COUNT * 4 + i / COUNT, "each has the bytes of all");
        }
        require(kvasir_ranks_progress(ranks, rank) == 3, "one meeting for each piece");
    });
}

void check_commands() {
    Shared shared(2);
    void *lead = kvasir_ranks_open(shared.memory, 0, 2, 0, 1, 0, LONG), *other = kvasir_ranks_open(shared.memory, 1, 2, 0, 1, 0, LONG);
    int32_t told = 0, seen = 0;
    std::thread following([&] {
        while (kvasir_ranks_next(other) == 0) {
            seen += told;
            kvasir_ranks_done(other);
        }
    });
    for (told = 1; told <= 100; ++told) {
        kvasir_ranks_give(lead, 0);
        require(kvasir_ranks_settle(lead) == 0, "the other rank carries out a command");
    }
    require(seen == 5050 && !kvasir_ranks_behind(lead, 1), "each command once");
    kvasir_ranks_abort(lead);
    following.join();
    require(kvasir_ranks_settle(lead) == -1, "nobody waits after the end");
    kvasir_ranks_close(lead);
    kvasir_ranks_close(other);
}

// Three stages: each part goes from one to the next, and the watchdog knows for whom the others wait.
void check_stages() {
    Shared shared(1, 3);
    void* of[3];
    for (int32_t stage = 0; stage < 3; ++stage) of[stage] = kvasir_ranks_open(shared.memory, 0, 1, stage, 3, 0, LONG);
    void* lead = of[2];
    int32_t parts[3] = {};
    const auto pass = [&](int32_t stage) {
        if (stage) {
            require(kvasir_ranks_receive(of[stage]) == 0, "a part arrives");
            require(parts[stage - 1] > parts[stage], "once it is there");
        }
        ++parts[stage];
        kvasir_ranks_send(of[stage]);
    };
    std::thread following[2];
    for (int32_t stage = 0; stage < 2; ++stage) {
        following[stage] = std::thread([&, stage] {
            while (kvasir_ranks_next(of[stage]) == 0) {
                for (int32_t i = 0; i < 5; ++i) pass(stage);
                kvasir_ranks_done(of[stage]);
            }
        });
    }
    for (int32_t step = 0; step < 100; ++step) {
        kvasir_ranks_give(lead, 5);
        for (int32_t i = 0; i < 5; ++i) pass(2);
        require(kvasir_ranks_settle(lead) == 0, "all stages carry out a step");
    }
    require(parts[0] == 500 && parts[1] == 500 && parts[2] == 500, "each part once");
    require(kvasir_ranks_progress(lead, 1) >> 32 == 500, "parts are progress");
    kvasir_ranks_abort(lead);
    for (std::thread& one : following) one.join();
    require(kvasir_ranks_receive(of[1]) == -1, "nobody waits after the end");
    for (void* one : of) kvasir_ranks_close(one);

    Shared still(1, 3);
    for (int32_t stage = 0; stage < 3; ++stage) of[stage] = kvasir_ranks_open(still.memory, 0, 1, stage, 3, 0, LONG);
    kvasir_ranks_give(of[2], 2);
    const auto waited_for = [&](int32_t number) { return kvasir_ranks_behind(of[2], number) != 0; };
    require(waited_for(2) && !waited_for(1), "all wait for the first stage");
    kvasir_ranks_send(of[0]);
    require(waited_for(2) && waited_for(1), "both have work");
    kvasir_ranks_send(of[1]);
    require(waited_for(2) && !waited_for(1), "the second waits for the first");
    kvasir_ranks_send(of[0]);
    kvasir_ranks_send(of[1]);
    require(waited_for(2) && waited_for(1), "both have to say that they are done");
    for (int32_t stage = 0; stage < 2; ++stage) {
        kvasir_ranks_next(of[stage]);
        kvasir_ranks_done(of[stage]);
    }
    require(!waited_for(2) && !waited_for(1), "and have said so");
    for (void* one : of) kvasir_ranks_close(one);
}

// A rank that is killed in the middle of meetings, or that stands still: the other's wait ends.
void check_loss(int32_t signal) {
    Shared shared(2);
    const pid_t child = fork();
    if (child == 0) {
        void* ranks = kvasir_ranks_open(shared.memory, 1, 2, 0, 1, 0, LONG);
        float x = 1.0f, all[2];
        while (kvasir_ranks_exchange(ranks, all, &x, 4) == 0) {}
        _exit(0);
    }
    void* ranks = kvasir_ranks_open(shared.memory, 0, 2, 0, 1, 0, SHORT);
    float x = 2.0f, all[2] = {};
    for (int32_t i = 0; i < 100; ++i) require(kvasir_ranks_exchange(ranks, all, &x, 4) == 0, "both come");
    require(all[0] == 2.0f && all[1] == 1.0f, "each has both numbers");
    kill(child, signal);
    while (kvasir_ranks_exchange(ranks, all, &x, 4) == 0) {}
    require(kvasir_ranks_aborted(ranks) != 0, "a wait for a lost rank aborts all");
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    kvasir_ranks_close(ranks);
}

}  // namespace

void test_ranks() {
    require(kvasir_ranks_open(nullptr, 0, 3, 0, 1, 0, 0) == nullptr, "three ranks are refused");
    require(kvasir_ranks_open(nullptr, 2, 2, 0, 1, 0, 0) == nullptr, "a rank beyond the number is refused");
    require(kvasir_ranks_open(nullptr, 0, 2, 2, 2, 0, 0) == nullptr, "a stage beyond the number is refused");
    for (int32_t size : {1, 2, 4, 8}) {
        for (int32_t parts = 1; parts <= size; parts *= 2) {
            check_sums(size, parts, 1 + parts % 2, 3, 37, parts % 4 == 2);
            check_columns(size, parts, 1 + parts % 2, 3, 100, size == 4);
            check_rows(size, parts, 1 + parts % 2, 60, 7);
        }
    }
    check_sums(2, 2, 2, 5, kvasir::SLOT_FLOATS / 2 + 11, true);  // in pieces, which end within rows
    check_columns(2, 2, 2, 7, kvasir::SLOT_FLOATS / 2, false);
    check_rows(2, 2, 2, 60, kvasir::SLOT_FLOATS / 40 + 1);
    check_exchange();
    check_commands();
    check_stages();
    check_loss(SIGKILL);
    check_loss(SIGSTOP);
}
