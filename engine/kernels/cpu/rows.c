/* What works on one row at a time: RMS norms and the gated activation. Rows are multiples of 16 numbers. */
#include "vectors.h"

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

/* Each q and k head of qkv[rows, (num_heads + 2 * num_kv) * dim] becomes its RMS norm. */
void baton_head_norm(void *qkv, const void *q_weight, const void *k_weight, int64_t rows, int64_t num_heads,
                     int64_t num_kv, int64_t dim, float eps, int bf16) {
#pragma omp parallel for schedule(static) if (rows > 32)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < num_heads + num_kv; h++) {
            void *head = at(qkv, (r * (num_heads + 2 * num_kv) + h) * dim, bf16);
            const void *weight = h < num_heads ? q_weight : k_weight;
            if (bf16) norm_row(0, head, weight, head, dim, eps, 1);
            else norm_row(0, head, weight, head, dim, eps, 0);
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
