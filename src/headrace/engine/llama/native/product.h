// What the kernels for products of weights and rows have in common.
//
//     results[row * results_step + i] = sum over d of weights[i * weights_step + d] * rows[row * rows_step + d]
//
// Steps and depth are counted in what the type counts in: numbers for BF16, blocks of 32 numbers for Q8_0.

#pragma once

#include <cstdint>

namespace headrace {

struct Product {
    const void * weights;
    const void * rows;
    float *      results;
    int64_t      weights_step, rows_step, results_step;
    int64_t      num_results, num_rows, depth;
};

// One type of weights. `suits`: whether it computes this product at all. `prepare`: what a thread needs for all panels.
// `compute`: the results of one panel, for all rows; begin is a multiple of `panel`.
struct Kernel {
    int64_t panel;
    bool (*suits)(const Product & p);
    void (*prepare)(const Product & p);
    void (*compute)(const Product & p, int64_t begin, int64_t end);
};

// Null where the processor it is compiled for lacks the instructions.
const Kernel * bf16_kernel();
const Kernel * q8_0_kernel();

}  // namespace headrace
