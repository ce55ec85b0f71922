// What a layer does between its qkv and its output projection, for all sequences of a step.
#pragma once
#include <vector>

#include "chunk.h"
#include "decode.h"
#include "rows.h"
#include "scratch.h"

struct ChunkTask {
    int64_t span, head, from, count;
};

struct DecodeTask {
    int64_t span, head, split, part;
};

// A step's work in parts that threads take as they come; the same for all layers.
struct Tasks {
    std::vector<ChunkTask> chunks;
    std::vector<DecodeTask> decodes;
    std::vector<int64_t> first_part;  // of each span, -1 for a chunk
    int64_t parts = 0;

    explicit Tasks(const Step& step) : first_part(step.num_spans, -1) {
        const int64_t group = step.heads / step.kv_heads;
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
    }

    // Floats that the parts of the decoded rows take.
    size_t part_floats(const Step& step) const {
        return (size_t)(parts * (step.heads / step.kv_heads) * (step.head_dim + 2));
    }
};

template <typename T, int D>
TEAM void attention_of_dim(const Step& step, const Tasks& tasks, const Layer<T>& layer,
                           float* found) {
    const int64_t group = step.heads / step.kv_heads, width = step.heads + 2 * step.kv_heads;
    const int64_t part_size = group * (D + 2);
    const int64_t num_chunks = tasks.chunks.size(), num_decodes = tasks.decodes.size();
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
        const ChunkTask& task = tasks.chunks[i];
        chunk_block<T, D>(step, layer, step.spans[task.span], task.head, task.from, task.count);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_decodes; i++) {
        const DecodeTask& task = tasks.decodes[i];
        decode_group<T, D>(step, layer, step.spans[task.span], task.head, task.split,
                           found + task.part * part_size);
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < step.num_spans; s++) {
        if (tasks.first_part[s] < 0) continue;
        const Span& span = step.spans[s];
        const int64_t count = splits_of(span);
        for (int64_t h = 0; h < step.heads; h++) {
            const int64_t part = tasks.first_part[s] + h / group * count;
            merge_parts<T, D>(found + part * part_size + h % group * (D + 2), count, part_size,
                              layer.out + (span.first * step.heads + h) * D);
        }
    }
}

// Whether there is one for heads this wide.
static inline bool has_attention(int64_t head_dim) {
    return head_dim == 16 || head_dim == 32 || head_dim == 64 || head_dim == 128;
}

// `found` has room for `Tasks::part_floats`.
template <typename T>
static void attention_of_team(const Step& step, const Tasks& tasks, const Layer<T>& layer,
                              float* found) {
    switch (step.head_dim) {
        case 16: return attention_of_dim<T, 16>(step, tasks, layer, found);
        case 32: return attention_of_dim<T, 32>(step, tasks, layer, found);
        case 64: return attention_of_dim<T, 64>(step, tasks, layer, found);
        case 128: return attention_of_dim<T, 128>(step, tasks, layer, found);
    }
}

template <typename T>
static void attention(const Step& step, const Layer<T>& layer) {
    static thread_local Scratch<float> scratch;
    const Tasks tasks(step);
    float* found = scratch.of(tasks.part_floats(step));
#pragma omp parallel num_threads((int)step.threads)
    attention_of_team(step, tasks, layer, found);
}
