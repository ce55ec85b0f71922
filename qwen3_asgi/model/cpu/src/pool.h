// Where things lie: the step's description, as the Python side fills it, and the KV pool.
#pragma once
#include "vec.h"

// One sequence of the batch: `length` rows from `first`, at positions `start …`; its block ids
// begin at `table` in the step's tables.
struct Span {
    int64_t first, length, start, table;
};

// Filled once a step. `slots` is [tokens], cos and sin are [tokens, head_dim].
struct Step {
    int64_t tokens, heads, kv_heads, head_dim, block_size, num_slots, num_spans, threads, uniform;
    double eps;
    const float* cos;
    const float* sin;
    const int64_t* slots;
    const Span* spans;
    const int32_t* tables;
};

// Keys or values of a layer, [kv_heads, slots, D]; qkv is [tokens, heads + 2 kv_heads, D]; out is
// [tokens, heads, D].
template <typename T>
struct Layer {
    T* qkv;
    const T* qk_norm;
    T* keys;
    T* values;
    T* out;
};

// Keys are attended in tiles that begin at multiples of this position, whatever the chunk or the
// batch: the order of every sum is then a matter of the row's own position.
constexpr int TILE = 64;

// Slots of `count` positions from `first`.
static inline void find_slots(const Step& step, const Span& span, int64_t first, int count,
                              int64_t* slots) {
    const int32_t* table = step.tables + span.table;
    int64_t block = first / step.block_size, inside = first % step.block_size;
    for (int i = 0; i < count; i++) {
        slots[i] = (int64_t)table[block] * step.block_size + inside;
        if (++inside == step.block_size) inside = 0, block++;
    }
}
