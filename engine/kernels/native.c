/* CPU kernels of the decode step. Built on first use by engine/kernels/native_build.py, called through
 * ctypes with plain pointers; the meaning of each is that of its twin in engine/kernels/reference.py.
 *
 * Numbers are fp32 or bf16 (flag `bf16`, constant after inlining), sums always fp32. Row lengths are
 * multiples of 32 numbers, head dims at most MAX_HEAD_DIM, block sizes multiples of 8; the caller
 * checks. Vectors are GCC's generic ones, of LANES fp32 numbers, so any instruction set compiles.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MAX_HEAD_DIM 256
#define MAX_GROUP 4          /* query heads of one KV head that share one pass over K and V */
#define RUNS (LANES / 8)     /* runs of 8 tokens, which never cross a block, in LANES tokens */
#define LOWEST (-1e30f)      /* a score nobody has; finite, so that differences never are NaN */
#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
#define LANES 16
/* Keeps a vector in a register; GCC would read it from memory again at each use (82 against 106 GFLOP/s). */
#define HOLD(v) __asm__("" : "+v"(v))
#else
#define LANES 8
#define HOLD(v)
#endif
/* For loops whose bounds are constants, so that what they index lives in registers. */
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

/* ---- loads, stores, reductions ---- */

/* Address of number i of p. */
INLINE void *at(const void *p, int64_t i, int bf16) { return (char *)p + (i << (bf16 ? 1 : 2)); }

INLINE vf load(const void *p, int64_t i, int bf16) {
    if (bf16) {
        vh half;
        memcpy(&half, at(p, i, 1), sizeof half);
        return (vf)(__builtin_convertvector(half, vu) << 16);
    }
    vf v;
    memcpy(&v, at(p, i, 0), sizeof v);
    return v;
}

/* Rounds to nearest even. */
INLINE void store(void *p, int64_t i, vf v, int bf16) {
    if (bf16) {
        vu bits = (vu)v;
        vh half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vh);
        memcpy((uint16_t *)p + i, &half, sizeof half);
    } else {
        memcpy((float *)p + i, &v, sizeof v);
    }
}

INLINE void store_one(void *p, int64_t i, float x, int bf16) {
    if (bf16) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    } else {
        ((float *)p)[i] = x;
    }
}

#define ADD_HALVES(a, b, low, high) (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define LIST(...) __VA_ARGS__

/* Lane i of the result is the sum over all lanes of v[i]. Destroys v. Each round halves the vectors. */
INLINE vf sum_each(vf v[LANES]) {
#if LANES == 16
    UNROLL for (int i = 0; i < 8; i++)
        v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                          LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
    UNROLL for (int i = 0; i < 4; i++)
        v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    UNROLL for (int i = 0; i < 2; i++)
        v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                          LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    return ADD_HALVES(v[0], v[1], LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                      LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#else
    UNROLL for (int i = 0; i < 4; i++)
        v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15));
    UNROLL for (int i = 0; i < 2; i++)
        v[i] = ADD_HALVES(v[2 * i], v[2 * i + 1], LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15));
    return ADD_HALVES(v[0], v[1], LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15));
#endif
}

INLINE float sum(vf v) {
    float s = 0;
    UNROLL for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

INLINE float highest(vf v) {
    float m = v[0];
    UNROLL for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* e^x to about 1e-7 relative; x is clamped to +-87. */
INLINE vf exp_each(vf x) {
    x = pick(x < -87.0f, splat(-87.0f), x);
    x = pick(x > 87.0f, splat(87.0f), x);
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = x * 1.44269504f + magic;
    vi exponent = (vi)n - (vi)magic;
    n -= magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vf)((exponent + 127) << 23);
}

/* s[i] + x[2i] * y[2i] + x[2i+1] * y[2i+1], where x and y are pairs of bf16 numbers in a vf's bits. */
INLINE vf dot_pairs(vf s, vf x, vf y) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vf)_mm512_dpbf16_ps((__m512)s, (__m512bh)x, (__m512bh)y);
#else
    vu a = (vu)x, b = (vu)y;
    return s + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

/* ---- linear: y[m, n] = sum over k of x[m, k] * w[n, k], for few rows m ---- */

/* M x N results at once: every number of w is used M times, every number of x N times. `ahead`: also
 * fetch the next N rows of w; rows are too short for the hardware to see them coming. */
INLINE void linear_tile(const void *x, const void *w, void *y, int64_t n, int64_t k, const int M, const int N,
                        const int ahead, const int bf16, const int y_bf16) {
    vf sums[LANES] = {{0}};
    const int64_t stride = k << (bf16 ? 1 : 2);
    const char *wp = w, *xp = x;
    for (const char *end = wp + stride; wp < end; wp += sizeof(vf), xp += sizeof(vf)) {
        if (ahead) UNROLL for (int j = 0; j < N; j++) __builtin_prefetch(wp + (N + j) * stride, 0, 2);
        vf b[LANES];
        UNROLL for (int j = 0; j < N; j++) {
            memcpy(&b[j], wp + j * stride, sizeof(vf));
            HOLD(b[j]);
        }
        UNROLL for (int i = 0; i < M; i++) {
            vf a;
            memcpy(&a, xp + i * stride, sizeof(vf));
            HOLD(a);
            UNROLL for (int j = 0; j < N; j++) {
                vf *s = &sums[i * N + j];
                *s = bf16 ? dot_pairs(*s, a, b[j]) : *s + a * b[j];
            }
        }
    }
    vf totals = sum_each(sums);
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) store_one(y, i * n + j, totals[i * N + j], y_bf16);
}

