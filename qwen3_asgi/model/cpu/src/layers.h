// All layers of a model in one call: the threads that start together stay together.
#pragma once
#include <omp.h>

#include "attention.h"
#include "int8.h"
#include "linear.h"

// A weight in panels: of 8 bits with `scales` and `sums`, else of the model's own type.
struct Matrix {
    const void* panels;
    const float* scales;
    const int32_t* sums;
    int64_t columns, depth;
};

struct LayerParts {
    const void *qk_norm, *post_attention_norm;
    const void* norm_after;  // of whoever reads the sum next
    void *keys, *values;
    Matrix qkv, output, gate_up, down;
};

// Seconds of the calling thread, added up.
struct Seconds {
    double attention, linear, norm;
};

// Memory of the matrices for rows that they read in another form than they are.
template <typename T>
struct Held {
    Factor<T>* factors;
    uint8_t* bytes;
    float* steps;
};

template <typename T>
static inline void multiply(const Matrix& matrix, const T* x, const Held<T>& held, T* y,
                            int64_t rows) {
#ifdef __AVX512VNNI__
    if (matrix.scales)
        return int8_of_team(x, {held.bytes, held.steps}, (const int8_t*)matrix.panels,
                            matrix.scales, matrix.sums, y, rows, matrix.columns, matrix.depth);
#endif
    linear_of_team(x, held.factors, (const T*)matrix.panels, y, rows, matrix.columns, matrix.depth);
}

// Rows `wanted` of `x`, in ascending order, to its beginning.
template <typename T>
TEAM void gather_of_team(T* x, const int64_t* wanted, int64_t rows, int64_t width) {
#pragma omp single
    for (int64_t r = 0; r < rows; r++)
        if (wanted[r] != r) memcpy(x + r * width, x + wanted[r] * width, width * sizeof(T));
}

// `x` is [tokens, hidden], the embedded tokens. Of `wanted`, ascending, `out` gets what the last
// norm makes of their sums: the last layer has to do no more for the others than keys and values.
// `out` has room for all tokens; `seconds` may be null.
template <typename T>
static void run_layers(const Step& step, const LayerParts* layers, int64_t count,
                       const void* first_norm, T* x, T* out, const int64_t* wanted,
                       int64_t num_wanted, Seconds* seconds) {
    const int64_t hidden = layers[0].qkv.depth;
    int64_t widest = 0, deepest = 0;
    bool bytes = false;
    for (int64_t i = 0; i < count; i++) {
        const LayerParts& layer = layers[i];
        for (const Matrix* each : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            widest = each->columns > widest ? each->columns : widest;
            deepest = each->depth > deepest ? each->depth : deepest;
            bytes = bytes || each->scales;
        }
    }
    const int64_t all = step.tokens;
    const Tasks tasks(step);
    Scratch<T> products, betweens, sums;
    Scratch<float> parts, steps;
    Scratch<Factor<T>> factors;
    Scratch<uint8_t> halves;
    // What a product gives, and what a layer makes of it for the next one.
    T *product = products.of(all * widest), *between = betweens.of(all * deepest);
    T* delta = sums.of(all * hidden);
    float* found = parts.of(tasks.part_floats(step));
    // A few of many rows are split by every thread.
    const int64_t split_rows = bytes ? all + SPLIT_ALONE * step.threads : 0;
    const Held<T> held{factors.of(factors_for<T>(all, deepest)),
                       halves.of(2 * split_rows * deepest), steps.of(split_rows)};
    const float eps = (float)step.eps;
#pragma omp parallel num_threads((int)step.threads)
    {
        int64_t rows = all;
        double before = seconds ? omp_get_wtime() : 0;
        const auto took = [&](double Seconds::*part) {
            if (!seconds || omp_get_thread_num()) return;
            const double now = omp_get_wtime();
            seconds->*part += now - before;
            before = now;
        };
        add_norm_of_team(x, (const T*)nullptr, (const T*)first_norm, out, rows, hidden, eps);
        took(&Seconds::norm);
        for (int64_t i = 0; i < count; i++) {
            const LayerParts& layer = layers[i];
            multiply(layer.qkv, out, held, product, rows);
            took(&Seconds::linear);
            attention_of_team(step, tasks,
                              Layer<T>{product, (const T*)layer.qk_norm, (T*)layer.keys,
                                       (T*)layer.values, between},
                              found);
            if (i + 1 == count && num_wanted < all) {
                rows = num_wanted;
                gather_of_team(x, wanted, rows, hidden);
                gather_of_team(between, wanted, rows, layer.output.depth);
            }
            took(&Seconds::attention);
            multiply(layer.output, between, held, delta, rows);
            took(&Seconds::linear);
            add_norm_of_team(x, delta, (const T*)layer.post_attention_norm, out, rows, hidden, eps);
            took(&Seconds::norm);
            multiply(layer.gate_up, out, held, product, rows);
            took(&Seconds::linear);
            silu_mul_of_team(product, between, rows, layer.down.depth);
            took(&Seconds::norm);
            multiply(layer.down, between, held, delta, rows);
            took(&Seconds::linear);
            add_norm_of_team(x, delta, (const T*)layer.norm_after, out, rows, hidden, eps);
            took(&Seconds::norm);
        }
    }
}
