// Attention to selected positions: a row's keys and values are copied into a block of their own, in ascending order, and
// attention walks them as those of a sequence with that many tokens. So a selection of all gives the bits of attention
// to all, which is computed without a copy.
#include "attention_layout.h"
#include "indexer.h"

#include <cstring>

namespace kvasir {
namespace KVASIR_ISA {

void attention(const AttentionArgs&, const Team&);  // attention.cpp

namespace {

constexpr int64_t HEADS_AT_ONCE = ATTENTION_ROWS;

// A token's words in a tile of keys: word i of token t is at i * 16 + t.
template <typename Word>
void copy_words(uint8_t* to_tile, int64_t to, const uint8_t* from_tile, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t word = i * TILE_TOKENS;
        std::memcpy(to_tile + (word + to) * static_cast<int64_t>(sizeof(Word)),
                    from_tile + (word + from) * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    }
}

void copy_scale(const CacheLayout& layout, bool values, uint8_t* to_tile, int64_t to, const uint8_t* from_tile,
                int64_t from) {
    if (layout.format != CACHE_INT8) return;
    const int64_t scales = tile_numbers(layout, values);
    std::memcpy(to_tile + scales + to * 4, from_tile + scales + from * 4, 4);
}

void copy_key(const CacheLayout& layout, uint8_t* to_tile, int64_t to, const uint8_t* from_tile, int64_t from) {
    const int64_t bytes = tile_numbers(layout, false) / TILE_TOKENS;  // of a token
    if (layout.format == CACHE_F16) copy_words<uint16_t>(to_tile, to, from_tile, from, bytes / 2);
    else copy_words<uint32_t>(to_tile, to, from_tile, from, bytes / 4);
    copy_scale(layout, false, to_tile, to, from_tile, from);
}

void copy_value(const CacheLayout& layout, uint8_t* to_tile, int64_t to, const uint8_t* from_tile, int64_t from) {
    const int64_t bytes = tile_numbers(layout, true) / TILE_TOKENS, dim = padded_dim(layout, true);
    if (layout.format == CACHE_BF16) {  // pairs of tokens
        uint8_t* out = to_tile + (to / 2 * dim * 2 + to % 2) * 2;
        const uint8_t* in = from_tile + (from / 2 * dim * 2 + from % 2) * 2;
        for (int64_t i = 0; i < dim; ++i) std::memcpy(out + i * 4, in + i * 4, 2);
    } else {
        std::memcpy(to_tile + to * bytes, from_tile + from * bytes, static_cast<size_t>(bytes));
    }
    copy_scale(layout, true, to_tile, to, from_tile, from);
}

int64_t rounded(int64_t top_k) { return (top_k + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS; }

// A thread's copies: one block of as many tokens as are selected.
struct Copies {
    CacheLayout layout;
    uint8_t *k, *v;

    Copies(const SelectedArgs& args, uint8_t* room) : layout(args.attention.layout) {
        layout.block_size = static_cast<int32_t>(rounded(args.top_k));
        k = room + attention_scratch(args.attention.layout, args.attention.heads);
        v = k + head_bytes(layout, false);
    }

    void fill(const SelectedArgs& args, const Piece& piece, const int32_t* selected) {
        const CacheLayout& from = args.attention.layout;
        const int32_t* table = piece.tables[args.attention.group];
        const int64_t key_bytes = tile_bytes(from, false), value_bytes = tile_bytes(from, true);
        for (int64_t i = 0; i < args.top_k; ++i) {
            const int64_t position = selected[i], block = table[position / from.block_size];
            const int64_t place = position % from.block_size, tile = place / TILE_TOKENS, token = place % TILE_TOKENS;
            const int64_t to_tile = i / TILE_TOKENS, to = i % TILE_TOKENS;
            copy_key(from, k + to_tile * key_bytes, to,
                     args.attention.k + block * head_bytes(from, false) + tile * key_bytes, token);
            copy_value(from, v + to_tile * value_bytes, to,
                       args.attention.v + block * head_bytes(from, true) + tile * value_bytes, token);
        }
    }
};

// The heads [head, last) of a row. position: its place among the keys.
void attend(const SelectedArgs& args, const Piece& piece, int64_t token, int64_t position, int64_t head, int64_t last,
            const Copies* copies, uint8_t* room) {
    AttentionArgs one = args.attention;
    const int32_t block = 0;
    const int32_t* table = &block;
    Piece part = piece;
    part.flags = 0;
    part.start = position;
    part.count = 1;
    part.first = token;
    if (copies) {
        one.layout = copies->layout;
        one.k = copies->k;
        one.v = copies->v;
        one.group = 0;
        part.tables = &table;
    }
    one.q += head * one.layout.head_dim;
    one.out += head * value_dim(one.layout);
    one.heads = static_cast<int32_t>(last - head);
    one.pieces = &part;
    one.num_pieces = 1;
    one.scratch = room;
    attention(one, {0, 1, nullptr});
}

}  // namespace

// Threads divide the rows and groups of heads by the number of keys. A thread that begins in the middle of a row copies
// its keys again.
void selected_attention(const SelectedArgs& args, const Team& team) {
    const AttentionArgs& a = args.attention;
    const int64_t parts = (a.heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const auto cost = [&](int64_t position) { return (position < args.top_k ? position + 1 : args.top_k) + 16; };
    int64_t total = 0;
    for (int64_t p = 0; p < a.num_pieces; ++p) {
        for (int64_t i = 0; i < a.pieces[p].count; ++i) total += parts * cost(a.pieces[p].start + i);
    }
    const int64_t begin = total * team.thread / team.threads, end = total * (team.thread + 1) / team.threads;
    uint8_t* room = a.scratch + team.thread * selected_scratch(a.layout, a.heads, args.top_k);
    Copies copies(args, room);
    int64_t at = 0;
    for (int64_t p = 0; p < a.num_pieces && at < end; ++p) {
        const Piece& piece = a.pieces[p];
        for (int64_t i = 0; i < piece.count && at < end; ++i) {
            const int64_t position = piece.start + i, token = piece.first + i;
            const bool chooses = position >= args.top_k;
            bool filled = false;
            for (int64_t part = 0; part < parts; ++part, at += cost(position)) {
                if (at < begin || at >= end) continue;
                if (chooses && !filled) copies.fill(args, piece, args.selected + token * args.top_k);
                filled = true;
                const int64_t head = part * HEADS_AT_ONCE;
                const int64_t last = head + HEADS_AT_ONCE < a.heads ? head + HEADS_AT_ONCE : a.heads;
                attend(args, piece, token, chooses ? args.top_k - 1 : position, head, last, chooses ? &copies : nullptr,
                       room);
            }
        }
    }
}

}  // namespace KVASIR_ISA
}  // namespace kvasir
