/* The products of one tile of TILE tokens with up to PANEL rows of queries, on a scratch that stays in the caches.
 *
 * A row is one query head of one token. Queries, keys and values are fp32 numbers or, with `pairs`, pairs of bf16
 * numbers in 4 bytes: two dims of a query or key, two tokens of a value. A word below is such 4 bytes.
 */
#ifndef BATON_ATTENTION_TILE_H
#define BATON_ATTENTION_TILE_H

#include "pool.h"

#define MAX_HEAD_DIM 256
#define TILE 64  /* tokens; tiles start at multiples of it, so that a row is always summed up in the same order */
#define PANEL 6  /* rows whose sums over 4 vectors fill the registers */
#define STRIP 24 /* rows that pass over the keys, then over the values, so that each stays in the L1 cache */
#define ROWS 192 /* rows that share a tile's transposed keys */
#define WIDE (LANES / 4) /* vectors of keys or values a panel is multiplied with at once */

typedef struct {
    vf keys[MAX_HEAD_DIM * TILE / LANES];      /* [word of the head][token] */
    vf values[TILE * MAX_HEAD_DIM / LANES];    /* [word of the tile][dim] */
    vf acc[ROWS * MAX_HEAD_DIM / LANES];       /* [row][dim] */
    vf scores[STRIP * TILE / LANES];           /* [row][token], then weights as words [row][TILE words] */
    vf totals[ROWS];                           /* sums of weights, lane by lane */
    float tops[ROWS], keep[STRIP + LANES];
    int32_t positions[ROWS];                   /* of the row's token */
    uint32_t queries[ROWS * MAX_HEAD_DIM];     /* [panel][word of the head][row of the panel] */
    const void *value_rows[TILE];              /* for each word of the tile, its dims */
    vf key_scales[TILE / LANES], value_scales[TILE / LANES]; /* of scaled formats; 0 for tokens not read */
} Scratch;

/* Where K and V of a tile's tokens are, zeros for tokens that must not be read, and scales and zeros of runs of 8. */
typedef struct {
    const void *k[TILE], *v[TILE];
    const void *key_scales[TILE / 8], *value_scales[TILE / 8];
    const uint8_t *value_zeros[TILE / 8];
} Tokens;

static const float zeros[MAX_HEAD_DIM];

/* The tokens from `tile` on of which those in [first, end) count; only their blocks are looked up. */
INLINE void find_tokens(Tokens *tokens, const Pool *pool, int64_t head, const int32_t *table, int64_t tile,
                        int64_t first, int64_t end) {
    for (int64_t i = 0; i < TILE; i += 8) { /* runs of 8 never cross a block */
        const int64_t token = tile + i, offset = token % pool->block_size;
        const int any = token + 8 > first && token < end;
        const int32_t block = any ? table[token / pool->block_size] : 0;
        const Run keys = run_of(pool, block, head, 0), values = run_of(pool, block, head, 1);
        tokens->key_scales[i / 8] = any ? (const void *)(keys.scales + 2 * offset) : zeros;
        tokens->value_scales[i / 8] = any ? (const void *)(values.scales + 2 * offset) : zeros;
        tokens->value_zeros[i / 8] = any ? (const void *)(values.zeros + offset) : zeros;
        for (int64_t j = 0; j < 8; j++) {
            const int counts = token + j >= first && token + j < end;
            tokens->k[i + j] = counts ? (const void *)(keys.numbers + (offset + j) * keys.token_nbytes) : zeros;
            tokens->v[i + j] = counts ? (const void *)(values.numbers + (offset + j) * values.token_nbytes) : zeros;
        }
    }
}

/* The scales of a tile's tokens in [first, end), 0 for others. */
INLINE void take_scales(vf *to, const void *const *runs, int64_t tile, int64_t first, int64_t end) {
    uint16_t scales[TILE];
    vi lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t i = 0; i < TILE; i += 8) memcpy(scales + i, runs[i / 8], 16);
    for (int64_t t = 0; t < TILE; t += LANES) {
        const int32_t from = (int32_t)(first - tile - t), until = (int32_t)(end - tile - t);
        to[t / LANES] = pick((lane >= from) & (lane < until), load(scales, t, 1), splat(0));
    }
}

#define PACK_PARAMETERS Scratch *s, const Tokens *tokens, const Tokens *next, int64_t dim

/* Asks for the `nbytes` bytes of a token's numbers. */
INLINE void ask_for(const void *p, int64_t nbytes) {
    for (int64_t b = 0; b < nbytes; b += 64) __builtin_prefetch((const char *)p + b, 0, 2);
}

/* Transposes the keys; asks for those of the next tile meanwhile: each block's layer is a short run somewhere in the
 * pool, so that otherwise every one would start with a cache miss. */
