/* One query row a sequence, one pass over its blocks with a running softmax (Milakov and Gimelshein 2018).
 *
 * head_dim is a multiple of 32 and at most MAX_HEAD_DIM, block_size a multiple of 8. Slots past the end
 * of a sequence are read but never used.
 */
#include "pool.h"

#define MAX_HEAD_DIM 256
#define MAX_GROUP 4      /* query heads of one KV head that share one pass over K and V */
#define RUNS (LANES / 8) /* runs of 8 tokens, which never cross a block, in LANES tokens */
#define LOWEST (-1e30f)  /* a score nobody has; finite, so that differences never are NaN */

/* scores[g] of LANES tokens, each 8 in a run of rows that starts at k[i]. `next`: runs wanted soon. A block's
 * layer is a short run somewhere in the pool, so without asking ahead each one starts with a cache miss. */
INLINE void score(const float *q, const void *layer, const int64_t k[RUNS], const int64_t next[RUNS], int64_t dim,
                  vf *scores, const int G, const int kv_bf16) {
    vf dots[MAX_GROUP][LANES];
    UNROLL for (int t = 0; t < LANES; t += 4) {
        vf part[MAX_GROUP][4] = {{{0}}};
        for (int64_t d = 0; d < dim; d += LANES) {
            vf keys[4];
            UNROLL for (int u = 0; u < 4; u++) {
                const int64_t at_row = (t % 8 + u) * dim + d;
                keys[u] = load(layer, k[t / 8] + at_row, kv_bf16);
                __builtin_prefetch(at(layer, next[t / 8] + at_row, kv_bf16), 0, 2);
            }
            UNROLL for (int g = 0; g < G; g++) {
                vf query = load(q, g * dim + d, 0);
                UNROLL for (int u = 0; u < 4; u++) part[g][u] += query * keys[u];
            }
        }
        UNROLL for (int g = 0; g < G; g++)
            UNROLL for (int u = 0; u < 4; u++) dots[g][t + u] = part[g][u];
    }
    UNROLL for (int g = 0; g < G; g++) scores[g] = sum_each(dots[g]);
}

/* acc[g][:] = acc[g][:] * keep[g] + sum over the first n of LANES tokens of weights[g][t] * V[t][:]. */
INLINE void add_values(vf (*acc)[MAX_HEAD_DIM / LANES], const float *keep, const vf *weights, const void *layer,
                       const int64_t v[RUNS], const int64_t next[RUNS], int64_t n, int64_t dim, const int G,
                       const int kv_bf16) {
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        vf low[MAX_GROUP], high[MAX_GROUP];
        UNROLL for (int g = 0; g < G; g++) {
            low[g] = acc[g][d / LANES] * keep[g];
            high[g] = acc[g][d / LANES + 1] * keep[g];
        }
        for (int64_t t = 0; t < n; t++) {
            const int64_t at_row = t % 8 * dim + d, row = v[t / 8] + at_row;
            vf a = load(layer, row, kv_bf16), b = load(layer, row + LANES, kv_bf16);
            __builtin_prefetch(at(layer, next[t / 8] + at_row, kv_bf16), 0, 2);
            __builtin_prefetch(at(layer, next[t / 8] + at_row + LANES, kv_bf16), 0, 2);
            UNROLL for (int g = 0; g < G; g++) {
                const float weight = ((const float *)&weights[g])[t];
                low[g] += a * weight;
                high[g] += b * weight;
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            acc[g][d / LANES] = low[g];
            acc[g][d / LANES + 1] = high[g];
        }
    }
}

/* Where the runs of K and V of the LANES tokens from `first` on start; past the end, some run of the sequence. */
INLINE void find_tokens(const Pool *pool, int64_t head, const int32_t *table, int64_t kv_len, int64_t first,
                        int64_t k[RUNS], int64_t v[RUNS]) {
    for (int i = 0; i < RUNS; i++, first += 8) {
        const int64_t token = first < kv_len ? first : (kv_len - 1) / 8 * 8;
        k[i] = row_of(pool, table[token / pool->block_size], head, token % pool->block_size);
        v[i] = k[i] + pool->block_size * pool->head_dim;
    }
}

/* G query heads q[G, head_dim] (scaled, fp32) of one KV head over one sequence -> out[G, head_dim].
 * `bf16` need not be constant: it is looked at once a sequence. */
