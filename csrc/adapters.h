// Low-rank adapters: which rows of a step have which, and their part of the products (low_rank.h). Rows of several
// adapters, with several each, and rows without one share a step.
//
// The rows of a section of the program (token rows or chosen rows) are listed by adapter, so that rows of the same
// adapter share what is read of it wherever they lie. A row's adapters apply in the order of its sequence: the lists
// are by level, first each row's first adapter, then its second.
#pragma once

#include "kernels.h"
#include "linear_part.h"

namespace kvasir {

constexpr int64_t MAX_APPLIED = 8;  // adapters of a sequence
constexpr int64_t MAX_RANK = 4096;

// An adapter of a sequence, for the tokens from position `start` on.
struct Applied {
    int64_t id;  // from 1 on
    int64_t start;
    float scale;
    int32_t reserved;
};

struct InEffect {
    int32_t id;  // 0: none, and none after it
    float scale;
};

// Entries [first, first + count) of a section: rows for which one adapter is in effect at the same level.
struct AdapterGroup {
    const LowRank* changes;  // [slots]
    int64_t first, count;
    int32_t id, reserved;
};

// The adapted rows of a section, [rows * MAX_APPLIED] of each.
struct AdaptedRows {
    int64_t groups, count;
    AdapterGroup* group;
    int32_t* rows;
    float* scales;
    const int64_t* tokens;  // the token row of each row of the section, null if they are the same
    int64_t levels, ends[MAX_APPLIED];  // the end of each level's groups
};

// A program's adapters and the buffers to run them. A slot is a matrix that adapters may change.
struct Adapters {
    const LowRank* const* tables;  // [count]: of each id [slots], null if there is no such adapter; id 0 is none
    int64_t count;
    int64_t rank;         // the greatest, rounded up to whole cache lines of float32
    InEffect* in_effect;  // [max_tokens][MAX_APPLIED]
    int32_t* group_of;    // [count]
    AdaptedRows tokens, chosen;
    float* inner;  // [matrices of one linear][entries of a section][rank]: scale (A x)
    float* sums;   // [max_tokens, widest]: products that cannot be written to their result's place yet
};

// Lists the adapted rows of a section. tokens: the token row of each row, null if they are the token rows.
void list_adapted(const Adapters& all, AdaptedRows& to, const int64_t* tokens, int64_t rows);

// Whether an adapter of the rows changes anything in the slots [count]; -1 stands for none.
bool changes_any(const AdaptedRows& rows, const int64_t* slots, int64_t count);

// Computes scale (A x), or A x unless `scaled`, for the products of a linear: those of the slots [count], -1 for a
// product without one. x: [rows, K]. Each thread of the team computes a part. Returns whether there are any.
bool shrink_adapted(const Adapters& all, const AdaptedRows& rows, const int64_t* slots, int64_t count, const float* x,
                    bool scaled, const Team& team);

// Where the product of a part is before its bias and residual are added.
static inline float* product_of(const Adapters& all, const LinearPart& part) {
    return part.out == part.residual ? all.sums : part.out;
}

// Computes what rows of a slot's matrix that replace others make of the panels [first, last) of out. x: [rows, K].
void replace_adapted(const AdaptedRows& rows, int64_t slot, const float* x, float* out, int64_t out_stride,
                     int64_t first_panel, int64_t last_panel);

// Applies the low-rank changes to the products of these parts. Each thread of the team computes a part; it uses barriers.
void expand_adapted(const Adapters& all, const AdaptedRows& rows, const LinearPart* parts, const int64_t* slots,
                    int64_t count, const Team& team);

// The vectors of a slot in a row of a section: those of the last adapter in effect that replaces them, else its own.
struct Vectors {
    const float* first;
    const float* second;
};
Vectors vectors_of(const Adapters& all, const AdaptedRows& rows, int64_t slot, int64_t row, Vectors own);

// The ids whose rows of a table this rank has.
struct TableRows {
    int64_t first, count;
};
// Applies the changes of a table to the rows [first, last) that were looked up by `ids`. out: [rows, width].
void change_lookup(const Adapters& all, int64_t slot, const TableRows& table, const int64_t* ids, float* out,
                   int64_t width, int64_t first, int64_t last);

// Writes A x of the change of an expert that a row has at a level to inner [rank of all], zeros if it has none.
void shrink_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, int64_t level, const float* x,
                   float* inner);
// Applies that change to a product. inner: A x, overwritten.
void expand_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, int64_t level, float* inner,
                   float* out);

// Applies the low-rank changes of one expert, `expert` of those of this rank, to its product for a token row.
void change_expert(const Adapters& all, int64_t slot, int64_t expert, int64_t row, const float* x, float* out);

}  // namespace kvasir
