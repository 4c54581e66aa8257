/* The paged pool as one layer sees it: [num_blocks][kv head][K | V][block_size][head_dim]. */
#ifndef BATON_POOL_H
#define BATON_POOL_H

#include "vectors.h"

typedef struct {
    void *layer;          /* first number of the layer in block 0 */
    int64_t block_stride; /* numbers from one block to the next */
    int64_t num_kv_heads, block_size, head_dim;
} Pool;

INLINE int64_t row_of(const Pool *pool, int64_t block, int64_t head, int64_t offset) {
    return block * pool->block_stride + (2 * head * pool->block_size + offset) * pool->head_dim;
}

#endif
