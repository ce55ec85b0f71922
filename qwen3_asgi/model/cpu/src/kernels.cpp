// The C interface of the CPU kernels; `kernels.py` is its only caller and has checked everything.
// Every function may run on several threads at once: nothing is kept between calls but scratch
// memory of the calling thread.
#include <cmath>
#include <type_traits>
#include <vector>

#include "rows.h"
#include "decode.h"
#include "chunk.h"
#include "int8.h"
#include "linear.h"

struct ChunkTask {
    int64_t span, head, from, count;
};

struct DecodeTask {
    int64_t span, head, split, part;
};

// What one layer does between its qkv and its output projection.
template <typename T, int D>
static void attention(const Step& step, const Layer<T>& layer) {
    const int64_t group = step.heads / step.kv_heads, width = step.heads + 2 * step.kv_heads;
    const int64_t part_size = group * (D + 2);
    std::vector<ChunkTask> chunks;
    std::vector<DecodeTask> decodes;
    int64_t parts = 0;
    std::vector<int64_t> first_part(step.num_spans, -1);
    for (int64_t s = 0; s < step.num_spans; s++) {
        const Span& span = step.spans[s];
        if (span.length == 1 && !step.uniform) {
            first_part[s] = parts;
            for (int64_t head = 0; head < step.kv_heads; head++)
                for (int64_t i = 0; i < splits_of(span); i++)
                    decodes.push_back({s, head, i, parts++});
            continue;
        }
        const int64_t size = BLOCK_ROWS / group, blocks = (span.length + size - 1) / size;
        // Last block first: it looks back furthest, and the longest task should not begin last.
        for (int64_t block = blocks - 1; block >= 0; block--)
            for (int64_t head = 0; head < step.kv_heads; head++) {
                const int64_t from = block * size, rest = span.length - from;
                chunks.push_back({s, head, from, rest < size ? rest : size});
            }
    }
    static thread_local std::vector<float> scratch;
    if (scratch.size() < (size_t)(parts * part_size)) scratch.resize(parts * part_size);
    float* found = scratch.data();
    const int64_t num_chunks = chunks.size(), num_decodes = decodes.size();
#pragma omp parallel num_threads((int)step.threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < step.tokens * step.kv_heads; task++) {
            const int64_t token = task / step.kv_heads, head = task % step.kv_heads;
            T* row = layer.qkv + token * width * D;
            const float *cos = step.cos + token * D, *sin = step.sin + token * D;
            for (int64_t h = head * group; h < (head + 1) * group; h++)
                norm_rotate<T, D>(row + h * D, layer.qk_norm + h * D, cos, sin, (float)step.eps);
            const int64_t h = step.heads + head, at = (head * step.num_slots + step.slots[token]) * D;
            norm_rotate<T, D>(row + h * D, layer.qk_norm + h * D, cos, sin, (float)step.eps);
            memcpy(layer.keys + at, row + h * D, D * sizeof(T));
            memcpy(layer.values + at, row + (h + step.kv_heads) * D, D * sizeof(T));
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_chunks; i++) {
            const ChunkTask& task = chunks[i];
            chunk_block<T, D>(step, layer, step.spans[task.span], task.head, task.from, task.count);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_decodes; i++) {
            const DecodeTask& task = decodes[i];
            decode_group<T, D>(step, layer, step.spans[task.span], task.head, task.split,
                               found + task.part * part_size);
        }
#pragma omp for schedule(static)
        for (int64_t s = 0; s < step.num_spans; s++) {
            if (first_part[s] < 0) continue;
            const Span& span = step.spans[s];
            const int64_t count = splits_of(span);
            for (int64_t h = 0; h < step.heads; h++)
                merge_parts<T, D>(
                    found + (first_part[s] + h / group * count) * part_size + h % group * (D + 2),
                    count, part_size, layer.out + (span.first * step.heads + h) * D);
        }
    }
}

template <typename T>
static int attention_of(const Step& step, void* qkv, const void* qk_norm, void* keys, void* values,
                        void* out) {
    const Layer<T> layer{(T*)qkv, (const T*)qk_norm, (T*)keys, (T*)values, (T*)out};
    switch (step.head_dim) {
        case 16: return attention<T, 16>(step, layer), 0;
        case 32: return attention<T, 32>(step, layer), 0;
        case 64: return attention<T, 64>(step, layer), 0;
        case 128: return attention<T, 128>(step, layer), 0;
    }
    return 1;
}

#pragma GCC visibility push(default)
extern "C" {

int qwen3_attention(const Step* step, int wide, void* qkv, const void* qk_norm, void* keys,
                    void* values, void* out) {
    return wide ? attention_of<float>(*step, qkv, qk_norm, keys, values, out)
                : attention_of<bf16>(*step, qkv, qk_norm, keys, values, out);
}

void qwen3_add_norm(int wide, void* x, const void* delta, const void* weight, void* out,
                    int64_t rows, int64_t width, double eps, int threads) {
    if (wide)
        add_norm((float*)x, (const float*)delta, (const float*)weight, (float*)out, rows, width,
                 (float)eps, threads);
    else
        add_norm((bf16*)x, (const bf16*)delta, (const bf16*)weight, (bf16*)out, rows, width,
                 (float)eps, threads);
}

void qwen3_silu_mul(int wide, const void* fused, void* out, int64_t rows, int64_t width,
                    int threads) {
    if (wide)
        silu_mul((const float*)fused, (float*)out, rows, width, threads);
    else
        silu_mul((const bf16*)fused, (bf16*)out, rows, width, threads);
}

int qwen3_panel(void) { return PANEL; }

// Whether 8-bit weights are multiplied by a kernel.
int qwen3_has_int8(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

void qwen3_pack(int wide, const void* source, void* panels, int64_t columns, int64_t depth,
                int threads) {
    if (wide)
        pack_panels((const float*)source, (float*)panels, columns, depth, threads);
    else
        pack_panels((const bf16*)source, (bf16*)panels, columns, depth, threads);
}

void qwen3_rows(int wide, const void* panels, const int64_t* ids, void* out, int64_t count,
                int64_t depth, int threads) {
    if (wide)
        panel_rows((const float*)panels, ids, (float*)out, count, depth, threads);
    else
        panel_rows((const bf16*)panels, ids, (bf16*)out, count, depth, threads);
}

void qwen3_linear(int wide, const void* x, const void* panels, void* y, int64_t rows,
                  int64_t columns, int64_t depth, int threads) {
    if (wide)
        linear((const float*)x, (const float*)panels, (float*)y, rows, columns, depth, threads);
    else
        linear((const bf16*)x, (const bf16*)panels, (bf16*)y, rows, columns, depth, threads);
}

void qwen3_pack_int8(int wide, const void* source, int8_t* panels, float* scales, int32_t* sums,
                     int64_t columns, int64_t depth, int threads) {
    if (wide)
        pack_int8((const float*)source, panels, scales, sums, columns, depth, threads);
    else
        pack_int8((const bf16*)source, panels, scales, sums, columns, depth, threads);
}

void qwen3_int8_linear(int wide, const void* x, const int8_t* panels, const float* scales,
                       const int32_t* sums, void* y, int64_t rows, int64_t columns, int64_t depth,
                       int threads) {
#ifdef __AVX512VNNI__
    if (wide)
        int8_linear((const float*)x, panels, scales, sums, (float*)y, rows, columns, depth,
                    threads);
    else
        int8_linear((const bf16*)x, panels, scales, sums, (bf16*)y, rows, columns, depth, threads);
#endif
}
}
#pragma GCC visibility pop
