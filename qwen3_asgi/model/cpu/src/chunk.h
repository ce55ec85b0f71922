// Causal attention of a chunk of a prompt over everything up to it, tile by tile (Dao et al. 2022,
// FlashAttention). Keys and values of a tile are brought into the layout of the product once and
// used for a block of query rows: the query heads of a KV head stand below one another.
#pragma once
#include <cmath>

#include "pool.h"
#include "products.h"

constexpr int BLOCK_ROWS = 64;

// The factors of a tile as the product reads them.
struct FloatTiles : FloatProduct {
    template <typename T>
    static void pack_keys(const T* const* rows, int count, int dim, item* out) {
        for (int t = 0; t < TILE; t++)
            for (int d = 0; d < dim; d += LANES) {
                vf v = t < count ? load(rows[t] + d) : vf{};
                for (int i = 0; i < LANES; i++) out[(d + i) * TILE + t] = v[i];
            }
    }
    template <typename T>
    static void pack_values(const T* const* rows, int count, int dim, item* out) {
        for (int t = 0; t < TILE; t++)
            for (int d = 0; d < dim; d += LANES)
                store(out + t * dim + d, t < count ? load(rows[t] + d) : vf{});
    }
};

#ifdef __AVX512BF16__
struct PairTiles : PairProduct {
    static void pack_keys(const bf16* const* rows, int count, int dim, item* out) {
        // A pair of dimensions is one 32-bit word: transpose words, 16 keys by 16 pairs at once.
        for (int t = 0; t < TILE; t += 16)
            for (int d = 0; d < dim; d += 32) {
                const int pairs = dim - d < 32 ? (dim - d) / 2 : 16;
                const __mmask16 some = (__mmask16)((1u << pairs) - 1);
                __m512i r[16];
                for (int i = 0; i < 16; i++)
                    r[i] = t + i < count ? _mm512_maskz_loadu_epi32(some, rows[t + i] + d)
                                         : _mm512_setzero_si512();
                transpose(r);
                for (int i = 0; i < pairs; i++)
                    _mm512_storeu_si512(out + ((d / 2 + i) * TILE + t) * 2, r[i]);
            }
    }
    static void pack_values(const bf16* const* rows, int count, int dim, item* out) {
        for (int t = 0; t < TILE; t += 2)
            for (int d = 0; d < dim; d += 16) {
                __m512i even = words(rows, t, count, d), odd = words(rows, t + 1, count, d);
                _mm512_storeu_si512(out + (t / 2 * dim + d) * 2,
                                    _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
    }

   private:
    static __m512i words(const bf16* const* rows, int t, int count, int d) {
        if (t >= count) return _mm512_setzero_si512();
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows[t] + d)));
    }
    static void transpose(__m512i* r) {
        __m512i s[16];
        for (int i = 0; i < 16; i += 4) {
            __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            __m512i b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
            __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
            __m512i d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
            s[i] = _mm512_unpacklo_epi64(a, c), s[i + 1] = _mm512_unpackhi_epi64(a, c);
            s[i + 2] = _mm512_unpacklo_epi64(b, d), s[i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        for (int i = 0; i < 4; i++) {
            __m512i a = _mm512_shuffle_i32x4(s[i], s[i + 4], 0x88);
            __m512i b = _mm512_shuffle_i32x4(s[i], s[i + 4], 0xdd);
            __m512i c = _mm512_shuffle_i32x4(s[i + 8], s[i + 12], 0x88);
            __m512i d = _mm512_shuffle_i32x4(s[i + 8], s[i + 12], 0xdd);
            r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
            r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
        }
    }
};
#endif

template <typename T>
struct TilesOf {
    typedef FloatTiles type;
};
#ifdef __AVX512BF16__
template <>
struct TilesOf<bf16> {
    typedef PairTiles type;
};
#endif

// All rows and all N columns.
template <typename P, int N, bool ADD>
static void product(const typename P::item* a, int lda, const typename P::item* b, int depth,
                    int rows, float* c) {
    constexpr int WIDE = N / LANES < 4 ? N / LANES : 4;
    constexpr int PAIR = sizeof(typename P::item) == 2 ? 2 : 1;
    for (int n = 0; n < N; n += WIDE * LANES)
        in_parts<ROWS_AT_ONCE>(rows, [&](int64_t row, int64_t here) {
            with_rows<ROWS_AT_ONCE>(here, [&](auto constant) {
                P::template multiply<decltype(constant)::value, WIDE, ADD>(
                    a + row * lda, lda, b + n * PAIR, N, depth, c + row * N + n, N);
            });
        });
}

// Weights of a row's tile out of its scores, `visible` of them; returns what the earlier sums are
// scaled by.
template <typename W>
static inline float softmax_row(const float* scores, int visible, float scale, float& best,
                                float& total, W* weights) {
    constexpr int COUNT = TILE / LANES;
    vf s[COUNT], high = all(-INFINITY), here{};
    for (int i = 0; i < COUNT; i++) s[i] = load(scores + i * LANES) * scale;
    if (visible < TILE)
        for (int i = 0; i < COUNT; i++)
            s[i] = (iota() + i * LANES < visible) ? s[i] : all(-INFINITY);
    for (int i = 0; i < COUNT; i++) high = larger(high, s[i]);
    const float before = best, now = largest(high);
    best = now > before ? now : before;
    for (int i = 0; i < COUNT; i++) {
        vf p = vexp(s[i] - best);
        if (visible < TILE) p = (iota() + i * LANES < visible) ? p : vf{};
        store(weights + i * LANES, p);
        here += p;
    }
    const float keep = before == best ? 1.0f : vexp(all(before - best))[0];
    total = total * keep + sum(here);
    return keep;
}

// `count` query tokens from `from` (counted within the span) of one KV head.
template <typename T, int D>
static void chunk_block(const Step& step, const Layer<T>& layer, const Span& span, int64_t head,
                        int64_t from, int64_t count) {
    typedef typename TilesOf<T>::type P;
    typedef typename P::item item;
    const int group = (int)(step.heads / step.kv_heads), rows = (int)count * group;
    const int64_t width = step.heads + 2 * step.kv_heads;
    const float scale = 1.0f / std::sqrt((float)D);
    const T* keys = layer.keys + head * step.num_slots * D;
    const T* values = layer.values + head * step.num_slots * D;
    alignas(64) item queries[BLOCK_ROWS * D], tile_keys[TILE * D], tile_values[TILE * D];
    alignas(64) item weights[BLOCK_ROWS * TILE];
    alignas(64) float acc[BLOCK_ROWS * D], logits[BLOCK_ROWS * TILE];
    float best[BLOCK_ROWS], total[BLOCK_ROWS];
    for (int r = 0; r < rows; r++) {
        const int64_t token = span.first + from + r / group;
        P::pack_row(layer.qkv + (token * width + head * group + r % group) * D, D, queries + r * D);
        best[r] = -INFINITY, total[r] = 0;
    }
    memset(acc, 0, sizeof(float) * rows * D);
    const int64_t end = span.start + from + count;
    int64_t slots[TILE];
    const T *key_rows[TILE], *value_rows[TILE];
    for (int64_t first = 0; first < end; first += TILE) {
        const int here = end - first < TILE ? (int)(end - first) : TILE;
        find_slots(step, span, first, here, slots);
        for (int t = 0; t < here; t++)
            key_rows[t] = keys + slots[t] * D, value_rows[t] = values + slots[t] * D;
        P::pack_keys(key_rows, here, D, tile_keys);
        P::pack_values(value_rows, here, D, tile_values);
        product<P, TILE, false>(queries, D, tile_keys, D, rows, logits);
        for (int r = 0; r < rows; r++) {
            // How many keys of the tile this row may see; none when the tile is all ahead of it.
            const int64_t ahead = span.start + from + r / group + 1 - first;
            const int visible = ahead < 0 ? 0 : ahead < TILE ? (int)ahead : TILE;
            item* row = weights + r * TILE;
            if (!visible) {
                memset(row, 0, TILE * sizeof(item));
                continue;
            }
            const float keep =
                softmax_row(logits + r * TILE, visible, scale, best[r], total[r], row);
            if (keep != 1.0f)
                for (int d = 0; d < D; d += LANES)
                    store(acc + r * D + d, load(acc + r * D + d) * keep);
        }
        product<P, D, true>(weights, TILE, tile_values, TILE, rows, acc);
    }
    for (int r = 0; r < rows; r++) {
        const int64_t token = span.first + from + r / group;
        T* out = layer.out + (token * step.heads + head * group + r % group) * D;
        for (int d = 0; d < D; d += LANES) store(out + d, load(acc + r * D + d) / total[r]);
    }
}
