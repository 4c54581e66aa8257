/* y[m, n] = sum over k of x[m, k] * w[n, k]; with few rows m it is bound by reading w.
 *
 * k is a multiple of 32. Numbers are fp32 or bf16, sums always fp32.
 */
#include "vectors.h"

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

/* Twice FEW rows of w against many rows of x, which are read once for both halves. */
INLINE void linear_many(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, const int bf16,
                        const int y_bf16) {
    for (int64_t i = 0; i < m; i += 4)
        for (int64_t j = 0; j < 2 * FEW; j += FEW) {
            const void *rows = at(x, i * k, bf16), *weights = at(w, j * k, bf16);
            void *out = at(y, i * n + j, y_bf16);
            if (i == 0) linear_few(rows, weights, out, m, n, k, FEW, 1, bf16, y_bf16);
            else linear_few(rows, weights, out, m - i, n, k, FEW, 0, bf16, y_bf16);
        }
}

/* `count` rows of w: FEW, twice as many, or what is left at the end. */
INLINE void linear_block(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, int64_t count,
                         const int bf16, const int y_bf16) {
    if (count == 2 * FEW && m > 2) linear_many(x, w, y, m, n, k, bf16, y_bf16);
    else if (count == 2 * FEW) linear_rows(x, w, y, m, n, k, 2 * FEW, bf16, y_bf16);
    else if (count == FEW) linear_rows(x, w, y, m, n, k, FEW, bf16, y_bf16);
    else
        for (int64_t j = 0; j < count; j++)
            linear_rows(x, at(w, j * k, bf16), at(y, j, y_bf16), m, n, k, 1, bf16, y_bf16);
}

void baton_linear(const void *x, const void *w, void *y, int64_t m, int64_t n, int64_t k, int bf16, int y_bf16) {
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < n; j += 2 * FEW) {
        const void *rows = at(w, j * k, bf16);
        void *out = at(y, j, y_bf16);
        const int64_t count = n - j < 2 * FEW ? n - j : 2 * FEW;
        if (!bf16) linear_block(x, rows, out, m, n, k, count, 0, 0);
        else if (y_bf16) linear_block(x, rows, out, m, n, k, count, 1, 1);
        else linear_block(x, rows, out, m, n, k, count, 1, 0);
    }
}
