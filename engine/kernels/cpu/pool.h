/* The paged pool as one layer sees it: [num_blocks][kv head][run of keys, run of values], bytes as core.kv.KVLayout
 * says. */
#ifndef BATON_POOL_H
#define BATON_POOL_H

#include "kv_numbers.h"

typedef struct {
    char *layer;          /* first byte of the layer in block 0 */
    int64_t block_nbytes; /* from one block to the next */
    int64_t key_nbytes, value_nbytes; /* of a run */
    int64_t key_format, value_format;
    int64_t num_kv_heads, block_size, head_dim;
} Pool;

/* The keys or values of one head in one block: where the first token's numbers, its scale and its zero are. */
typedef struct {
    char *numbers, *scales, *zeros;
    int64_t token_nbytes; /* from one token's numbers to the next */
} Run;

INLINE Run run_of(const Pool *pool, int64_t block, int64_t head, int values) {
    const int64_t format = values ? pool->value_format : pool->key_format;
    char *numbers = pool->layer + block * pool->block_nbytes + head * (pool->key_nbytes + pool->value_nbytes) +
                    (values ? pool->key_nbytes : 0);
    const int64_t token_nbytes = numbers_nbytes(pool->head_dim, format);
    char *scales = numbers + pool->block_size * token_nbytes;
    return (Run){numbers, scales, scales + pool->block_size * 2, token_nbytes};
}

#endif
