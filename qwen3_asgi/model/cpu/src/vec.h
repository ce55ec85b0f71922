// Vectors of LANES floats in the compiler's own vector types, so that one source serves every CPU,
// and the two element types of a model: float and bfloat16 (computed in float, rounded to even).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

// A function that the threads of a team call together: its loops are shared out, and each ends when
// all have come. Compiled once, so that a result does not depend on who has called it.
#define TEAM static __attribute__((noinline))

static inline vf all(float x) { return vf{} + x; }

static inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline vf load(const bf16* p) {
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

static inline float value(float x) { return x; }

static inline float value(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

#ifdef __AVX512BF16__
static inline void store(bf16* p, vf v) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
}
#else
static inline void store(bf16* p, vf v) {
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (v == v) ? rounded : (vu)((vu{}) + 0x7fc0);
    vh half = __builtin_convertvector(rounded, vh);
    memcpy(p, &half, sizeof half);
}
#endif

// What a value becomes when it is stored as a T and read back.
template <typename T>
static inline vf rounded(vf v) {
    T held[LANES];
    store(held, v);
    return load(held);
}
template <>
inline vf rounded<float>(vf v) { return v; }

static inline vf larger(vf a, vf b) { return a > b ? a : b; }

template <int STEP, size_t... LANE>
static inline vf turned(vf v, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(v, v, (int)((LANE + STEP) % LANES)...);
}

// By halves: what lies STEP lanes apart, then half as far.
template <int STEP = LANES / 2>
static inline float sum(vf v) {
    v += turned<STEP>(v, std::make_index_sequence<LANES>{});
    if constexpr (STEP > 1) return sum<STEP / 2>(v);
    return v[0];
}

template <int STEP = LANES / 2>
static inline float largest(vf v) {
    v = larger(v, turned<STEP>(v, std::make_index_sequence<LANES>{}));
    if constexpr (STEP > 1) return largest<STEP / 2>(v);
    return v[0];
}

// 0, 1, 2, …
static inline vi iota() {
    vi v{};
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// exp for |x| <= 87, clamped there; the polynomial is that of Cephes' expf (Moshier). NaN stays NaN.
static inline vf vexp(vf x) {
    // The order of the operands is that of one instruction, which gives x if it is NaN.
    x = all(-87.0f) > x ? all(-87.0f) : x;
    x = all(87.0f) < x ? all(87.0f) : x;
    // Adding this leaves no bits for a fraction: the integer is in the lowest ones.
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23
    const vf shifted = x * 1.44269504088896341f + ROUND;
    const vf whole = shifted - ROUND;
    vf r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    vf y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    // y is between 0.7 and 1.5, so its exponent takes that of the power of two.
    return (vf)((vu)y + ((vu)shifted << 23));
}

template <int SIZE, int OFFSET, size_t... LANE>
static inline vf halves(vf a, vf b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(
        a, b,
        (int)((LANE % SIZE < SIZE / 2 ? 0 : LANES) + LANE / SIZE * SIZE + LANE % (SIZE / 2) +
              OFFSET)...);
}

template <int SIZE>
static inline void fold(vf* v) {
    if constexpr (SIZE > 1) {
        using lanes = std::make_index_sequence<LANES>;
        for (int i = 0; i < SIZE / 2; i++) {
            vf a = v[i], b = v[i + SIZE / 2];
            v[i] = halves<SIZE, 0>(a, b, lanes{}) + halves<SIZE, SIZE / 2>(a, b, lanes{});
        }
        fold<SIZE / 2>(v);
    }
}

// Lane i of the result is the sum of v[i]; v is overwritten. A third of the work of summing each.
static inline vf sums(vf* v) {
    fold<LANES>(v);
    return v[0];
}