INLINE void pack_keys(PACK_PARAMETERS, const int pairs, const int format) {
    const int64_t words = pairs ? dim / 2 : dim;
    const int wide = format == FP32 || format == BF16;
    for (int64_t t = 0; t < TILE; t += LANES) {
        if (!wide)
            for (int64_t i = t; i < t + LANES; i++) ask_for(next->k[i], numbers_nbytes(dim, format));
        for (int64_t w = 0; w < words; w += LANES) {
            const int64_t from = w + LANES <= words ? w : words - LANES; /* the last step may do some again */
            vf v[LANES];
            UNROLL for (int i = 0; i < LANES; i++) {
                const void *token = tokens->k[t + i];
                v[i] = pairs ? load_pairs(token, from, format) : load_numbers(token, from, format);
                if (wide) __builtin_prefetch(at(next->k[t + i], pairs ? 2 * from : from, format == BF16), 0, 2);
            }
            transpose(v);
            UNROLL for (int i = 0; i < LANES; i++) s->keys[((from + i) * TILE + t) / LANES] = v[i];
        }
    }
}

/* fp32 values stay where they are; others are widened, or interleaved two tokens at a time. Those of 8 or 4 bits of
 * the next tile are asked for here, others while values are multiplied. */
INLINE void pack_values(PACK_PARAMETERS, const int pairs, const int format) {
    for (int64_t t = 0; t < TILE; t += pairs ? 2 : 1) {
        vf *to = &s->values[(pairs ? t / 2 : t) * dim / LANES];
        s->value_rows[pairs ? t / 2 : t] = format == FP32 ? tokens->v[t] : to;
        if (format == FP32) continue;
        const float zero = format == INT4 ? tokens->value_zeros[t / 8][t % 8] / 16.0f : 0;
        const float odd_zero = pairs && format == INT4 ? tokens->value_zeros[t / 8][t % 8 + 1] / 16.0f : 0;
        if (format != BF16) ask_for(next->v[t], numbers_nbytes(dim, format));
        if (format != BF16 && pairs) ask_for(next->v[t + 1], numbers_nbytes(dim, format));
        for (int64_t d = 0; d < dim; d += LANES) {
            vf even = load_numbers(tokens->v[t], d, format) - zero;
            if (pairs) even = pair(even, load_numbers(tokens->v[t + 1], d, format) - odd_zero);
            to[d / LANES] = even;
        }
    }
}

/* [pairs][format], called through tables: each is short, and all of them inlined would not be. */
#define PACK(name, format)                                                                                      \
    static void keys_##name(PACK_PARAMETERS) { pack_keys(s, tokens, next, dim, 0, format); }                     \
    static void keys_##name##_pairs(PACK_PARAMETERS) { pack_keys(s, tokens, next, dim, 1, format); }             \
    static void values_##name(PACK_PARAMETERS) { pack_values(s, tokens, next, dim, 0, format); }                 \
    static void values_##name##_pairs(PACK_PARAMETERS) { pack_values(s, tokens, next, dim, 1, format); }
PACK(bf16, BF16)
PACK(e4m3, E4M3)
PACK(e5m2, E5M2)
PACK(int8, INT8)
static void keys_fp32(PACK_PARAMETERS) { pack_keys(s, tokens, next, dim, 0, FP32); }
static void values_fp32(PACK_PARAMETERS) { pack_values(s, tokens, next, dim, 0, FP32); }
static void values_int4(PACK_PARAMETERS) { pack_values(s, tokens, next, dim, 0, INT4); }
static void values_int4_pairs(PACK_PARAMETERS) { pack_values(s, tokens, next, dim, 1, INT4); }

static void (*const key_packers[2][NUM_FORMATS])(PACK_PARAMETERS) = {
    {keys_fp32, keys_bf16, keys_e4m3, keys_e5m2, keys_int8, 0},
    {0, keys_bf16_pairs, keys_e4m3_pairs, keys_e5m2_pairs, keys_int8_pairs, 0},
};
static void (*const value_packers[2][NUM_FORMATS])(PACK_PARAMETERS) = {
    {values_fp32, values_bf16, values_e4m3, values_e5m2, values_int8, values_int4},
    {0, values_bf16_pairs, values_e4m3_pairs, values_e5m2_pairs, values_int8_pairs, values_int4_pairs},
};

#define SCORE_PARAMETERS const uint32_t *queries, const vf *keys, vf *scores, int64_t words
#define MIX_PARAMETERS vf *acc, const float *keep, const uint32_t *weights, const void *const *values, int64_t d, \
                       int64_t words, int64_t dim, const void *const *next

