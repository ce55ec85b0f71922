// y = x @ w, for weights that were laid out once: PANEL columns are stored side by side for the
// whole depth, so that a thread reads its part of a weight as one stream, and for one row of x as
// fast as the memory gives it. Further rows find the panel in the cache.
#pragma once
#include <type_traits>

#include "products.h"
#include "scratch.h"

constexpr int PANEL = 4 * LANES;
// Rows that one task multiplies with a panel; of no importance for a few rows.
constexpr int64_t ROWS_PER_TASK = 40 * ROWS_AT_ONCE;

template <typename T>
struct PanelOf {
    typedef FloatProduct product;
    // Where weight (k, column) lies within its panel.
    static inline int64_t place(int64_t k, int64_t column) { return k * PANEL + column; }
};
#ifdef __AVX512BF16__
template <>
struct PanelOf<bf16> {
    typedef PairProduct product;
    static inline int64_t place(int64_t k, int64_t column) {
        return (k / 2 * PANEL + column) * 2 + k % 2;
    }
};
#endif

static inline int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

static inline int64_t rows_of(int64_t columns, int64_t panel) {
    const int64_t rest = columns - panel * PANEL;
    return rest < PANEL ? rest : PANEL;
}

// `source` is [columns, depth], `panels` takes panels_of(columns) * PANEL * depth elements.
template <typename T>
static void pack_panels(const T* source, T* panels, int64_t columns, int64_t depth, int threads) {
    const int64_t count = panels_of(columns);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < count; p++) {
        T* panel = panels + p * PANEL * depth;
        const int64_t here = rows_of(columns, p);
        for (int64_t column = 0; column < PANEL; column++)
            for (int64_t k = 0; k < depth; k++)
                panel[PanelOf<T>::place(k, column)] =
                    column < here ? source[(p * PANEL + column) * depth + k] : T{};
    }
}

// Rows `ids` of the weight as it was before it was laid out, [count, depth].
template <typename T>
static void panel_rows(const T* panels, const int64_t* ids, T* out, int64_t count, int64_t depth,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        const T* panel = panels + ids[i] / PANEL * PANEL * depth;
        for (int64_t k = 0; k < depth; k++)
            out[i * depth + k] = panel[PanelOf<T>::place(k, ids[i] % PANEL)];
    }
}

// `count` floats of a panel, in the type of the result.
template <typename T>
static inline void put_row(const float* found, T* y, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(y + i, load(found + i));
    if (i < count) {
        T last[LANES];
        store(last, load(found + i));
        memcpy(y + i, last, (count - i) * sizeof(T));
    }
}

// What `linear_of_team` needs for `rows` rows, unless they are factors as they are.
template <typename T>
using Factor = typename PanelOf<T>::product::item;

template <typename T>
static inline size_t factors_for(int64_t rows, int64_t depth) {
    return std::is_same_v<T, Factor<T>> ? 0 : (size_t)(rows * depth);
}

template <typename T>
TEAM void linear_of_team(const T* x, Factor<T>* held, const T* panels, T* y, int64_t rows,
                         int64_t columns, int64_t depth) {
    typedef typename PanelOf<T>::product P;
    typedef typename P::item item;
    const item* factors;
    if constexpr (std::is_same_v<T, item>) {
        factors = x;
    } else {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            P::pack_row(x + r * depth, (int)depth, held + r * depth);
        factors = held;
    }
    const int64_t count = panels_of(columns);
    const int64_t row_tasks = (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < count * row_tasks; task++) {
        const int64_t p = task / row_tasks, from = task % row_tasks * ROWS_PER_TASK;
        const int64_t some = rows - from < ROWS_PER_TASK ? rows - from : ROWS_PER_TASK;
        const T* panel = panels + p * PANEL * depth;
        const int64_t width = rows_of(columns, p);
        in_parts<ROWS_AT_ONCE>(some, [&](int64_t row, int64_t here) {
            alignas(64) float found[ROWS_AT_ONCE * PANEL];
            const item* a = factors + (from + row) * depth;
            const bool stream = from + row == 0;
            with_rows<ROWS_AT_ONCE>(here, [&](auto constant) {
                constexpr int ROWS = decltype(constant)::value;
                if (stream)
                    P::template multiply<ROWS, 4, false, true>(a, depth, panel, PANEL, depth, found,
                                                               PANEL);
                else
                    P::template multiply<ROWS, 4, false, false>(a, depth, panel, PANEL, depth,
                                                                found, PANEL);
            });
            for (int64_t r = 0; r < here; r++)
                put_row(found + r * PANEL, y + (from + row + r) * columns + p * PANEL, width);
        });
    }
}

template <typename T>
static void linear(const T* x, const T* panels, T* y, int64_t rows, int64_t columns, int64_t depth,
                   int threads) {
    static thread_local Scratch<Factor<T>> scratch;
    Factor<T>* held = scratch.of(factors_for<T>(rows, depth));
#pragma omp parallel num_threads(threads)
    linear_of_team(x, held, panels, y, rows, columns, depth);
}
