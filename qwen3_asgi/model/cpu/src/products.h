// Products of a few rows with a block of columns: what fits in registers, in two ways. Every sum
// runs over the depth in order, whatever the number of rows: a row's result depends on it alone.
#pragma once
#include <type_traits>

#include "vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Rows that a product takes at once beside four vectors of columns.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 3;
// How far ahead, in bytes, a block that comes from memory is asked for.
constexpr int AHEAD = 2048;

// ROWS rows at once, then the rest in parts as even as can be: each part reads the panel again.
template <int ROWS, typename Work>
static inline void in_parts(int64_t rows, Work work) {
    int64_t row = 0;
    while (row < rows) {
        const int64_t left = rows - row, parts = (left + ROWS - 1) / ROWS;
        const int64_t here = (left + parts - 1) / parts;
        work(row, here);
        row += here;
    }
}

// Call `run` with `rows` (1 … MOST) as a constant.
template <int MOST, typename Run>
static inline void with_rows(int64_t rows, Run run) {
    if constexpr (MOST > 1) {
        if (rows < MOST) return with_rows<MOST - 1>(rows, run);
    }
    run(std::integral_constant<int, MOST>{});
}

// c[ROWS, N] (+)= a[ROWS, depth] @ b[depth, N], N = WIDE vectors; b is `ldb` wide, c `ldc`, a `lda`.
// In float, whatever b's elements are. With STREAM, b is read for the first time.
struct FloatProduct {
    typedef float item;
    template <typename T>
    static void pack_row(const T* row, int count, item* out) {
        for (int d = 0; d < count; d += LANES) store(out + d, load(row + d));
    }
    template <int ROWS, int WIDE, bool ADD, bool STREAM = false, typename B = item>
    static inline void multiply(const item* a, int lda, const B* b, int ldb, int depth, float* c,
                                int ldc) {
        vf acc[ROWS][WIDE];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++)
                acc[r][w] = ADD ? load(c + r * ldc + w * LANES) : vf{};
        for (int k = 0; k < depth; k++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++) {
                const B* at = b + k * ldb + w * LANES;
                if (STREAM) __builtin_prefetch((const char*)at + AHEAD);
                vf v = load(at);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; r++) acc[r][w] += a[r * lda + k] * v;
            }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++) store(c + r * ldc + w * LANES, acc[r][w]);
    }
};

#ifdef __AVX512BF16__
// The same with bf16 factors, two of the depth to an instruction; b holds pairs of its rows.
struct PairProduct {
    typedef bf16 item;
    static void pack_row(const bf16* row, int count, item* out) {
        memcpy(out, row, count * sizeof(bf16));
    }
    template <int ROWS, int WIDE, bool ADD, bool STREAM = false>
    static inline void multiply(const item* a, int lda, const item* b, int ldb, int depth,
                                float* c, int ldc) {
        __m512 acc[ROWS][WIDE];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++)
                acc[r][w] = ADD ? _mm512_loadu_ps(c + r * ldc + w * 16) : _mm512_setzero_ps();
        for (int k = 0; k < depth; k += 2) {
            __m512bh v[WIDE];
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++) {
                const item* at = b + (k / 2 * ldb + w * 16) * 2;
                if (STREAM) __builtin_prefetch((const char*)at + AHEAD);
                v[w] = (__m512bh)_mm512_loadu_si512(at);
            }
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                memcpy(&pair, a + r * lda + k, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int w = 0; w < WIDE; w++) acc[r][w] = _mm512_dpbf16_ps(acc[r][w], both, v[w]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < WIDE; w++) _mm512_storeu_ps(c + r * ldc + w * 16, acc[r][w]);
    }
};
#endif