/* All rows of a tile's sums fill the lanes of one vector: four rows of x by FEW of w, or two by twice as many. */
#define FEW (LANES / 4)

/* The first four rows of x, or all m; more than two only with N <= FEW. */
INLINE void linear_few(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, const int N,
                       const int ahead, const int bf16, const int y_bf16) {
    const int narrow = N < FEW ? N : FEW;
    if (m == 1) linear_tile(x, w, y, n, k, 1, N, ahead, bf16, y_bf16);
    else if (m == 2) linear_tile(x, w, y, n, k, 2, N, ahead, bf16, y_bf16);
    else if (m == 3) linear_tile(x, w, y, n, k, 3, narrow, ahead, bf16, y_bf16);
    else linear_tile(x, w, y, n, k, 4, narrow, ahead, bf16, y_bf16);
}

/* N rows of w against all rows of x; the first pass over w also fetches what comes next. */
INLINE void linear_rows(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, const int N,
                        const int bf16, const int y_bf16) {
    linear_few(x, w, y, m, n, k, N, 1, bf16, y_bf16);
    for (int64_t i = 4; i < m; i += 4)
        linear_few(at(x, i * k, bf16), w, at(y, i * n, y_bf16), m - i, n, k, N < FEW ? N : FEW, 0, bf16, y_bf16);
}

/* `count` rows of w: FEW, twice as many, or what is left at the end. */
INLINE void linear_block(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, int64_t count,
                         const int bf16, const int y_bf16) {
    if (count == 2 * FEW) linear_rows(x, w, y, m, n, k, 2 * FEW, bf16, y_bf16);
    else if (count == FEW) linear_rows(x, w, y, m, n, k, FEW, bf16, y_bf16);
    else
        for (int64_t j = 0; j < count; j++)
            linear_rows(x, at(w, j * k, bf16), at(y, j, y_bf16), m, n, k, 1, bf16, y_bf16);
}

void baton_linear(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, int bf16, int y_bf16) {
    const int64_t wide = m <= 2 ? 2 * FEW : FEW;
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < n; j += wide) {
        const void *rows = at(w, j * k, bf16);
        void *out = at(y, j, y_bf16);
        const int64_t count = n - j < wide ? n - j : wide;
        if (!bf16) linear_block(x, rows, out, m, n, k, count, 0, 0);
        else if (y_bf16) linear_block(x, rows, out, m, n, k, count, 1, 1);
        else linear_block(x, rows, out, m, n, k, count, 1, 0);
    }
}

/* ---- rows: RMS norm, gated activation ---- */

INLINE void norm_row(const void *delta, void *x, const void *weight, void *y, int64_t dim, float eps, const int bf16) {
    vf squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vf v = load(x, i, bf16);
        if (delta) {
            store(x, i, v + load(delta, i, bf16), bf16);
            v = load(x, i, bf16);
        }
        squares += v * v;
    }
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(y, i, load(x, i, bf16) * scale * load(weight, i, bf16), bf16);
}

/* x[rows, dim] += delta when delta is given; then y = rms_norm(x) * weight. */
void baton_rms_norm(const void *delta, void *x, const void *weight, void *y, int64_t rows, int64_t dim, float eps,
                    int bf16) {
#pragma omp parallel for schedule(static) if (rows > 32)
    for (int64_t r = 0; r < rows; r++) {
        const void *d = delta ? at(delta, r * dim, bf16) : 0;
        void *in = at(x, r * dim, bf16), *out = at(y, r * dim, bf16);
        if (bf16) norm_row(d, in, weight, out, dim, eps, 1);
        else norm_row(d, in, weight, out, dim, eps, 0);
    }
}

INLINE void silu_mul_row(const void *gate, const void *up, void *y, int64_t dim, const int bf16) {
    for (int64_t i = 0; i < dim; i += LANES) {
        vf g = load(gate, i, bf16);
        store(y, i, g / (1.0f + exp_each(-g)) * load(up, i, bf16), bf16);
    }
}

/* gate_up[rows, 2 * dim] -> y[rows, dim] = silu(first half) * second half. */
void baton_silu_mul(const void *gate_up, void *y, int64_t rows, int64_t dim, int bf16) {
#pragma omp parallel for schedule(static) if (rows > 32)
    for (int64_t r = 0; r < rows; r++) {
        const void *gate = at(gate_up, 2 * r * dim, bf16), *up = at(gate_up, (2 * r + 1) * dim, bf16);
        void *out = at(y, r * dim, bf16);
        if (bf16) silu_mul_row(gate, up, out, dim, 1);
        else silu_mul_row(gate, up, out, dim, 0);
    }
}