/* scores[m][:] = query row m times all keys. */
INLINE void score_panel(SCORE_PARAMETERS, const int M, const int pairs) {
    for (int64_t t = 0; t < TILE / LANES; t += WIDE) {
        vf sums[PANEL][WIDE] = {{{0}}};
        for (int64_t w = 0; w < words; w++) {
            vf key[WIDE];
            UNROLL for (int j = 0; j < WIDE; j++) {
                key[j] = keys[w * (TILE / LANES) + t + j];
                HOLD(key[j]);
            }
            UNROLL for (int m = 0; m < M; m++) {
                vf query = (vf)(queries[w * PANEL + m] - (vu){0});
                HOLD(query);
                UNROLL for (int j = 0; j < WIDE; j++)
                    sums[m][j] = pairs ? dot_pairs(sums[m][j], query, key[j]) : sums[m][j] + query * key[j];
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int j = 0; j < WIDE; j++) scores[m * (TILE / LANES) + t + j] = sums[m][j];
    }
}

/* acc[m] = acc[m] * keep[m] + weights of row m times the values, N vectors of dims from `d` on; asks for the values
 * of the next tile's tokens meanwhile, if given. */
INLINE void mix_panel(MIX_PARAMETERS, const int M, const int N, const int pairs) {
    vf sums[PANEL][WIDE];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < N; j++) sums[m][j] = acc[(m * dim + d) / LANES + j] * keep[m];
    for (int64_t w = 0; w < words; w++) {
        vf value[WIDE];
        UNROLL for (int j = 0; j < N; j++) {
            value[j] = load(values[w], d + j * LANES, 0);
            HOLD(value[j]);
        }
        if (next) UNROLL for (int j = 0; j < N; j++) {
            if (pairs) __builtin_prefetch(at(next[2 * w + j % 2], d + j / 2 * 2 * LANES, 1), 0, 2);
            else __builtin_prefetch(at(next[w], d + j * LANES, 0), 0, 2);
        }
        UNROLL for (int m = 0; m < M; m++) {
            vf weight = (vf)(weights[m * TILE + w] - (vu){0});
            HOLD(weight);
            UNROLL for (int j = 0; j < N; j++)
                sums[m][j] = pairs ? dot_pairs(sums[m][j], weight, value[j]) : sums[m][j] + weight * value[j];
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < N; j++) acc[(m * dim + d) / LANES + j] = sums[m][j];
}

/* A function for each shape, called through a table: inlined, GCC keeps some of their sums in memory. */
#define SHAPE static __attribute__((noinline)) void
#define SCORE_SHAPE(M)                                                                                       \
    SHAPE score_fp32_##M(SCORE_PARAMETERS) { score_panel(queries, keys, scores, words, M, 0); }              \
    SHAPE score_pairs_##M(SCORE_PARAMETERS) { score_panel(queries, keys, scores, words, M, 1); }
#define MIX_SHAPE(M, N)                                                                                      \
    SHAPE mix_fp32_##M##N(MIX_PARAMETERS) { mix_panel(acc, keep, weights, values, d, words, dim, next, M, N, 0); } \
    SHAPE mix_pairs_##M##N(MIX_PARAMETERS) { mix_panel(acc, keep, weights, values, d, words, dim, next, M, N, 1); }
#if LANES == 16
#define MIX_SHAPES(M) MIX_SHAPE(M, 2) MIX_SHAPE(M, 3) MIX_SHAPE(M, 4)
#define MIX_TABLE(type, M) {0, 0, mix_##type##_##M##2, mix_##type##_##M##3, mix_##type##_##M##4}
#else
#define MIX_SHAPES(M) MIX_SHAPE(M, 2)
#define MIX_TABLE(type, M) {0, 0, mix_##type##_##M##2}
#endif
#define FOR_ALL(DO) DO(1) DO(2) DO(3) DO(4) DO(6)
FOR_ALL(SCORE_SHAPE)
FOR_ALL(MIX_SHAPES)

/* [pairs][rows]; 5 rows are done as 6, a panel has room for them. */
static void (*const score_shapes[2][PANEL + 1])(SCORE_PARAMETERS) = {
    {0, score_fp32_1, score_fp32_2, score_fp32_3, score_fp32_4, score_fp32_6, score_fp32_6},
    {0, score_pairs_1, score_pairs_2, score_pairs_3, score_pairs_4, score_pairs_6, score_pairs_6},
};
/* [pairs][rows][vectors] */
static void (*const mix_shapes[2][PANEL + 1][WIDE + 1])(MIX_PARAMETERS) = {
    {{0}, MIX_TABLE(fp32, 1), MIX_TABLE(fp32, 2), MIX_TABLE(fp32, 3), MIX_TABLE(fp32, 4), MIX_TABLE(fp32, 6),
     MIX_TABLE(fp32, 6)},
    {{0}, MIX_TABLE(pairs, 1), MIX_TABLE(pairs, 2), MIX_TABLE(pairs, 3), MIX_TABLE(pairs, 4), MIX_TABLE(pairs, 6),
     MIX_TABLE(pairs, 6)},
};

#endif
