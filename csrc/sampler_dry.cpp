// DRY: penalizes each token that would continue a repetition; the penalty grows with the length of the repetition.
#include "sampler_parts.h"

namespace kvasir {
namespace KVASIR_ISA {
namespace {

struct Window {
    const int32_t* ids;
    int64_t count;
};

Window window_of(const SampleRow& spec) {
    const int64_t count = spec.dry_penalty_last_n > 0 ? lesser(spec.dry_penalty_last_n, spec.num_ids) : spec.num_ids;
    return {spec.ids + spec.num_ids - count, count};
}

bool has(const int32_t* words, int64_t num_words, int32_t id) {
    return id >= 0 && id / 32 < num_words && (static_cast<uint32_t>(words[id / 32]) >> (id % 32) & 1u);
}

int64_t begin_of(const IdLists& lists, int64_t i) { return i ? lists.ends[i - 1] : 0; }

// Binary search among the lists [low, high), which share their first `depth` ids and are longer than that: the first
// list whose id at `depth` is at least `id`, or high.
int64_t first_from(const IdLists& lists, int64_t low, int64_t high, int64_t depth, int64_t id) {
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (lists.ids[begin_of(lists, middle) + depth] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// The length of the longest list that is a prefix of the ids, 0 if there is none.
int64_t longest_at(const IdLists& lists, const int32_t* ids, int64_t count) {
    int64_t low = 0, high = lists.count, length = 0;
    for (int64_t depth = 0; depth < count && low < high; ++depth) {
        low = first_from(lists, low, high, depth, ids[depth]);
        high = first_from(lists, low, high, depth, int64_t{ids[depth]} + 1);
        if (low < high && lists.ends[low] - begin_of(lists, low) == depth + 1) {
            length = depth + 1;
            ++low;  // this list ends here
        }
    }
    return length;
}

// The number of ids after the last breaker, which is the longest of those with the greatest start index.
int64_t unbroken(const Dry& dry, const Window& window) {
    for (int64_t place = window.count - 1; place >= 0; --place) {
        const int32_t id = window.ids[place];
        int64_t length = has(dry.breakers, dry.breaker_words, id);
        if (has(dry.heads, dry.head_words, id)) {
            const int64_t found = longest_at(dry.sequences, window.ids + place, window.count - place);
            length = found > length ? found : length;
        }
        if (length > 0) return window.count - place - length;
    }
    return window.count;
}

// by_distance[k]: the length of the longest common suffix of the window and the window without its last k ids
// (dry.suffix_repeats).
void find_repeats(int32_t* by_distance, const Window& window) {
    const int32_t* last = window.ids + window.count - 1;
    int64_t low = 0, high = 0;
    for (int64_t k = 1; k < window.count; ++k) {
        int64_t n = k < high ? lesser(by_distance[k - low], high - k) : 0;
        if (k + n >= high) {
            while (k + n < window.count && last[-n] == last[-k - n]) ++n;
            low = k;
            high = k + n;
        }
        by_distance[k] = static_cast<int32_t>(n);
    }
}

float penalty(const SampleRow& spec, int64_t exponent) {
    double power = 1.0, base = spec.dry_base;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) power *= base;
        base *= base;
    }
    const double product = spec.dry_multiplier * power, limit = GREATEST;
    return static_cast<float>(limit < product ? limit : product);
}

}  // namespace

bool uses_dry(const SampleRow& spec) { return spec.dry_multiplier != 0.0 && spec.dry_penalty_last_n != 0; }

void penalize_again(float* x, int64_t vocab, const SampleRow& spec, uint8_t* scratch, int32_t* room) {
    const Dry& dry = spec.dry;
    const Window window = window_of(spec);
    const int64_t limit = unbroken(dry, window);
    if (limit < spec.dry_allowed_length || window.count < 2) return;
    find_repeats(room, window);
    Ids seen(reinterpret_cast<uint64_t*>(scratch), vocab);
    int32_t* longest = reinterpret_cast<int32_t*>(scratch + (vocab + 63) / 64 * 8);
    for (int64_t place = 1; place < window.count; ++place) {
        const int32_t id = window.ids[place], repeated = room[window.count - place];
        if (repeated < spec.dry_allowed_length || has(dry.breakers, dry.breaker_words, id)) continue;
        const int32_t n = static_cast<int32_t>(lesser(repeated, limit));
        if (seen.add(id)) longest[id] = n;
        if (seen.has(id) && n > longest[id]) longest[id] = n;
    }
    for (int64_t place = 1; place < window.count; ++place) {
        const int32_t id = window.ids[place];
        if (!seen.has(id)) continue;
        seen.remove(id);
        x[id] -= penalty(spec, longest[id] - spec.dry_allowed_length);
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