INLINE void attend(const float *q, const Pool *pool, int64_t head, const int32_t *table, int64_t kv_len, void *out,
                   const int G, int bf16, const int kv_bf16) {
    vi lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    const int64_t dim = pool->head_dim;
    vf acc[MAX_GROUP][MAX_HEAD_DIM / LANES];
    vf totals[MAX_GROUP] = {{0}};
    float tops[MAX_GROUP];
    for (int g = 0; g < G; g++) tops[g] = LOWEST;
    memset(acc, 0, sizeof acc);
    int64_t next_k[RUNS], next_v[RUNS];
    find_tokens(pool, head, table, kv_len, 0, next_k, next_v);
    for (int64_t first = 0; first < kv_len; first += LANES) {
        const int64_t n = kv_len - first < LANES ? kv_len - first : LANES;
        int64_t k[RUNS], v[RUNS];
        memcpy(k, next_k, sizeof k);
        memcpy(v, next_v, sizeof v);
        find_tokens(pool, head, table, kv_len, first + LANES, next_k, next_v);
        vf scores[MAX_GROUP], weights[MAX_GROUP];
        float keep[MAX_GROUP];
        score(q, pool->layer, k, next_k, dim, scores, G, kv_bf16);
        UNROLL for (int g = 0; g < G; g++) {
            /* Selected, not multiplied away: unused slots may hold NaN. */
            vf s = pick(lane < (int32_t)n, scores[g], splat(LOWEST));
            const float top = highest(s);
            const float new_top = top > tops[g] ? top : tops[g];
            keep[g] = exp_each(splat(tops[g] - new_top))[0];
            weights[g] = pick(lane < (int32_t)n, exp_each(s - new_top), splat(0));
            totals[g] = totals[g] * keep[g] + weights[g];
            tops[g] = new_top;
        }
        add_values(acc, keep, weights, pool->layer, v, next_v, n, dim, G, kv_bf16);
    }
    for (int g = 0; g < G; g++) {
        const float scale = 1.0f / sum(totals[g]);
        for (int64_t d = 0; d < dim; d += LANES) store(out, g * dim + d, acc[g][d / LANES] * scale, bf16);
    }
}

INLINE void attend_heads(const void *q, const Pool *pool, int64_t head, const int32_t *table, int64_t kv_len,
                         void *out, int64_t group, int bf16, const int kv_bf16) {
    const int64_t dim = pool->head_dim;
    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
        const int64_t count = group - g < MAX_GROUP ? group - g : MAX_GROUP;
        float scaled[MAX_GROUP * MAX_HEAD_DIM];
        for (int64_t i = 0; i < count * dim; i += LANES) store(scaled, i, load(q, g * dim + i, bf16) * scale, 0);
        void *to = at(out, g * dim, bf16);
        if (count == 1) attend(scaled, pool, head, table, kv_len, to, 1, bf16, kv_bf16);
        if (count == 2) attend(scaled, pool, head, table, kv_len, to, 2, bf16, kv_bf16);
        if (count == 3) attend(scaled, pool, head, table, kv_len, to, 3, bf16, kv_bf16);
        if (count == 4) attend(scaled, pool, head, table, kv_len, to, 4, bf16, kv_bf16);
    }
}

/* Row i of qkv is sequence i; tables[i, :table_width] names its blocks. out[rows, num_heads * head_dim]. */
void baton_decode_attention(const void *qkv, void *out, const int32_t *tables, int64_t table_width,
                            const int32_t *kv_lens, int64_t rows, int64_t num_heads, const Pool *pool, int bf16,
                            int kv_bf16) {
    const int64_t num_kv = pool->num_kv_heads, group = num_heads / num_kv, dim = pool->head_dim;
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < rows * num_kv; task++) {
        const int64_t r = task / num_kv, h = task % num_kv;
        const void *q = at(qkv, (r * (num_heads + 2 * num_kv) + h * group) * dim, bf16);
        void *to = at(out, (r * num_heads + h * group) * dim, bf16);
        const int32_t *table = tables + r * table_width;
        if (kv_bf16) attend_heads(q, pool, h, table, kv_lens[r], to, group, bf16, 1);
        else attend_heads(q, pool, h, table, kv_lens[r], to, group, bf16, 0);
    }
}
