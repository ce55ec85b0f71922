// The token with the highest logit, in one pass over the logits as the product gave them.
#pragma once
#include "vec.h"

// What a row may come to in place of a token.
constexpr int64_t NO_TOKEN = -1, NOT_FINITE = -2;

// `count` logits in `stretches` pairs of first and end, which are the ids to choose from. The
// lowest of equals, as of -0.0 and 0.0.
template <typename T>
static int64_t greedy_of_row(const T* logits, int64_t count, const int64_t* stretches,
                             int64_t num_stretches) {
    // Infinities and NaN become NaN, which stays; all else 0.
    vf zeros{};
    float zero = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) zeros += load(logits + i) * 0.0f;
    for (; i < count; i++) zero += value(logits[i]) * 0.0f;
    if (sum(zeros) + zero != 0.0f) return NOT_FINITE;
    int64_t best_stretch = -1;
    float best = 0;
    for (int64_t s = 0; s < num_stretches; s++) {
        int64_t at = stretches[2 * s];
        const int64_t end = stretches[2 * s + 1];
        float highest = value(logits[at]);
        if (at + LANES <= end) {
            vf high = load(logits + at);
            for (; at + LANES <= end; at += LANES) high = larger(high, load(logits + at));
            highest = largest(high);
        }
        for (; at < end; at++) highest = value(logits[at]) > highest ? value(logits[at]) : highest;
        if (best_stretch < 0 || highest > best) best = highest, best_stretch = s;
    }
    if (best_stretch < 0) return NO_TOKEN;
    int64_t at = stretches[2 * best_stretch];
    const int64_t end = stretches[2 * best_stretch + 1];
    for (; at + LANES <= end && largest(load(logits + at)) != best; at += LANES) {
    }
    while (value(logits[at]) != best) at++;
    return at;
}

template <typename T>
static void greedy(const T* logits, const int64_t* stretches, int64_t num_stretches,
                   int64_t* tokens, int64_t rows, int64_t count, int threads) {
#pragma omp parallel for num_threads(rows > 1 ? threads : 1) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = greedy_of_row(logits + r * count, count, stretches, num_stretches);
}
