// What happens to each row alone: norms, rotation, activation. A row's result depends on it only.
#pragma once
#include <cmath>

#include "vec.h"

// Below this many elements a call runs on the caller's thread: waking others costs more.
constexpr int64_t WORTH_THREADS = 32768;

static inline int worth(int threads, int64_t elements) {
    return elements < WORTH_THREADS ? 1 : threads;
}

// RMS norm in float, cast back, and only then times the weight: Qwen3 was trained in this order.
template <typename T>
static inline void norm(const T* x, const T* weight, T* out, int64_t width, float eps) {
    vf squares{};
    for (int64_t i = 0; i < width; i += LANES) {
        vf v = load(x + i);
        squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, rounded<T>(load(x + i) * scale) * load(weight + i));
}

// x += delta, where there is one, and the norm of the sum.
template <typename T>
TEAM void add_norm_of_team(T* x, const T* delta, const T* weight, T* out, int64_t rows,
                           int64_t width, float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        T* held = x + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i += LANES)
                store(held + i, load(held + i) + load(delta + row * width + i));
        norm(held, weight, out + row * width, width, eps);
    }
}

template <typename T>
static void add_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t width,
                     float eps, int threads) {
#pragma omp parallel num_threads(worth(threads, rows * width))
    add_norm_of_team(x, delta, weight, out, rows, width, eps);
}

// silu(gate) * up of rows that hold gate and up side by side.
template <typename T>
TEAM void silu_mul_of_team(const T* fused, T* out, int64_t rows, int64_t width) {
    constexpr int64_t PIECE = 512;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < rows * pieces; task++) {
        const int64_t row = task / pieces, first = task % pieces * PIECE;
        const int64_t last = first + PIECE < width ? first + PIECE : width;
        const T* gate = fused + row * 2 * width;
        for (int64_t i = first; i < last; i += LANES) {
            vf g = load(gate + i);
            vf active = rounded<T>(g / (1.0f + vexp(-g)));
            store(out + row * width + i, active * load(gate + width + i));
        }
    }
}

template <typename T>
static void silu_mul(const T* fused, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(worth(threads, rows * width))
    silu_mul_of_team(fused, out, rows, width);
}

// Norm and rotation of one head; its two halves are the pairs. cos and sin are float, D long, with
// the first half of the sines negated.
template <typename T, int D>
static inline void norm_rotate(T* head, const T* weight, const float* cos, const float* sin,
                               float eps) {
    T normed[D];
    norm(head, weight, normed, D, eps);
    if constexpr (D / 2 >= LANES) {
        for (int i = 0; i < D; i += LANES) {
            vf other = load(normed + (i + D / 2) % D);
            store(head + i, load(normed + i) * load(cos + i) + other * load(sin + i));
        }
    } else {
        vf own = load(normed), other{};
        for (int i = 0; i < LANES; i++) other[i] = own[(i + D / 2) % D];
        store(head, own * load(cos) + other * load(sin));
    }
}
