/* Numbers as the pool stores them, one token of one head at a time: engine/kv_numbers.py in C.
 *
 * A constant named format is one of the enum below. Widened numbers are exact also in bf16 unless they are FP32;
 * those of scaled formats are the integers, for callers to multiply by the token's scale.
 */
#ifndef BATON_KV_NUMBERS_H
#define BATON_KV_NUMBERS_H

#include "vectors.h"

enum { FP32, BF16, E4M3, E5M2, INT8, INT4, NUM_FORMATS };

typedef uint8_t vb __attribute__((vector_size(LANES)));

INLINE int64_t numbers_nbytes(int64_t count, int64_t format) {
    return format == FP32 ? 4 * count : format == BF16 ? 2 * count : format == INT4 ? count / 2 : count;
}

/* Numbers from their codes, the low 8 bits of each lane or of INT4 the low 4; but for INT8 no others may be set. */
INLINE vf widen(vu code, const int format) {
    if (format == INT8) return __builtin_convertvector((vi)(code << 24) >> 24, vf);
    if (format == INT4) return __builtin_convertvector((vi)code, vf);
    const int mantissa = format == E4M3 ? 3 : 2, bias = format == E4M3 ? 7 : 15;
    const vu size = code & 0x7f, sign = (code & 0x80) << 24;
    const float smallest = format == E4M3 ? 0x1p-9f : 0x1p-16f;
    const vf subnormal = __builtin_convertvector((vi)size, vf) * smallest;
    vf x = (vf)((size << (23 - mantissa)) + ((127u - (uint32_t)bias) << 23));
    x = pick((vi)size < (1 << mantissa), subnormal, x);
    if (format == E4M3) x = pick((vi)size == 0x7f, splat(__builtin_nanf("")), x);
    else x = pick((vi)size >= 0x7c, (vf)(size << 21 | 0x7f800000u), x);
    return (vf)((vu)x | sign);
}

/* LANES bytes. GCC 12 takes generic vectors of them apart one by one. */
INLINE vu load_bytes(const void *p) {
#if LANES == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
#else
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vu);
#endif
}

/* LANES 4-bit codes from i on, a multiple of LANES: of 16 numbers in 8 bytes, the first 8 are in the low halves. */
INLINE vu load_halves(const void *p, int64_t i) {
    const char *eight = (const char *)p + i / 16 * 8;
#if LANES == 16
    const vu upper = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
    int64_t bytes;
    memcpy(&bytes, eight, 8);
    return (vu)_mm512_cvtepu8_epi32(_mm_set1_epi64x(bytes)) >> upper & 15;
#else
    return load_bytes(eight) >> (uint32_t)(i % 16 / 2) & 15;
#endif
}

/* LANES numbers of a token from its number i on, a multiple of LANES. */
INLINE vf load_numbers(const void *p, int64_t i, const int format) {
    if (format == FP32 || format == BF16) return load(p, i, format == BF16);
    return widen(format == INT4 ? load_halves(p, i) : load_bytes((const char *)p + i), format);
}

/* Two vectors of fp32 numbers that are exact in bf16, as pairs of bf16 numbers. */
INLINE vf pair(vf low, vf high) { return (vf)((vu)low >> 16 | ((vu)high & 0xffff0000u)); }

/* LANES pairs of neighbouring numbers from pair w on, in bf16. */
INLINE vf load_pairs(const void *p, int64_t w, const int format) {
    if (format == BF16) return load(p, w, 0);
    vh both;
    memcpy(&both, (const char *)p + 2 * w, sizeof both);
    const vu codes = __builtin_convertvector(both, vu);
    if (format == INT8) /* the upper one's sign is bit 15 */
        return pair(widen(codes, INT8), __builtin_convertvector((vi)(codes << 16) >> 24, vf));
    return pair(widen(codes & 0xff, format), widen(codes >> 8, format));
}

INLINE vf least_of(vf a, float b) { return -higher(-a, splat(-b)); }

