// Where tokens stand, and which tiles of queries and keys meet.
//
// Visible means: neither token is padding, both are in one segment, n <= m if causal, and m - n < window
// (|m - n| < window if not causal) for a query at m and a key at n.
#pragma once
#include "call.cuh"
#include "ptx.cuh"
#include <limits.h>

// Position and segment of a token; a position below 0 is padding, and so is all that lies beyond the end.
struct Token {
    int position, segment;
};

DEVICE Token token_at(const Tokens &tokens, int batch, int index) {
    if (index >= tokens.len) return {-1, 0};
    if (!tokens.list) return {tokens.start + index, 0};
    int2 token = __ldg(tokens.list + batch * tokens.batch + index);
    return {token.x, token.y};
}

template <class Call> DEVICE bool is_visible(const Call &call, Token query, Token key) {
    int ahead = query.position - key.position;
    return query.position >= 0 && key.position >= 0 && query.segment == key.segment && ahead < call.window &&
           (call.causal ? ahead >= 0 : -ahead < call.window);
}

constexpr int CONSECUTIVE = 1, HAS_PADDING = 2;

// The bounds of tokens index .. index + size - 1; `size` is the size of the list's tiles.
DEVICE TileBounds tile_bounds(const Tokens &tokens, int batch, int index, int size) {
    if (!tokens.list) {
        int first = tokens.start + index, last = first + min(size, tokens.len - index) - 1;
        return {max(first, 0), last, 0, 0, first < 0 ? HAS_PADDING : CONSECUTIVE, {}};
    }
    const int4 *tile = (const int4 *)(tokens.tiles + batch * tokens.tiles_batch + index / size);
    int4 bounds = __ldg(tile);
    return {bounds.x, bounds.y, bounds.z, bounds.w, __ldg((const int *)(tile + 1)), {}};
}

enum Sight { NONE, PART, ALL };

// Whether no, some or each query of a tile sees some or each key of another. `ALL` promises consecutive positions.
template <class Call>
DEVICE Sight sight(const Call &call, const TileBounds &query, const TileBounds &key, bool key_tile_is_full) {
    if (query.first > query.last || key.first > key.last) return NONE;
    if (query.segment_first > key.segment_last || key.segment_first > query.segment_last) return NONE;
    // The least and the greatest that a query is ahead of a key.
    int least = query.first - key.last, greatest = query.last - key.first;
    if (least >= call.window || (call.causal ? greatest < 0 : -greatest >= call.window)) return NONE;
    bool all = (query.flags & key.flags & CONSECUTIVE) && key_tile_is_full &&
               query.segment_first == query.segment_last && key.segment_first == key.segment_last &&
               greatest < call.window && (call.causal ? least >= 0 : -least < call.window);
    return all ? ALL : PART;
}
