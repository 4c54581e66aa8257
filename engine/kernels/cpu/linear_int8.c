/* y[m, n] = sum over k of x[m, k] * w[n, k] in int8: w with one scale a row, made once; x with one scale for
 * every GROUP numbers of a row, made here on the way.
 *
 * A group's sum is an exact integer, and groups are added in one order, each product rounded, so a row's results
 * are the same bits in every batch, team of threads and on every CPU.
 * w lies as the CPU's dot products of four bytes (VNNI) take it: panels of PANEL rows, in each panel
 * [k / 4][PANEL][4] bytes, offset by 128 because those instructions take one of the sides unsigned.
 * k is a multiple of 32.
 */
#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PANEL 32
#define GROUP 64
#define VECTORS (PANEL / LANES)
/* Rows of x at once: a group's sums fill three quarters (AVX-512) or half of the registers. */
#define ROWS (LANES == 16 ? 12 : 2)
/* Products that take one core about 0.1 ms, below which waking threads that sleep costs more than they save. */
#define WORTH_A_TEAM (1 << 24)

typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

/* A product is rounded before something is added to it, also where the CPU could do both at once. */
#ifdef __AVX__
#define ROUNDED(v) __asm__("" : "+x"(v))
#else
#define ROUNDED(v)
#endif

/* s[i] + the products of the four bytes of w[i], unsigned, with those of x[i], signed. */
INLINE vi dot_fours(vi s, vi w, vi x) {
#if defined(__AVX512VNNI__) && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && LANES == 8
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)w, (__m256i)x);
#else
    vs w_even = (vs)(w & 0x00ff00ff), w_odd = (vs)(((vu)w >> 8) & 0x00ff00ff);
    vs x_even = (vs)x << 8 >> 8, x_odd = (vs)x >> 8;
#if defined(__AVX512BW__) && LANES == 16
    return s + (vi)_mm512_madd_epi16((__m512i)w_even, (__m512i)x_even) +
           (vi)_mm512_madd_epi16((__m512i)w_odd, (__m512i)x_odd);
#elif defined(__AVX2__) && LANES == 8
    return s + (vi)_mm256_madd_epi16((__m256i)w_even, (__m256i)x_even) +
           (vi)_mm256_madd_epi16((__m256i)w_odd, (__m256i)x_odd);
#else
    s += ((vi)w_even & 0xffff) * ((vi)x_even << 16 >> 16) + ((vi)w_even >> 16) * ((vi)x_even >> 16);
    return s + ((vi)w_odd & 0xffff) * ((vi)x_odd << 16 >> 16) + ((vi)w_odd >> 16) * ((vi)x_odd >> 16);
#endif
#endif
}

/* Rows of x as int8; scales and starts: [m][groups]. A group's part of y is scale * (start + sum of products); the
 * start takes the 128 of w out again. */
typedef struct {
    int8_t *numbers;
    float *scales;
    int32_t *starts;
} Quantized;

INLINE vi larger(vi a, vi b) { return (vi)pick(a > b, (vf)a, (vf)b); }

/* Lane i of the result is v[i ^ distance]. */
INLINE vi exchanged(vi v, const int distance) {
    vi from;
    UNROLL for (int i = 0; i < LANES; i++) from[i] = i ^ distance;
    return __builtin_shuffle(v, from);
}

/* A group with NaN or an infinity in it gets such a scale, and with it results that are not finite either. */
INLINE void quantize_group(const void *x, int64_t first, int64_t count, int8_t *numbers, float *scale, int32_t *start,
                           const int bf16) {
    vi top = {0}, sums = {0};
    /* Compared as integers, magnitudes have the same order, and NaN is the highest. */
    for (int64_t i = 0; i < count; i += LANES) top = larger(top, (vi)load(x, first + i, bf16) & 0x7fffffff);
    UNROLL for (int distance = LANES / 2; distance; distance /= 2) top = larger(top, exchanged(top, distance));
    const float magnitude = ((vf)top)[0];
    const float inverse = magnitude > 1e-30f ? 127.0f / magnitude : 0.0f;
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = load(x, first + i, bf16) * inverse;
        ROUNDED(v);
        vi whole = (vi)(v + magic) - (vi)magic;
        sums += whole;
        vb bytes = __builtin_convertvector(whole, vb);
        memcpy(numbers + i, &bytes, sizeof bytes);
    }
    UNROLL for (int distance = LANES / 2; distance; distance /= 2) sums += exchanged(sums, distance);
    *scale = magnitude / 127.0f;
    *start = -128 * sums[0];
}