/* The 8-bit code of each number, rounded to nearest even, NaN for NaN; beyond the largest number that one. */
INLINE vu narrow(vf x, const int format) {
    const int mantissa = format == E4M3 ? 3 : 2, bias = format == E4M3 ? 7 : 15, shift = 23 - mantissa;
    const vf size = least_of((vf)((vu)x & 0x7fffffffu), format == E4M3 ? 448.0f : 57344.0f);
    const vu bits = (vu)size, sign = (vu)x >> 24 & 0x80;
    vu normal = (bits + ((1u << (shift - 1)) - 1) + (bits >> shift & 1)) >> shift;
    normal -= (127u - (uint32_t)bias) << mantissa;
    /* Added to this power of two, a subnormal's rounded integer is the sum's last bits. */
    const vu subnormal = (vu)(size + (format == E4M3 ? 0x1p14f : 0x1p7f)) & 0xf;
    vf code = pick(size < (format == E4M3 ? 0x1p-6f : 0x1p-14f), (vf)subnormal, (vf)normal);
    return (vu)pick(x == x, (vf)((vu)code | sign), (vf)((vu){0} + 0x7f));
}

/* Rounded to nearest even, for numbers below 2^22. */
INLINE vf nearest(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23 */
    return x + magic - magic;
}

INLINE void store_codes(void *to, int64_t i, vu codes) {
    const vb bytes = __builtin_convertvector(codes, vb);
    memcpy((char *)to + i, &bytes, sizeof bytes);
}

INLINE vf clamped(vf x, float least, float most) { return least_of(higher(x, splat(least)), most); }

/* Stores width / levels as bf16 and returns it as stored; infinity, which makes all numbers zeros, for a token that
 * counts as zeros or is not finite. */
INLINE float put_scale(void *scale, float width, float levels, int finite) {
    const float given = !finite ? __builtin_nanf("") : width <= 1e-30f ? 0 : width / levels;
    store_one(scale, 0, given, 1);
    return finite && given != 0 ? load_one(scale, 0, 1) : __builtin_inff();
}

/* Integers least .. most. A product with the scale's reciprocal would round otherwise than torch. */
INLINE vu steps_of(vf x, float scale, float zero, float least, float most, int finite) {
    const vf steps = clamped(nearest(x / scale + zero), least, most);
    return finite ? (vu)__builtin_convertvector(steps, vi) : (vu){0};
}

/* `count` numbers of a token, a multiple of 16, into the pool; `from` is fp32 or bf16. */
INLINE void put_numbers(const void *from, int64_t count, void *numbers, void *scale, void *zero, const int bf16,
                        const int format) {
    if (format == FP32 || format == BF16) {
        for (int64_t i = 0; i < count; i += LANES) store(numbers, i, load(from, i, bf16), format == BF16);
        return;
    }
    if (format == E4M3 || format == E5M2) {
        for (int64_t i = 0; i < count; i += LANES) store_codes(numbers, i, narrow(load(from, i, bf16), format));
        return;
    }
    vf top = splat(0), bottom = splat(0), check = splat(0);
    for (int64_t i = 0; i < count; i += LANES) {
        const vf x = load(from, i, bf16);
        top = higher(x, top), bottom = higher(-x, bottom), check += x - x;
    }
    const float high = highest(top), low = highest(bottom);
    const int finite = sum(check) == 0;
    if (format == INT8) {
        const float step = put_scale(scale, high > low ? high : low, 127.0f, finite);
        for (int64_t i = 0; i < count; i += LANES)
            store_codes(numbers, i, steps_of(load(from, i, bf16), step, 0, -127, 127, finite));
        return;
    }
    const float step = put_scale(scale, low + high, 15.0f, finite);
    const uint32_t middle = steps_of(splat(16 * low), step, 0, 0, 240, finite)[0];
    *(uint8_t *)zero = (uint8_t)middle;
    for (int64_t i = 0; i < count; i += 16) {
        uint64_t halves[2];
        for (int64_t j = 0; j < 16; j += LANES)
            store_codes((char *)halves, j, steps_of(load(from, i + j, bf16), step, middle / 16.0f, 0, 15, finite));
        const uint64_t both = halves[0] | halves[1] << 4;
        memcpy((char *)numbers + i / 2, &both, 8);
    }
}

#endif
