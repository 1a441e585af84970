// Products of weights and rows: stands in front of ggml's llamafile_sgemm (linked with --wrap).
//
// What no kernel of ours suits goes to ggml's: other types and shapes.

#include "product.h"

#include "ggml.h"

#include "ggml-cpu-impl.h"

#include <algorithm>

extern "C" bool __real_llamafile_sgemm(const ggml_compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
                                       const void *, int64_t, void *, int64_t, int, int, int);
extern "C" bool __wrap_llamafile_sgemm(const ggml_compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
                                       const void *, int64_t, void *, int64_t, int, int, int);

namespace {

const headrace::Kernel * kernel_of(int weights, int rows, int results) {
    if (weights != rows || results != GGML_TYPE_F32) {
        return nullptr;
    }
    switch (weights) {
        case GGML_TYPE_BF16: return headrace::bf16_kernel();
        case GGML_TYPE_Q8_0: return headrace::q8_0_kernel();
        default: return nullptr;
    }
}

}  // namespace

// `m` results for each of `n` rows of depth `k`. All threads call it with the same arguments and get the same answer.
extern "C" bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                                       const void * a, int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc,
                                       int a_type, int b_type, int c_type) {
    const headrace::Kernel * kernel = kernel_of(a_type, b_type, c_type);
    const headrace::Product  p      = { a, b, static_cast<float *>(c), lda, ldb, ldc, m, n, k };
    if (kernel == nullptr || !kernel->suits(p)) {
        return __real_llamafile_sgemm(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    kernel->prepare(p);
    for (int64_t mine = params->ith; mine * kernel->panel < m; mine = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t begin = mine * kernel->panel;
        kernel->compute(p, begin, std::min(m, begin + kernel->panel));
    }
    ggml_barrier(params->threadpool);
    return true;
}
