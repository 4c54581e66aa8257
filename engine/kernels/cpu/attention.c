/* Causal attention over the paged pool, for prompts and single tokens alike (Dao et al. 2022, with the running
 * softmax of Milakov and Gimelshein 2018).
 *
 * head_dim is a multiple of 16, 32 to MAX_HEAD_DIM; block_size a multiple of 8. A row's numbers are added up in an
 * order that depends on its position alone, so that its result is the same bit for bit in every batch and however
 * its prompt is cut. Only blocks that some row of a tile sees are read, and of these only the tokens it sees count.
 */
#include "attention_tile.h"

#define LOWEST (-1e30f) /* a score nobody has; finite, so that differences never are NaN */

static _Thread_local Scratch scratch;

/* Rows of one sequence and KV head: `count` from `first` on, in the order token, then query head of the group. */
typedef struct {
    const void *qkv; /* first row of the sequence, first query head of the group */
    void *out;
    int64_t first, count, group, qkv_stride, out_stride, past;
} Rows;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE void take_queries(Scratch *s, const Rows *rows, int64_t dim, int bf16, const int pairs) {
    for (int64_t i = 0; i < rows->count; i++) {
        const int64_t token = (rows->first + i) / rows->group, member = (rows->first + i) % rows->group;
        const void *from = at(rows->qkv, token * rows->qkv_stride + member * dim, bf16);
        const int64_t words = pairs ? dim / 2 : dim;
        uint32_t *to = s->queries + i / PANEL * PANEL * words + i % PANEL;
        s->positions[i] = (int32_t)(rows->past + token);
        s->tops[i] = LOWEST;
        s->totals[i] = splat(0);
        for (int64_t w = 0; w < words; w++) {
            if (bf16 && !pairs) to[w * PANEL] = (uint32_t)((const uint16_t *)from)[w] << 16;
            else memcpy(to + w * PANEL, (const char *)from + 4 * w, 4);
        }
    }
    memset(s->acc, 0, (size_t)(rows->count * dim) * sizeof(float));
}

INLINE void store_rows(const Scratch *s, const Rows *rows, int64_t dim, int bf16) {
    for (int64_t i = 0; i < rows->count; i++) {
        const int64_t token = (rows->first + i) / rows->group, member = (rows->first + i) % rows->group;
        void *to = at(rows->out, token * rows->out_stride + member * dim, bf16);
        const float scale = 1.0f / sum(s->totals[i]);
        for (int64_t d = 0; d < dim; d += LANES) store(to, d, s->acc[(i * dim + d) / LANES] * scale, bf16);
    }
}

/* Which of the LANES tokens from `token` on a row sees. */
INLINE vi sees(int64_t token, int64_t position, int64_t window) {
    vi lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    const int32_t ahead = (int32_t)(position - token), behind = (int32_t)(window > 0 ? ahead - window : -1);
    return (lane <= ahead) & (lane > behind);
}

/* scores[count][TILE] of rows from `row` on -> their weights, and s->keep. `factor` includes log2(e). Scales of keys
 * are applied to scores, those of values to weights: far fewer numbers, and the rest of the product is exact. */
INLINE void weigh(Scratch *s, int64_t row, int64_t count, int64_t tile, int64_t window, float factor,
                  const int pairs, const int scaled) {
    for (int64_t i = 0; i < count; i++) {
        vf *scores = s->scores + i * (TILE / LANES);
        const int64_t position = s->positions[row + i];
        if (scaled) UNROLL for (int t = 0; t < TILE / LANES; t++) scores[t] *= s->key_scales[t];
        if (tile + TILE - 1 > position || (window > 0 && tile <= position - window))
            for (int64_t t = 0; t < TILE / LANES; t++)
                scores[t] = pick(sees(tile + t * LANES, position, window), scores[t], splat(LOWEST));
        vf top = scores[0];
        UNROLL for (int t = 1; t < TILE / LANES; t++) top = higher(top, scores[t]);
        const float old = s->tops[row + i], new = highest(top) * factor;
        s->tops[row + i] = new > old ? new : old;
        s->keep[i] = old - s->tops[row + i];
    }
    for (int64_t i = 0; i < count; i += LANES) store(s->keep, i, exp2_each(load(s->keep, i, 0)), 0);
    for (int64_t i = 0; i < count; i++) {
        vf *scores = s->scores + i * (TILE / LANES), total = s->totals[row + i] * s->keep[i];
        const float top = s->tops[row + i];
        const int64_t position = s->positions[row + i];
        const int partly = tile + TILE - 1 > position || (window > 0 && tile <= position - window);
        UNROLL for (int t = 0; t < TILE / LANES; t++) {
            vf weight = exp2_each(scores[t] * factor - top);
            if (partly) weight = pick(sees(tile + t * LANES, position, window), weight, splat(0));
            total += weight;
            if (scaled) weight *= s->value_scales[t];
            store(scores, t * LANES, weight, pairs);
        }
        s->totals[row + i] = total;
    }
}

