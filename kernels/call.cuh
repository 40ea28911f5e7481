// The arguments of every attention kernel. `src/attend/cuda/call.rs` holds the same structures, field by field.
//
// Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, E value width.
#pragma once
#include <stdint.h>

// q, k or v: strides in elements; neighbours along the width lie side by side.
struct Operand {
    const void *data;
    int64_t batch, head, token;
};

// What tokens of one tile have in common, so that a tile of queries and a tile of keys can be judged together.
struct TileBounds {
    // Least and greatest position, padding aside; first > last where all is padding.
    int first, last;
    // Least and greatest segment, padding aside.
    int segment_first, segment_last;
    // Bit 0: positions are first, first + 1, ... without padding. Bit 1: some token is padding.
    int flags;
    int reserved[3];
};

// Where queries or keys stand. A span (`list` is null) stands at start, start + 1, ...; all positions are relative to
// a common origin, so that they fit; a negative one is padding.
struct Tokens {
    const int2 *list;        // (1|B, len): position and segment of each token
    const TileBounds *tiles; // (1|B, ceil(len / tile)): of as many tokens as the kernel's tile has
    int64_t batch;           // tokens from one row of `list` to the next, 0 where one serves all
    int64_t tiles_batch;     // the same for `tiles`
    int start;
    int len;
};

// How scores are made. All are in units of log2, so that ex2 gives the weights.
struct ScoreCall {
    float factor;         // scale * log2(e); above 0 but for the bias, where it may be anything
    int negate;           // whether the amplitude part of q changes its sign, for scales below 0
    const float *slopes;  // bias: (H), times log2(e)
    // Phase: entry reach + d is {w(d), w(d - 1)}, w(d) = |d|^alpha * phase_scale in turns, for d in -reach + 1 .. reach.
    const float2 *turns;
    int reach;            // distances below it are in `turns`
    float alpha, phase_scale;
};

struct ForwardCall {
    Operand q, k;
    Operand v[2];   // the second from column `width` of the values on, where values are wider than heads
    void *out;      // (B,H,T,E) without gaps
    float *lse;     // (B,H,T), or null
    Tokens queries, keys;
    ScoreCall score;
    int heads, group;      // H and H/G
    int head_width;        // D
    int amplitude_width;   // phase: width of the amplitude part
    int value_width;       // E
    int causal;
    int window;            // positions a query sees, its own included; INT_MAX for all
    // Forward: tiles of queries in a head. Decode: parts that the keys are split into.
    int tiles;
    // Decode: (B,G,row blocks,parts,16,E) and (B,G,row blocks,parts,16), f32: each part's average and log2-sum-exp.
    float *part_out, *part_lse;
    // For a backward pass, or null. (B,H,T): log2 of the sum of a row's weights, and what rounding it lost; infinity where
    // nothing is seen. (B,H,T,E): what rounding the output lost.
    float2 *statistics;
    void *rest;
};

// What the backward pass needs of each row.
struct DeltaCall {
    const void *out, *rest;   // (B,H,T,E) without gaps, as the forward pass left them
    Operand grad;             // the output's gradient
    const float2 *statistics; // as in ForwardCall
    float2 *rows;             // (B,H,T): the first of a row's statistics, and delta, the sum of out * grad, times scale
    int *enormous;            // (B,H,ceil(T/64)): whether a tile of 64 queries has a row whose statistics' second part counts
    int heads;
    int len;                  // T
    int value_width;          // E
    float scale;              // without its sign
};

struct BackwardCall {
    Operand q, k;
    Operand v[2], grad[2];    // the second from column `width` of the values on
    Operand dq, dk, dv;       // results: a kernel for keys writes dk and dv, one for queries dq
    const float2 *rows, *statistics;
    const int *enormous;      // all three as in DeltaCall
    Tokens queries, keys;
    ScoreCall score;
    float scale;              // in natural units, of any sign
    int heads, group;         // H and H/G
    int head_width;           // D
    int amplitude_width;      // phase: width of the amplitude part
    int value_width;          // E
    int causal;
    int window;               // positions a query sees, its own included; INT_MAX for all
    int tiles;                // of keys, or of queries, in a head: those that the kernel's blocks are for
    int reserved;
};

// Where queries or keys stand, for the general kernel: absolute positions; a negative one is padding.
struct SimtTokens {
    const int64_t *positions; // (1|B, len), or null: a span, start, start + 1, ...
    const int64_t *segments;  // (1|B, len), or null: one segment
    int64_t batch;            // tokens from one row of both to the next, 0 where one serves all
    int64_t start;
    int64_t len;
};

// What the kernels without tensor cores are told of a call, beside its operands. Scores are in natural units: the weights
// are exp(score - greatest score).
struct SimtProblem {
    SimtTokens queries, keys;
    double scale;          // of any sign
    const double *slopes;  // bias: (H)
    const float2 *turns;   // phase, unless f64: as in ScoreCall
    double alpha, phase_scale;
    int64_t window;        // positions a query sees, its own included; INT64_MAX for all
    int reach;             // distances below it are in `turns`
    int heads, group;      // H and H/G
    int head_width;        // D
    int amplitude_width;   // phase: width of the amplitude part
    int value_width;       // E
    int causal;
    // Of rows in a key/value head, those that the kernel's blocks are for: queries (token * group + head in group), or keys.
    int tiles;
};

// In what follows Real is f64 where q is, else f32.
struct SimtCall {
    Operand q, k, v;
    void *out;             // (B,H,T,E) without gaps
    void *lse;             // (B,H,T) of Real, or null
    // For a backward pass, or null. (B,H,T) pairs of Real: a row's greatest score, -infinity where nothing is seen, and
    // the logarithm of the sum of its weights. (B,H,T,E), half precision only: what rounding the output lost.
    void *statistics, *rest;
    SimtProblem problem;
};

// What the backward pass needs of each row.
struct SimtDeltaCall {
    const void *out, *rest; // (B,H,T,E) without gaps, as the forward pass left them; rest may be null
    Operand grad;           // the output's gradient
    const void *statistics; // as in SimtCall
    void *delta;            // (B,H,T) of Real: the sum of out * grad, 0 where nothing is seen
    int64_t rows;           // B * H * T
    int64_t len;            // T
    int heads;
    int value_width;        // E
};

struct SimtBackwardCall {
    Operand q, k, v, grad;
    Operand dq, dk, dv;     // results: a kernel for keys writes dk and dv, one for queries dq
    const void *statistics, *delta; // as in SimtDeltaCall
    SimtProblem problem;
};

// The same numbers stand in `call.rs`.
static_assert(sizeof(Operand) == 32 && sizeof(TileBounds) == 32 && sizeof(Tokens) == 40, "");
static_assert(sizeof(ScoreCall) == 40 && sizeof(ForwardCall) == 328, "");
static_assert(sizeof(DeltaCall) == 88 && sizeof(BackwardCall) == 472, "");
static_assert(sizeof(SimtTokens) == 40 && sizeof(SimtProblem) == 160 && sizeof(SimtCall) == 288, "");
static_assert(sizeof(SimtDeltaCall) == 88 && sizeof(SimtBackwardCall) == 400, "");
