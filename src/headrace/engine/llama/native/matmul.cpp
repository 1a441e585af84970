// BF16 weights times BF16 rows, summed in F32: stands in front of ggml's llamafile_sgemm (linked with --wrap).
//
// ggml's own kernel takes weights and rows as they lie and sums each result across a vector. With few rows it waits for
// memory, since it asks for weights only when it needs them; with many it reads the rows again and again from the second
// cache. Here weights are fetched ahead, and for many rows they are turned around first, so that a vector holds 16 results.
//
// Everything that is not this case goes to ggml's kernel: other types, one row, shapes that are no multiple of a vector.

#include "tiles.h"

#include "ggml.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

extern "C" bool __real_llamafile_sgemm(const ggml_compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
                                       const void *, int64_t, void *, int64_t, int, int, int);
extern "C" bool __wrap_llamafile_sgemm(const ggml_compute_params *, int64_t, int64_t, int64_t, const void *, int64_t,
                                       const void *, int64_t, void *, int64_t, int, int, int);

#if defined(__AVX512BF16__) && defined(__AVX512DQ__)

namespace {

using headrace::in_tiles;
using headrace::LANES;
using headrace::of_vectors;

using Bf16 = uint16_t;

constexpr int64_t VECTOR        = 32;    // BF16 numbers in a vector
constexpr int64_t STRIP         = 4;     // results computed together with few rows
constexpr int64_t PANEL         = 64;    // results computed together with many
constexpr int64_t PANEL_DEPTH   = 2048;  // of a row, turned around at a time: 256 KB, a part of the second cache
constexpr int64_t FEW_ROWS_MAX  = 32;    // up to here turning weights around takes longer than it saves

// results[row * results_step + i] = sum over d of weights[i * weights_step + d] * rows[row * rows_step + d]
struct Product {
    const Bf16 * weights;
    const Bf16 * rows;
    float *      results;
    int64_t      weights_step, rows_step, results_step;
    int64_t      num_results, num_rows, depth;
};

inline __m512bh load(const Bf16 * from) {
    return (__m512bh) _mm512_loadu_si512(from);
}

// The sums across four vectors.
inline __m128 sums(const __m512 v[STRIP]) {
    const __m512  ab   = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512  cd   = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d low  = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512  abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256  half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Four results of some rows. Meanwhile the weights of the next four are asked for.
template <int ROWS>
void strip_tile(const Product & p, int64_t result, int64_t row, const Bf16 * next) {
    const Bf16 * weights = p.weights + result * p.weights_step;
    const Bf16 * rows    = p.rows + row * p.rows_step;
    __m512       sum[ROWS][STRIP];
    for (auto & of_row : sum) {
        for (auto & one : of_row) {
            one = _mm512_setzero_ps();
        }
    }
    for (int64_t d = 0; d < p.depth; d += VECTOR) {
        __m512bh weight[STRIP];
        for (int i = 0; i < STRIP; ++i) {
            weight[i] = load(weights + i * p.weights_step + d);
        }
        if (next != nullptr) {
            for (int i = 0; i < STRIP; ++i) {
                _mm_prefetch((const char *) (next + i * p.weights_step + d), _MM_HINT_T0);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh of_row = load(rows + r * p.rows_step + d);
            for (int i = 0; i < STRIP; ++i) {
                sum[r][i] = _mm512_dpbf16_ps(sum[r][i], weight[i], of_row);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm_storeu_ps(p.results + (row + r) * p.results_step + result, sums(sum[r]));
    }
}

void few_rows(const Product & p, int64_t begin, int64_t end) {
    for (int64_t result = begin; result < end; result += STRIP) {
        const bool   has_next = result + 2 * STRIP <= p.num_results;
        const Bf16 * next     = has_next ? p.weights + (result + STRIP) * p.weights_step : nullptr;
        in_tiles(p.num_rows, [&](auto height, int64_t row) {
            strip_tile<decltype(height)::value>(p, result, row, row == 0 ? next : nullptr);
        });
    }
}

// 16 results for each of VECTORS, from weights that are turned around: pairs of numbers, each pair for all the results.
template <int ROWS, int VECTORS>
void panel_tile(const Product & p, const uint32_t * turned, int64_t result, int64_t row, int64_t from, int64_t to,
                const Bf16 * next) {
    const Bf16 * rows    = p.rows + row * p.rows_step;
    float *      results = p.results + row * p.results_step + result;
    __m512       sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            sum[r][v] = from == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(results + r * p.results_step + LANES * v);
        }
    }
    for (int64_t d = from; d < to; d += 2, turned += LANES * VECTORS) {
        __m512bh weight[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            weight[v] = (__m512bh) _mm512_load_si512(turned + LANES * v);
        }
        if (next != nullptr) {
            // A vector of each of the next panel's rows after the other, until the tile has asked for all of it.
            const int64_t pair = (d - from) / 2;
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t of = pair % LANES * VECTORS + v;
                _mm_prefetch((const char *) (next + of * p.weights_step + from + pair / LANES * VECTOR), _MM_HINT_T1);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, rows + r * p.rows_step + d, sizeof(pair));
            const __m512bh of_row = (__m512bh) _mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; ++v) {
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weight[v], of_row);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            _mm512_storeu_ps(results + r * p.results_step + LANES * v, sum[r][v]);
        }
    }
}

struct Free {
    void operator()(void * memory) const { std::free(memory); }
};

uint32_t * panel_memory() {
    static thread_local const std::unique_ptr<uint32_t, Free> memory(
        static_cast<uint32_t *>(std::aligned_alloc(64, PANEL_DEPTH * PANEL * sizeof(Bf16))));
    return memory.get();
}

template <int VECTORS> void panel(const Product & p, uint32_t * turned, int64_t result) {
    const bool has_next = result + (VECTORS + 4) * LANES <= p.num_results;
    for (int64_t from = 0; from < p.depth; from += PANEL_DEPTH) {
        const int64_t to = std::min(p.depth, from + PANEL_DEPTH);
        for (int v = 0; v < VECTORS; ++v) {
            for (int64_t d = from; d < to; d += VECTOR) {
                const Bf16 * weights = p.weights + (result + LANES * v) * p.weights_step + d;
                __m512i      word[LANES];
                for (int i = 0; i < LANES; ++i) {
                    word[i] = _mm512_loadu_si512(weights + i * p.weights_step);
                }
                headrace::store_turned(word, turned + (d - from) / 2 * LANES * VECTORS + LANES * v, LANES * VECTORS);
            }
        }
        const Bf16 * next = has_next ? p.weights + (result + LANES * VECTORS) * p.weights_step : nullptr;
        in_tiles(p.num_rows, [&](auto height, int64_t row) {
            panel_tile<decltype(height)::value, VECTORS>(p, turned, result, row, from, to, row == 0 ? next : nullptr);
        });
    }
}

}  // namespace

