// The C interface of the CPU kernels; `kernels.py` is its only caller and has checked everything.
// Every function may run on several threads at once: nothing is kept between calls but scratch
// memory of the calling thread.
#include <new>

#include "greedy.h"
#include "layers.h"

// What a function that may fail returns.
constexpr int DONE = 0, NO_KERNEL = 1, NO_MEMORY = 2, NO_ROW = 3;

// Memory is asked for before threads start, so this is where it is missing.
template <typename Run>
static int status_of(Run run) {
    try {
        run();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return DONE;
}

#pragma GCC visibility push(default)
extern "C" {

int qwen3_attention(const Step* step, int wide, void* qkv, const void* qk_norm, void* keys,
                    void* values, void* out) {
    if (!has_attention(step->head_dim)) return NO_KERNEL;
    return status_of([=] {
        if (wide)
            attention(*step, Layer<float>{(float*)qkv, (const float*)qk_norm, (float*)keys,
                                          (float*)values, (float*)out});
        else
            attention(*step, Layer<bf16>{(bf16*)qkv, (const bf16*)qk_norm, (bf16*)keys,
                                         (bf16*)values, (bf16*)out});
    });
}

int qwen3_layers(const Step* step, int wide, const LayerParts* layers, int64_t count,
                 const void* first_norm, void* x, void* out, const int64_t* wanted,
                 int64_t num_wanted, Seconds* seconds) {
    if (!has_attention(step->head_dim)) return NO_KERNEL;
    return status_of([=] {
        if (wide)
            run_layers(*step, layers, count, first_norm, (float*)x, (float*)out, wanted,
                       num_wanted, seconds);
        else
            run_layers(*step, layers, count, first_norm, (bf16*)x, (bf16*)out, wanted, num_wanted,
                       seconds);
    });
}

void qwen3_add_norm(int wide, void* x, const void* delta, const void* weight, void* out,
                    int64_t rows, int64_t width, double eps, int threads) {
    if (wide)
        add_norm((float*)x, (const float*)delta, (const float*)weight, (float*)out, rows, width,
                 (float)eps, threads);
    else
        add_norm((bf16*)x, (const bf16*)delta, (const bf16*)weight, (bf16*)out, rows, width,
                 (float)eps, threads);
}

void qwen3_silu_mul(int wide, const void* fused, void* out, int64_t rows, int64_t width,
                    int threads) {
    if (wide)
        silu_mul((const float*)fused, (float*)out, rows, width, threads);
    else
        silu_mul((const bf16*)fused, (bf16*)out, rows, width, threads);
}

void qwen3_greedy(int wide, const void* logits, const int64_t* stretches, int64_t num_stretches,
                  int64_t* tokens, int64_t rows, int64_t count, int threads) {
    if (wide)
        greedy((const float*)logits, stretches, num_stretches, tokens, rows, count, threads);
    else
        greedy((const bf16*)logits, stretches, num_stretches, tokens, rows, count, threads);
}

int qwen3_panel(void) { return PANEL; }

// Whether 8-bit weights are multiplied by a kernel.
int qwen3_has_int8(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

void qwen3_pack(int wide, const void* source, void* panels, int64_t columns, int64_t depth,
                int threads) {
    if (wide)
        pack_panels((const float*)source, (float*)panels, columns, depth, threads);
    else
        pack_panels((const bf16*)source, (bf16*)panels, columns, depth, threads);
}

// Nothing is written if an id is not a row.
int qwen3_rows(int wide, const void* panels, const int64_t* ids, void* out, int64_t count,
               int64_t columns, int64_t depth, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= columns) return NO_ROW;
    if (wide)
        panel_rows((const float*)panels, ids, (float*)out, count, depth, threads);
    else
        panel_rows((const bf16*)panels, ids, (bf16*)out, count, depth, threads);
    return DONE;
}

int qwen3_linear(int wide, const void* x, const void* panels, void* y, int64_t rows,
                 int64_t columns, int64_t depth, int threads) {
    return status_of([=] {
        if (wide)
            linear((const float*)x, (const float*)panels, (float*)y, rows, columns, depth, threads);
        else
            linear((const bf16*)x, (const bf16*)panels, (bf16*)y, rows, columns, depth, threads);
    });
}

void qwen3_pack_int8(int wide, const void* source, int8_t* panels, float* scales, int32_t* sums,
                     int64_t columns, int64_t depth, int threads) {
    if (wide)
        pack_int8((const float*)source, panels, scales, sums, columns, depth, threads);
    else
        pack_int8((const bf16*)source, panels, scales, sums, columns, depth, threads);
}

int qwen3_int8_linear(int wide, const void* x, const int8_t* panels, const float* scales,
                      const int32_t* sums, void* y, int64_t rows, int64_t columns, int64_t depth,
                      int threads) {
#ifdef __AVX512VNNI__
    return status_of([=] {
        if (wide)
            int8_linear((const float*)x, panels, scales, sums, (float*)y, rows, columns, depth,
                        threads);
        else
            int8_linear((const bf16*)x, panels, scales, sums, (bf16*)y, rows, columns, depth,
                        threads);
    });
#else
    return NO_KERNEL;
#endif
}
}
#pragma GCC visibility pop
