/* y[m, n] = sum over k of x[m, k] * w[n, k], for few rows m, which is bound by reading w.
 *
 * k is a multiple of 32. Numbers are fp32 or bf16, sums always fp32.
 */
#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* s[i] + x[2i] * y[2i] + x[2i+1] * y[2i+1], where x and y are pairs of bf16 numbers in a vf's bits. */
INLINE vf dot_pairs(vf s, vf x, vf y) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vf)_mm512_dpbf16_ps((__m512)s, (__m512bh)x, (__m512bh)y);
#else
    vu a = (vu)x, b = (vu)y;
    return s + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

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