// `m` results for each of `n` rows of `k` numbers. All threads call it with the same arguments.
extern "C" bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                                       const void * a, int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc,
                                       int a_type, int b_type, int c_type) {
    const bool is_bf16 = a_type == GGML_TYPE_BF16 && b_type == GGML_TYPE_BF16 && c_type == GGML_TYPE_F32;
    if (!is_bf16 || n < 2 || m % LANES != 0 || k % VECTOR != 0) {
        return __real_llamafile_sgemm(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
    }
    uint32_t * turned = panel_memory();
    if (turned == nullptr) {
        std::abort();  // what ggml does where it gets no memory: other threads wait for this one
    }
    const Product p = { static_cast<const Bf16 *>(a), static_cast<const Bf16 *>(b), static_cast<float *>(c),
                        lda, ldb, ldc, m, n, k };
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const int64_t num_panels = (m + PANEL - 1) / PANEL;
    int64_t       mine       = params->ith;
    while (mine < num_panels) {
        const int64_t begin = mine * PANEL, end = std::min(m, begin + PANEL);
        if (n <= FEW_ROWS_MAX) {
            few_rows(p, begin, end);
        } else {
            of_vectors((end - begin) / LANES,
                       [&](auto vectors) { panel<decltype(vectors)::value>(p, turned, begin); });
        }
        mine = ggml_threadpool_chunk_add(params->threadpool, 1);
    }
    ggml_barrier(params->threadpool);
    return true;
}

#else

extern "C" bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                                       const void * a, int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc,
                                       int a_type, int b_type, int c_type) {
    return __real_llamafile_sgemm(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

#endif
