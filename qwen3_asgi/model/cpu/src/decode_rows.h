// The two products of decoding, for GROUP query rows that share their keys: queries · keys, and
// weights · values. Rows of KV are read where they lie, once.
#pragma once
#include <cmath>
#include <type_traits>

#include "pool.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// A part has at most this many keys. Long ones keep the processor reading ahead: it has to find its
// way anew with every change between keys and values.
constexpr int SPLIT = 512;

// In float, for every element type.
struct FloatRows {
    typedef float weight;

    // Scores against `count` keys, and zeros up to a whole vector.
    template <typename T, int D, int GROUP>
    static inline void scores(const T* queries, const T* keys, const int64_t* slots, int count,
                              float* out) {
        for (int first = 0; first < count; first += LANES) {
            vf acc[GROUP][LANES];
            const int here = count - first < LANES ? count - first : LANES;
            if (here < LANES) memset(acc, 0, sizeof acc);
            for (int t = 0; t < here; t++) {
                const T* key = keys + slots[first + t] * D;
                vf total[GROUP] = {};
                for (int c = 0; c < D; c += LANES) {
                    vf k = load(key + c);
                    for (int g = 0; g < GROUP; g++) total[g] += load(queries + g * D + c) * k;
                }
                for (int g = 0; g < GROUP; g++) acc[g][t] = total[g];
            }
            for (int g = 0; g < GROUP; g++) store(out + g * SPLIT + first, sums(acc[g]));
        }
    }

    // out[g] += weights[g] · values; the order of a row's floats is this struct's own until `sort`.
    template <typename T, int D, int GROUP>
    static inline void weighted(const weight* weights, const T* values, const int64_t* slots,
                                int count, float* out) {
        constexpr int WIDE = D / LANES < 4 ? D / LANES : 4;
        for (int c = 0; c < D; c += WIDE * LANES) {
            vf acc[GROUP][WIDE];
            for (int g = 0; g < GROUP; g++)
                for (int w = 0; w < WIDE; w++) acc[g][w] = load(out + g * D + c + w * LANES);
            for (int t = 0; t < count; t++) {
                const T* value = values + slots[t] * D + c;
                for (int w = 0; w < WIDE; w++) {
                    vf v = load(value + w * LANES);
                    for (int g = 0; g < GROUP; g++) acc[g][w] += weights[g * SPLIT + t] * v;
                }
            }
            for (int g = 0; g < GROUP; g++)
                for (int w = 0; w < WIDE; w++) store(out + g * D + c + w * LANES, acc[g][w]);
        }
    }

    template <int D>
    static inline void sort(const float* from, float* into) {
        memcpy(into, from, D * sizeof(float));
    }
};

#ifdef __AVX512BF16__
// bf16 in pairs: of dimensions for the scores, of positions for the values.
struct PairRows {
    typedef bf16 weight;

    template <typename T, int D, int GROUP>
    static inline void scores(const T* queries, const T* keys, const int64_t* slots, int count,
                              float* out) {
        for (int first = 0; first < count; first += 16) {
            vf acc[GROUP][16];
            const int here = count - first < 16 ? count - first : 16;
            if (here < 16) memset(acc, 0, sizeof acc);
            for (int t = 0; t < here; t++) {
                const T* key = keys + slots[first + t] * D;
                __m512 total[GROUP];
                for (int g = 0; g < GROUP; g++) total[g] = _mm512_setzero_ps();
                for (int c = 0; c < D; c += 32) {
                    const __m512bh k = pairs(key + c);
                    for (int g = 0; g < GROUP; g++)
                        total[g] = _mm512_dpbf16_ps(total[g], pairs(queries + g * D + c), k);
                }
                for (int g = 0; g < GROUP; g++) acc[g][t] = (vf)total[g];
            }
            for (int g = 0; g < GROUP; g++) store(out + g * SPLIT + first, sums(acc[g]));
        }
    }

    template <typename T, int D, int GROUP>
    static inline void weighted(const weight* weights, const T* values, const int64_t* slots,
                                int count, float* out) {
        constexpr int MOST = GROUP > 2 ? 2 : 4;
        constexpr int WIDE = D / 32 < MOST ? D / 32 : MOST;
        for (int c = 0; c < D; c += WIDE * 32) {
            __m512 acc[GROUP][2 * WIDE];
            for (int g = 0; g < GROUP; g++)
                for (int w = 0; w < 2 * WIDE; w++)
                    acc[g][w] = _mm512_loadu_ps(out + g * D + c + w * 16);
            for (int t = 0; t < count; t += 2) {
                const T* even = values + slots[t] * D + c;
                // The weight of a position beyond the last is 0, but what lies there may be NaN.
                const bool whole = t + 1 < count;
                const T* odd = whole ? values + slots[t + 1] * D + c : even;
                for (int w = 0; w < WIDE; w++) {
                    const __m512i a = _mm512_loadu_si512(even + w * 32);
                    const __m512i b =
                        whole ? _mm512_loadu_si512(odd + w * 32) : _mm512_setzero_si512();
                    const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
                    const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
                    for (int g = 0; g < GROUP; g++) {
                        int32_t both;
                        memcpy(&both, weights + g * SPLIT + t, sizeof both);
                        const __m512bh p = (__m512bh)_mm512_set1_epi32(both);
                        acc[g][2 * w] = _mm512_dpbf16_ps(acc[g][2 * w], p, low);
                        acc[g][2 * w + 1] = _mm512_dpbf16_ps(acc[g][2 * w + 1], p, high);
                    }
                }
            }
            for (int g = 0; g < GROUP; g++)
                for (int w = 0; w < 2 * WIDE; w++)
                    _mm512_storeu_ps(out + g * D + c + w * 16, acc[g][w]);
        }
    }

    // Interleaving leaves fours of dimensions alternately in the low and the high vector.
    template <int D>
    static inline void sort(const float* from, float* into) {
        for (int d = 0; d < D; d += 4) {
            const int place = d / 32 * 32 + d / 4 % 2 * 16 + d % 32 / 8 * 4;
            memcpy(into + d, from + place, 4 * sizeof(float));
        }
    }

   private:
    static inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
};
#endif

template <typename T, int D>
struct RowsOf {
    typedef FloatRows type;
};
#ifdef __AVX512BF16__
template <int D>
struct RowsOf<bf16, D> {
    typedef std::conditional_t<D % 32 == 0, PairRows, FloatRows> type;
};
#endif