/* ---- the paged pool: one layer's [num_blocks][kv head][K | V][block_size][head_dim] ---- */

typedef struct {
    void *layer;          /* first number of the layer in block 0 */
    int64_t block_stride; /* numbers from one block to the next */
    int64_t num_kv_heads, block_size, head_dim;
} Pool;

INLINE int64_t row_of(const Pool *pool, int64_t block, int64_t head, int64_t offset) {
    return block * pool->block_stride + (2 * head * pool->block_size + offset) * pool->head_dim;
}

INLINE void rotate_head(void *head, const float *cos_sin, int64_t half, const int bf16) {
    for (int64_t i = 0; i < half; i += LANES) {
        vf low = load(head, i, bf16), high = load(head, half + i, bf16);
        vf c = load(cos_sin, i, 0), s = load(cos_sin, half + i, 0);
        store(head, i, low * c - high * s, bf16);
        store(head, half + i, high * c + low * s, bf16);
    }
}

INLINE void copy_head(const void *from, const Pool *pool, int64_t row, const int bf16, const int kv_bf16) {
    for (int64_t i = 0; i < pool->head_dim; i += LANES) store(pool->layer, row + i, load(from, i, bf16), kv_bf16);
}

INLINE void rope_and_store_row(void *qkv, const float *cos_sin, int64_t slot, int64_t num_heads, const Pool *pool,
                               const int bf16, const int kv_bf16) {
    const int64_t dim = pool->head_dim, num_kv = pool->num_kv_heads;
    for (int64_t h = 0; h < num_heads + num_kv; h++)
        rotate_head(at(qkv, h * dim, bf16), cos_sin, dim / 2, bf16);
    for (int64_t h = 0; h < num_kv; h++) {
        int64_t row = row_of(pool, slot / pool->block_size, h, slot % pool->block_size);
        copy_head(at(qkv, (num_heads + h) * dim, bf16), pool, row, bf16, kv_bf16);
        copy_head(at(qkv, (num_heads + num_kv + h) * dim, bf16), pool, row + pool->block_size * dim, bf16, kv_bf16);
    }
}

/* qkv[rows, (num_heads + 2 * num_kv_heads) * head_dim]; rope[position] = head_dim / 2 cosines, then sines. */
void baton_rope_and_store(void *qkv, const float *rope, const int64_t *positions, const int64_t *slots, int64_t rows,
                          int64_t num_heads, const Pool *pool, int bf16, int kv_bf16) {
    const int64_t width = (num_heads + 2 * pool->num_kv_heads) * pool->head_dim;
#pragma omp parallel for schedule(static) if (rows > 32)
    for (int64_t r = 0; r < rows; r++) {
        void *row = at(qkv, r * width, bf16);
        const float *cos_sin = rope + positions[r] * pool->head_dim;
        if (bf16 && kv_bf16) rope_and_store_row(row, cos_sin, slots[r], num_heads, pool, 1, 1);
        else if (bf16) rope_and_store_row(row, cos_sin, slots[r], num_heads, pool, 1, 0);
        else if (kv_bf16) rope_and_store_row(row, cos_sin, slots[r], num_heads, pool, 0, 1);
        else rope_and_store_row(row, cos_sin, slots[r], num_heads, pool, 0, 0);
    }
}

/* ---- decode attention: one query row a sequence, one pass over its blocks with a running softmax ---- */

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
INLINE void find_tokens(const Pool *pool, int64_t head, const int32_t *table, int64_t kv_len, int64_t first, int64_t k[RUNS],
                    int64_t v[RUNS]) {
    for (int i = 0; i < RUNS; i++, first += 8) {
        const int64_t token = first < kv_len ? first : (kv_len - 1) / 8 * 8;
        k[i] = row_of(pool, table[token / pool->block_size], head, token % pool->block_size);
        v[i] = k[i] + pool->block_size * pool->head_dim;
    }
}

/* G query heads q[G, head_dim] (scaled, fp32) of one KV head over one sequence -> out[G, head_dim]. */
INLINE void attend(const float *q, const Pool *pool, int64_t head, const int32_t *table, int64_t kv_len, void *out,
                   const int G, const int bf16, const int kv_bf16) {
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
                         void *out, int64_t group, const int bf16, const int kv_bf16) {
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
        if (bf16 && kv_bf16) attend_heads(q, pool, h, table, kv_lens[r], to, group, 1, 1);
        else if (bf16) attend_heads(q, pool, h, table, kv_lens[r], to, group, 1, 0);
        else if (kv_bf16) attend_heads(q, pool, h, table, kv_lens[r], to, group, 0, 1);
        else attend_heads(q, pool, h, table, kv_lens[r], to, group, 0, 0);
    }
}
