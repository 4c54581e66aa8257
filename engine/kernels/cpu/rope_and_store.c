/* Rotary embedding of q and k, and the way of k and v into the pool. head_dim is a multiple of 16. */
#include "pool.h"

INLINE void rotate_head(void *head, const float *cos_sin, int64_t half, const int bf16) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf low = load(head, i, bf16), high = load(head, half + i, bf16);
        vf c = load(cos_sin, i, 0), s = load(cos_sin, half + i, 0);
        store(head, i, low * c - high * s, bf16);
        store(head, half + i, high * c + low * s, bf16);
    }
    for (; i < half; i++) {
        const float low = load_one(head, i, bf16), high = load_one(head, half + i, bf16);
        const float c = cos_sin[i], s = cos_sin[half + i];
        store_one(head, i, low * c - high * s, bf16);
        store_one(head, half + i, high * c + low * s, bf16);
    }
}

/* One token's k and v. A function for each format, called through a table. */
#define STORE_PARAMETERS const char *qkv, int64_t slot, int64_t num_heads, const Pool *pool, int bf16
INLINE void store_token(STORE_PARAMETERS, const int keys, const int values) {
    const int64_t dim = pool->head_dim, num_kv = pool->num_kv_heads;
    const int64_t block = slot / pool->block_size, offset = slot % pool->block_size;
    for (int64_t h = 0; h < 2 * num_kv; h++) {
        const int is_value = h >= num_kv;
        const void *from = at(qkv, (num_heads + h) * dim, bf16);
        const Run run = run_of(pool, block, h % num_kv, is_value);
        char *numbers = run.numbers + offset * run.token_nbytes, *scale = run.scales + 2 * offset;
        if (is_value) put_numbers(from, dim, numbers, scale, run.zeros + offset, bf16, values);
        else put_numbers(from, dim, numbers, scale, 0, bf16, keys);
    }
}

#define STORE(name, keys, values)                                                  \
    static void store_##name(STORE_PARAMETERS) {                                   \
        if (bf16) store_token(qkv, slot, num_heads, pool, 1, keys, values);        \
        else store_token(qkv, slot, num_heads, pool, 0, keys, values);             \
    }
STORE(fp32, FP32, FP32)
STORE(bf16, BF16, BF16)
STORE(e4m3, E4M3, E4M3)
STORE(e5m2, E5M2, E5M2)
STORE(int8, INT8, INT8)
STORE(k8v4, INT8, INT4)

/* By the format of values, which no two KV dtypes share. */
static void (*const stores[NUM_FORMATS])(STORE_PARAMETERS) = {store_fp32, store_bf16, store_e4m3,
                                                              store_e5m2, store_int8, store_k8v4};

/* qkv[rows, (num_heads + 2 * num_kv_heads) * head_dim]; rope[position] = head_dim / 2 cosines, then sines. */
void baton_rope_and_store(void *qkv, const float *rope, const int64_t *positions, const int64_t *slots, int64_t rows,
                          int64_t num_heads, const Pool *pool, int bf16) {
    const int64_t dim = pool->head_dim, num_rotated = num_heads + pool->num_kv_heads;
    const int64_t width = (num_rotated + pool->num_kv_heads) * dim;
#pragma omp parallel for schedule(static) if (rows > 32)
    for (int64_t r = 0; r < rows; r++) {
        char *row = at(qkv, r * width, bf16);
        const float *cos_sin = rope + positions[r] * dim;
        for (int64_t h = 0; h < num_rotated; h++) {
            if (bf16) rotate_head(at(row, h * dim, 1), cos_sin, dim / 2, 1);
            else rotate_head(at(row, h * dim, 0), cos_sin, dim / 2, 0);
        }
        stores[pool->value_format](row, slots[r], num_heads, pool, bf16);
    }
}
