// y = x @ w for weights in 8 bits, with a float scale per column: half the bytes to read.
//
// The factors of a row are brought to 15 bits, the highest of the row being full scale, and these
// are cut into two unsigned bytes, so that both products run in integers, four of the depth to an
// instruction: x = (128 * (high - 128) + low) * step. Integers are exact in any order. What is
// lost against x in bf16 (8 bits each) is far below what the weights have lost.
#pragma once
#include <omp.h>

#include <cmath>

#include "linear.h"

// The 15 bits without a sign: 127 * 128.
constexpr float FULL_SCALE = 16256.0f;

// Up to so many rows are split by every thread for itself: that takes less than waiting for another.
constexpr int64_t SPLIT_ALONE = 4;

static inline int64_t copies_of_split(int64_t rows, int64_t threads) {
    return rows <= SPLIT_ALONE ? threads : 1;
}

static inline int64_t int8_place(int64_t k, int64_t column) {
    return (k / 4 * PANEL + column) * 4 + k % 4;
}

// Weights [columns, depth] in, panels out: a column's highest weight becomes 127. `sums` are those
// of the 8-bit weights, `scales` and `sums` are whole panels long.
template <typename T>
static void pack_int8(const T* source, int8_t* panels, float* scales, int32_t* sums,
                      int64_t columns, int64_t depth, int threads) {
    const int64_t count = panels_of(columns);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < count; p++) {
        int8_t* panel = panels + p * PANEL * depth;
        for (int64_t column = 0; column < PANEL; column++) {
            const int64_t at = p * PANEL + column;
            const T* row = source + at * depth;
            vf high{};
            if (at < columns)
                for (int64_t k = 0; k < depth; k += LANES) {
                    vf v = load(row + k);
                    high = larger(high, v < 0.0f ? -v : v);
                }
            const float scale = largest(high) / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
            int32_t total = 0;
            for (int64_t k = 0; k < depth; k += LANES) {
                vf v = at < columns ? load(row + k) * inverse : vf{};
                for (int i = 0; i < LANES; i++) {
                    const int q = (int)std::nearbyint(v[i]);
                    panel[int8_place(k + i, column)] = (int8_t)q;
                    total += q;
                }
            }
            scales[at] = scale;
            sums[at] = total;
        }
    }
}

#ifdef __AVX512VNNI__
// Bytes of a row, and the step between two of its values; a row with an infinity or a NaN has no
// step, and gives NaN.
template <typename T>
static float split_row(const T* x, int64_t depth, uint8_t* high, uint8_t* low) {
    vf highest{}, zero{};
    for (int64_t k = 0; k < depth; k += LANES) {
        vf v = load(x + k);
        highest = larger(highest, v < 0.0f ? -v : v);
        zero += v * 0.0f;
    }
    if (sum(zero) != 0.0f) {
        memset(high, 0, depth), memset(low, 0, depth);
        return NAN;
    }
    const float most = largest(highest);
    // Below this the quotient would not be finite; such a row is nothing beside any other.
    const float scale = most > 1e-30f ? FULL_SCALE / most : 0.0f;
    for (int64_t k = 0; k < depth; k += LANES) {
        const __m512i q = _mm512_cvtps_epi32((__m512)(load(x + k) * scale));
        const __m512i upper = _mm512_add_epi32(_mm512_srai_epi32(q, 7), _mm512_set1_epi32(128));
        const __m512i lower = _mm512_and_si512(q, _mm512_set1_epi32(127));
        _mm_storeu_si128((__m128i*)(high + k), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i*)(low + k), _mm512_cvtepi32_epi8(lower));
    }
    return most / FULL_SCALE;
}

// Sums of ROWS rows with a panel, [ROWS, 4] vectors of both bytes. Unrolled by force: the compiler
// would keep the sums in memory.
template <int ROWS>
static inline void int8_sums(const uint8_t* high, const uint8_t* low, int64_t depth,
                             const int8_t* panel, __m512i (*high_sums)[4],
                             __m512i (*low_sums)[4]) {
    __m512i upper[ROWS][4], lower[ROWS][4];
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) upper[r][w] = lower[r][w] = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 4) {
        __m512i v[4];
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            const int8_t* at = panel + k * PANEL + w * 64;
            __builtin_prefetch(at + AHEAD);
            v[w] = _mm512_loadu_si512(at);
        }