/* One tile of tokens for the rows of a strip; only the first asks for the values of the next tile, if given. */
INLINE void attend_strip(Scratch *s, const Tokens *next, int64_t row, int64_t count, int64_t tile, int64_t window,
                         float factor, int64_t dim, const int pairs, const int scaled) {
    const int64_t words = pairs ? dim / 2 : dim, last = s->positions[row + count - 1];
    if (last < tile || (window > 0 && s->positions[row] - window >= tile + TILE - 1)) return;
    vf *scores = s->scores;
    for (int64_t i = 0; i < count; i += PANEL, scores += PANEL * TILE / LANES)
        score_shapes[pairs][least(count - i, PANEL)](s->queries + (row + i) * words, s->keys, scores, words);
    weigh(s, row, count, tile, window, factor, pairs, scaled);
    for (int64_t i = 0; i < count; i += PANEL) {
        const int64_t n = least(count - i, PANEL), seen = s->positions[row + i + n - 1] + 1 - tile;
        const int64_t tokens = least(seen < 0 ? 0 : seen, TILE);
        const uint32_t *weights = (const uint32_t *)(s->scores + i * (TILE / LANES));
        for (int64_t d = 0; d < dim;) { /* in even steps of 2 to WIDE vectors */
            const int64_t left = (dim - d) / LANES, steps = (left + WIDE - 1) / WIDE;
            const int64_t wide = (left + steps - 1) / steps;
            mix_shapes[pairs][n][wide](s->acc + (row + i) * dim / LANES, s->keep + i, weights, s->value_rows, d,
                                       pairs ? (tokens + 1) / 2 : tokens, dim, row + i == 0 && next ? next->v : 0);
            d += wide * LANES;
        }
    }
}

INLINE void attend(const Rows *rows, const Pool *pool, int64_t head, const int32_t *table, int64_t window, int bf16,
                   const int pairs, const int scaled) {
    Scratch *s = &scratch;
    const int64_t dim = pool->head_dim;
    const int ask_late = pool->value_format == FP32 || pool->value_format == BF16;
    const float factor = 1.44269504f / __builtin_sqrtf((float)dim);
    take_queries(s, rows, dim, bf16, pairs);
    const int64_t end = s->positions[rows->count - 1] + 1;
    const int64_t first = window > 0 && s->positions[0] >= window ? s->positions[0] - window + 1 : 0;
    Tokens tokens[2];
    int64_t tile = first / TILE * TILE;
    find_tokens(&tokens[0], pool, head, table, tile, first, end);
    for (int now = 0; tile < end; tile += TILE, now = !now) {
        const Tokens *here = &tokens[now], *next = &tokens[!now];
        find_tokens(&tokens[!now], pool, head, table, tile + TILE, first, end);
        key_packers[pairs][pool->key_format](s, here, next, dim);
        value_packers[pairs][pool->value_format](s, here, next, dim);
        if (scaled) {
            take_scales(s->key_scales, here->key_scales, tile, first, end);
            take_scales(s->value_scales, here->value_scales, tile, first, end);
        }
        for (int64_t row = 0; row < rows->count; row += STRIP)
            attend_strip(s, ask_late ? next : 0, row, least(rows->count - row, STRIP), tile, window, factor, dim,
                         pairs, scaled);
    }
    store_rows(s, rows, dim, bf16);
}

INLINE int64_t tasks_of(int64_t tokens, int64_t group, int64_t num_kv) {
    return num_kv * ((tokens * group + ROWS - 1) / ROWS);
}

/* Sequence i has rows row_starts[i] to row_starts[i + 1] of qkv and of out[rows, num_heads * head_dim], which are
 * the last of its kv_lens[i] tokens; tables[i, :table_width] names its blocks. A token sees itself and the
 * window - 1 tokens before it, all of them with a window of 0. */
void baton_attention(const void *qkv, void *out, const int32_t *row_starts, const int32_t *kv_lens,
                     const int32_t *tables, int64_t table_width, int64_t num_seqs, int64_t num_heads,
                     const Pool *pool, int64_t window, int bf16) {
    const int64_t num_kv = pool->num_kv_heads, group = num_heads / num_kv, dim = pool->head_dim;
    const int pairs = bf16 && pool->key_format != FP32, scaled = pool->key_format == INT8;
    const int64_t qkv_stride = (num_heads + 2 * num_kv) * dim, out_stride = num_heads * dim;
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < num_seqs; i++) num_tasks += tasks_of(row_starts[i + 1] - row_starts[i], group, num_kv);
#pragma omp parallel for schedule(dynamic) if (num_tasks > 1)
    for (int64_t task = 0; task < num_tasks; task++) {
        int64_t seq = 0, left = task, here;
        while (left >= (here = tasks_of(row_starts[seq + 1] - row_starts[seq], group, num_kv))) left -= here, seq++;
        const int64_t head = left % num_kv, first = left / num_kv * ROWS, row = row_starts[seq];
        const int64_t tokens = row_starts[seq + 1] - row, count = tokens * group - first;
        const Rows rows = {at(qkv, row * qkv_stride + head * group * dim, bf16),
                           at(out, row * out_stride + head * group * dim, bf16),
                           first, least(count, ROWS), group, qkv_stride, out_stride, kv_lens[seq] - tokens};
        const int32_t *table = tables + seq * table_width;
        if (pairs && scaled) attend(&rows, pool, head, table, window, 1, 1, 1);
        else if (pairs) attend(&rows, pool, head, table, window, 1, 1, 0);
        else if (scaled) attend(&rows, pool, head, table, window, 0, 0, 1);
        else attend(&rows, pool, head, table, window, bf16, 0, 0);
    }
}
