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
