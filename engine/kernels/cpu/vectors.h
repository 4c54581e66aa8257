/* Vectors of LANES fp32 numbers, and loads and stores that widen and round bf16.
 *
 * The vectors are GCC's generic ones, so any instruction set compiles. A flag named bf16 is constant
 * after inlining: 1 for bf16 numbers in memory, 0 for fp32.
 */
#ifndef BATON_VECTORS_H
#define BATON_VECTORS_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

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
#if defined(__AVX512BF16__) && LANES == 16
        __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
        vu bits = (vu)v;
        vh half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vh);
#endif
        memcpy((uint16_t *)p + i, &half, sizeof half);
    } else {
        memcpy((float *)p + i, &v, sizeof v);
    }
}

INLINE float load_one(const void *p, int64_t i, int bf16) {
    if (!bf16) return ((const float *)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
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

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf higher(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE float highest(vf v) {
#if LANES == 16
    v = higher(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = higher(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = higher(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = higher(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
    v = higher(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = higher(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = higher(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
    return v[0];
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

#define SHUFFLE_PAIR(a, b, low, high)                                                                     \
    do {                                                                                                   \
        vf one = __builtin_shufflevector(a, b, low), two = __builtin_shufflevector(a, b, high);            \
        a = one, b = two;                                                                                  \
    } while (0)

/* Lane j of v[i] becomes lane i of v[j]: squares of 4 by 4 lanes, then the squares among each other. */
INLINE void transpose(vf v[LANES]) {
#if LANES == 16
#define NUMBERS_LOW LIST(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define NUMBERS_HIGH LIST(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define PAIRS_LOW LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define PAIRS_HIGH LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define FOURS_LOW LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define FOURS_HIGH LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#else
#define NUMBERS_LOW LIST(0, 8, 1, 9, 4, 12, 5, 13)
#define NUMBERS_HIGH LIST(2, 10, 3, 11, 6, 14, 7, 15)
#define PAIRS_LOW LIST(0, 1, 8, 9, 4, 5, 12, 13)
#define PAIRS_HIGH LIST(2, 3, 10, 11, 6, 7, 14, 15)
#define FOURS_LOW LIST(0, 1, 2, 3, 8, 9, 10, 11)
#define FOURS_HIGH LIST(4, 5, 6, 7, 12, 13, 14, 15)
#endif
    UNROLL for (int i = 0; i < LANES; i += 2) SHUFFLE_PAIR(v[i], v[i + 1], NUMBERS_LOW, NUMBERS_HIGH);
    UNROLL for (int i = 0; i < LANES; i += 4) {
        SHUFFLE_PAIR(v[i], v[i + 2], PAIRS_LOW, PAIRS_HIGH);
        SHUFFLE_PAIR(v[i + 1], v[i + 3], PAIRS_LOW, PAIRS_HIGH);
        vf second = v[i + 2];
        v[i + 2] = v[i + 1];
        v[i + 1] = second;
    }
    UNROLL for (int far = 4; far < LANES; far *= 2)
        UNROLL for (int i = 0; i < LANES; i += 2 * far)
            UNROLL for (int j = i; j < i + far; j++) SHUFFLE_PAIR(v[j], v[j + far], FOURS_LOW, FOURS_HIGH);
}

/* 2^x for x <= 0 to about 2e-7 relative, exactly 1 for 0, down to at most 2^-126 for what is smaller. */
INLINE vf exp2_each(vf x) {
#if LANES == 16
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = higher(x, splat(-126.0f));
    vf n = x + magic;
    vi exponent = (vi)n - (vi)magic;
    n -= magic;
#endif
    vf r = x - n;
    /* Least largest relative error on [-0.5, 0.5] of all polynomials of this degree that are 1 at 0. */
    vf p = splat(1.32647273e-3f);
    p = p * r + 9.67151274e-3f;
    p = p * r + 5.55073374e-2f;
    p = p * r + 0.240222421f;
    p = p * r + 0.693146978f;
    p = p * r + 1.0f;
#if LANES == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vf)((exponent + 127) << 23);
#endif
}

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

#endif
