// Attention of one query row per sequence (decode), reading KV where it lies in its blocks.
//
// A long sequence is cut into splits of fixed length, so that several threads share it; parts are
// merged by their log-sum-exp (Dao et al. 2023, Flash-Decoding). Neither depends on the thread
// count or on the other sequences.
#pragma once
#include "decode_rows.h"

static inline int64_t splits_of(const Span& span) { return (span.start + SPLIT) / SPLIT; }

// One split for GROUP query heads of one KV head. `out` is [GROUP, D + 2]: the unnormalised sum,
// the highest score, the sum of weights.
template <typename T, int D, int GROUP>
static void decode_part(const Step& step, const Span& span, const T* queries, const T* keys,
                        const T* values, int64_t split, float* out) {
    typedef typename RowsOf<T, D>::type R;
    const float scale = 1.0f / std::sqrt((float)D);
    const int64_t first = split * SPLIT, rest = span.start + 1 - first;
    const int count = rest < SPLIT ? (int)rest : SPLIT;
    int64_t slots[SPLIT];
    float logits[GROUP * SPLIT], acc[GROUP * D] = {};
    typename R::weight weights[GROUP * SPLIT];
    find_slots(step, span, first, count, slots);
    R::template scores<T, D, GROUP>(queries, keys, slots, count, logits);
    for (int g = 0; g < GROUP; g++) {
        const float* row = logits + g * SPLIT;
        vf high = all(-INFINITY), total{};
        for (int i = 0; i < count; i += LANES)
            high = larger(high, (iota() + i < count) ? load(row + i) * scale : all(-INFINITY));
        const float best = largest(high);
        for (int i = 0; i < count; i += LANES) {
            vf p = vexp(load(row + i) * scale - best);
            p = (iota() + i < count) ? p : vf{};
            store(weights + g * SPLIT + i, p);
            total += p;
        }
        out[g * (D + 2) + D] = best;
        out[g * (D + 2) + D + 1] = sum(total);
    }
    R::template weighted<T, D, GROUP>(weights, values, slots, count, acc);
    for (int g = 0; g < GROUP; g++) R::template sort<D>(acc + g * D, out + g * (D + 2));
}

// All query heads of a KV head, up to four at once: more rows than that do not fit in registers.
template <typename T, int D>
static void decode_group(const Step& step, const Layer<T>& layer, const Span& span, int64_t head,
                         int64_t split, float* out) {
    const int64_t group = step.heads / step.kv_heads;
    const int64_t width = step.heads + 2 * step.kv_heads;
    const T* queries = layer.qkv + (span.first * width + head * group) * D;
    const T* keys = layer.keys + head * step.num_slots * D;
    const T* values = layer.values + head * step.num_slots * D;
    for (int64_t g = 0; g < group;) {
        const T* from = queries + g * D;
        float* into = out + g * (D + 2);
        if (group - g >= 4)
            decode_part<T, D, 4>(step, span, from, keys, values, split, into), g += 4;
        else if (group - g >= 2)
            decode_part<T, D, 2>(step, span, from, keys, values, split, into), g += 2;
        else
            decode_part<T, D, 1>(step, span, from, keys, values, split, into), g += 1;
    }
}

// Merge the splits of one query head; `parts` is `stride` floats from split to split.
template <typename T, int D>
static void merge_parts(const float* parts, int64_t count, int64_t stride, T* out) {
    float best = -INFINITY, total = 0, acc[D] = {};
    for (int64_t i = 0; i < count; i++)
        best = parts[i * stride + D] > best ? parts[i * stride + D] : best;
    for (int64_t i = 0; i < count; i++) {
        const float* part = parts + i * stride;
        const float weight = part[D] == best ? 1.0f : vexp(all(part[D] - best))[0];
        total += part[D + 1] * weight;
        for (int d = 0; d < D; d += LANES) store(acc + d, load(acc + d) + load(part + d) * weight);
    }
    for (int d = 0; d < D; d += LANES) store(out + d, load(acc + d) / total);
}