#pragma GCC unroll 3
        for (int r = 0; r < ROWS; r++) {
            int32_t a, b;
            memcpy(&a, high + r * depth + k, sizeof a);
            memcpy(&b, low + r * depth + k, sizeof b);
            const __m512i four_high = _mm512_set1_epi32(a), four_low = _mm512_set1_epi32(b);
#pragma GCC unroll 4
            for (int w = 0; w < 4; w++) {
                upper[r][w] = _mm512_dpbusd_epi32(upper[r][w], four_high, v[w]);
                lower[r][w] = _mm512_dpbusd_epi32(lower[r][w], four_low, v[w]);
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) high_sums[r][w] = upper[r][w], low_sums[r][w] = lower[r][w];
}

// What `int8_of_team` needs for `rows` rows.
struct Int8Rows {
    uint8_t* bytes;  // copies of [2, rows, depth]
    float* steps;    // copies of [rows]
};

template <typename T>
TEAM void int8_of_team(const T* x, Int8Rows held, const int8_t* panels, const float* scales,
                       const int32_t* sums, T* y, int64_t rows, int64_t columns, int64_t depth) {
    // Three rows fill the registers: two sums each.
    constexpr int MOST = 3;
    const int64_t copy = rows <= SPLIT_ALONE ? omp_get_thread_num() : 0;
    uint8_t *high = held.bytes + copy * 2 * rows * depth, *low = high + rows * depth;
    float* step = held.steps + copy * rows;
    const int64_t count = panels_of(columns);
    const int64_t row_tasks = (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    const auto split = [=](int64_t r) {
        step[r] = split_row(x + r * depth, depth, high + r * depth, low + r * depth);
    };
    if (rows <= SPLIT_ALONE) {
        for (int64_t r = 0; r < rows; r++) split(r);
    } else {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) split(r);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < count * row_tasks; task++) {
        const int64_t p = task / row_tasks, from = task % row_tasks * ROWS_PER_TASK;
        const int64_t some = rows - from < ROWS_PER_TASK ? rows - from : ROWS_PER_TASK;
        const int8_t* panel = panels + p * PANEL * depth;
        const int64_t width = rows_of(columns, p);
        in_parts<MOST>(some, [&](int64_t row, int64_t here) {
            __m512i upper[MOST][4], lower[MOST][4];
            const int64_t first = from + row;
            const uint8_t *a = high + first * depth, *b = low + first * depth;
            with_rows<MOST>(here, [&](auto constant) {
                constexpr int ROWS = decltype(constant)::value;
                int8_sums<ROWS>(a, b, depth, panel, upper, lower);
            });
            for (int64_t r = 0; r < here; r++) {
                float found[PANEL];
                for (int w = 0; w < 4; w++) {
                    const int64_t at = p * PANEL + w * LANES;
                    const __m512i offset = _mm512_slli_epi32(_mm512_loadu_si512(sums + at), 7);
                    vf h = (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(upper[r][w], offset));
                    vf l = (vf)_mm512_cvtepi32_ps(lower[r][w]);
                    store(found + w * LANES,
                          (h * 128.0f + l) * (load(scales + at) * step[first + r]));
                }
                put_row(found, y + (first + r) * columns + p * PANEL, width);
            }
        });
    }
}

template <typename T>
static void int8_linear(const T* x, const int8_t* panels, const float* scales, const int32_t* sums,
                        T* y, int64_t rows, int64_t columns, int64_t depth, int threads) {
    static thread_local Scratch<uint8_t> bytes;
    static thread_local Scratch<float> steps;
    const int64_t copies = copies_of_split(rows, threads);
    const Int8Rows held{bytes.of(copies * 2 * rows * depth), steps.of(copies * rows)};
#pragma omp parallel num_threads(threads)
    int8_of_team(x, held, panels, scales, sums, y, rows, columns, depth);
}
#endif