INLINE void quantize_row(const void *x, Quantized to, int64_t row, int64_t k, const int bf16) {
    const int64_t groups = (k + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * GROUP, count = k - first < GROUP ? k - first : GROUP, at = row * groups + g;
        quantize_group(x, first, count, to.numbers + row * k + first, to.scales + at, to.starts + at, bf16);
    }
}

/* `sums` [rows][PANEL] of rows `row` .. of x and one panel to results; `count` of the panel's rows exist. */
INLINE void scale_sums(const vf *sums, int64_t row, int64_t rows, const float *w_scales, void *y, int64_t n,
                       int64_t count, const int y_bf16) {
    for (int64_t r = row; r < row + rows; r++, sums += VECTORS)
        for (int64_t j = 0; j < count; j += LANES) {
            const vf out = sums[j / LANES] * load(w_scales, j, 0);
            if (count - j >= LANES) store(y, r * n + j, out, y_bf16);
            else
                for (int64_t i = 0; i < count - j; i++) store_one(y, r * n + j + i, out[i], y_bf16);
        }
}

/* M rows of x, from `row` on, by one panel: sums [M][PANEL]. */
INLINE void panel_tile(Quantized x, int64_t row, const uint8_t *w, int64_t k, vf *out, const int M) {
    const int64_t groups = (k + GROUP - 1) / GROUP;
    const int8_t *numbers = x.numbers + row * k;
    vf totals[ROWS * VECTORS] = {{0}};
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * GROUP, end = k - first < GROUP ? k : first + GROUP;
        const int64_t at = row * groups + g;
        vi sums[ROWS * VECTORS];
        UNROLL for (int r = 0; r < M; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = x.starts[at + r * groups] - (vi){0};
        for (int64_t i = first; i < end; i += 4, w += 4 * PANEL) {
            vi b[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) memcpy(&b[v], w + 4 * LANES * v, sizeof(vi));
            UNROLL for (int r = 0; r < M; r++) {
                int32_t four;
                memcpy(&four, numbers + r * k + i, sizeof four);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    vi *s = &sums[r * VECTORS + v];
                    *s = dot_fours(*s, b[v], four - (vi){0});
                }
            }
        }
        UNROLL for (int r = 0; r < M; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                vf part = __builtin_convertvector(sums[r * VECTORS + v], vf) * x.scales[at + r * groups];
                ROUNDED(part);
                totals[r * VECTORS + v] += part;
            }
    }
    memcpy(out, totals, M * VECTORS * sizeof(vf));
}

#define TILE(M) \
    case M: panel_tile(x, row, w, k, sums, M); break;

/* All rows of x by one panel, which stays in the cache meanwhile. */
static void panel_rows(Quantized x, int64_t m, const uint8_t *w, const float *w_scales, void *y, int64_t n,
                       int64_t count, int64_t k, int y_bf16) {
    vf sums[ROWS * VECTORS];
    for (int64_t row = 0; row < m; row += ROWS) {
        const int64_t rows = m - row < ROWS ? m - row : ROWS;
        switch (rows) {
            TILE(1) TILE(2)
#if LANES == 16
            TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
        }
        if (y_bf16) scale_sums(sums, row, rows, w_scales, y, n, count, 1);
        else scale_sums(sums, row, rows, w_scales, y, n, count, 0);
    }
}

/* `scratch`: m * (k + 8 * groups) bytes. bf16: of x; y_bf16: of y; else they are fp32. */
void baton_linear_int8(const void *x, const void *w, const void *w_scales, void *y, void *scratch, int64_t m,
                       int64_t n, int64_t k, int bf16, int y_bf16) {
    float *const scales = (float *)((char *)scratch + m * k);
    const Quantized rows = {scratch, scales, (int32_t *)(scales + m * ((k + GROUP - 1) / GROUP))};
#pragma omp parallel for schedule(static) if (m > 32)
    for (int64_t r = 0; r < m; r++) {
        if (bf16) quantize_row(at(x, r * k, 1), rows, r, k, 1);
        else quantize_row(at(x, r * k, 0), rows, r, k, 0);
    }
    /* Reading w takes as long as five rows of products. */
#pragma omp parallel for schedule(static) if ((m + 5) * n * k > WORTH_A_TEAM)
    for (int64_t j = 0; j < n; j += PANEL) {
        const int64_t count = n - j < PANEL ? n - j : PANEL;
        const uint8_t *panel = (const uint8_t *)w + j * k;
        panel_rows(rows, m, panel, (const float *)w_scales + j, at(y, j, y_bf16), n, count, k, y_bf16);
    }
}
