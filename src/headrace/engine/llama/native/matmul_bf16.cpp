// BF16 weights times BF16 rows, summed in F32.
//
// ggml's own kernel takes weights and rows as they lie and sums each result across a vector. With few rows it waits for
// memory, since it asks for weights only when it needs them; with many it reads the rows again and again from the second
// cache. Here weights are fetched ahead, and for many rows they are turned around first, so that a vector holds 16 results.
//
// One row, few and many are summed in three orders, so that a row's last bits depend on its company.

#include "product.h"
#include "tiles.h"

#include <algorithm>
#include <memory>

#if defined(HEADRACE_WIDE) && defined(__AVX512BF16__)

namespace {

using headrace::in_tiles;
using headrace::LANES;
using headrace::of_vectors;
using headrace::Product;

using Bf16 = uint16_t;

constexpr int64_t VECTOR        = 32;    // BF16 numbers in a vector
constexpr int64_t STRIP         = 4;     // results computed together with few rows
constexpr int64_t PANEL         = 64;    // results computed together with many
constexpr int64_t PANEL_DEPTH   = 2048;  // of a row, turned around at a time: 256 KiB of the second cache
constexpr int64_t FEW_ROWS_MAX  = 32;    // up to here turning weights around takes longer than it saves

inline const Bf16 * weights_of(const Product & p, int64_t result) {
    return static_cast<const Bf16 *>(p.weights) + result * p.weights_step;
}

inline const Bf16 * rows_of(const Product & p, int64_t row) {
    return static_cast<const Bf16 *>(p.rows) + row * p.rows_step;
}

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
    const Bf16 * weights = weights_of(p, result);
    const Bf16 * rows    = rows_of(p, row);
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
        const Bf16 * next     = has_next ? weights_of(p, result + STRIP) : nullptr;
        in_tiles(p.num_rows, [&](auto height, int64_t row) {
            strip_tile<decltype(height)::value>(p, result, row, row == 0 ? next : nullptr);
        });
    }
}

// 16 results for each of VECTORS, from weights that are turned around: pairs of numbers, each pair for all the results.
template <int ROWS, int VECTORS>
void panel_tile(const Product & p, const uint32_t * turned, int64_t result, int64_t row, int64_t from, int64_t to,
                const Bf16 * next) {
    const Bf16 * rows    = rows_of(p, row);
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

struct alignas(64) PanelMemory {
    uint32_t pairs[PANEL_DEPTH / 2 * PANEL];
};

template <int VECTORS> void panel(const Product & p, uint32_t * turned, int64_t result) {
    const bool has_next = result + (VECTORS + 4) * LANES <= p.num_results;
    for (int64_t from = 0; from < p.depth; from += PANEL_DEPTH) {
        const int64_t to = std::min(p.depth, from + PANEL_DEPTH);
        for (int v = 0; v < VECTORS; ++v) {
            for (int64_t d = from; d < to; d += VECTOR) {
                const Bf16 * weights = weights_of(p, result + LANES * v) + d;
                __m512i      word[LANES];
                for (int i = 0; i < LANES; ++i) {
                    word[i] = _mm512_loadu_si512(weights + i * p.weights_step);
                }
                headrace::store_turned(word, turned + ((d - from) / 2 * VECTORS + v) * LANES, VECTORS * LANES);
            }
        }
        const Bf16 * next = has_next ? weights_of(p, result + LANES * VECTORS) : nullptr;
        in_tiles(p.num_rows, [&](auto height, int64_t row) {
            panel_tile<decltype(height)::value, VECTORS>(p, turned, result, row, from, to, row == 0 ? next : nullptr);
        });
    }
}

bool suits(const Product & p) {
    return p.num_rows >= 2 && p.num_results % LANES == 0 && p.depth % VECTOR == 0;
}

void prepare(const Product &) {}

void compute(const Product & p, int64_t begin, int64_t end) {
    if (p.num_rows <= FEW_ROWS_MAX) {
        few_rows(p, begin, end);
        return;
    }
    static thread_local const auto memory = std::make_unique<PanelMemory>();
    of_vectors((end - begin) / LANES,
               [&](auto vectors) { panel<decltype(vectors)::value>(p, memory->pairs, begin); });
}

constexpr headrace::Kernel KERNEL = { PANEL, suits, prepare, compute };

}  // namespace

const headrace::Kernel * headrace::bf16_kernel() {
    return &KERNEL;
}

#else

const headrace::Kernel * headrace::bf16_kernel() {
    return nullptr;
}

#endif
