// Q8_0 weights times Q8_0 rows: blocks of 32 whole numbers multiplied exactly, their sums scaled and added in F32.
//
// Blocks are turned around so that a vector holds 16 results, four numbers of each beside each other: that is what the
// instruction multiplies. It wants one side without a sign, so weights are moved up by 128; what a row's block has too much
// by that is 128 times its sum, from which counting begins.
//
// A result is added up block after block, whatever is computed beside it: one row alone has the same bits as among others.
// Turning weights around costs less than fetching them from memory, so a single row is computed in the same way.

#include "product.h"
#include "tiles.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include <algorithm>
#include <memory>
#include <vector>

// With AMX ggml keeps such weights in a form of its own, and does not ask us.
#if defined(HEADRACE_WIDE) && defined(__AVX512VNNI__) && defined(__AVX512VL__) && !defined(__AMX_INT8__)

namespace {

using headrace::in_tiles;
using headrace::LANES;
using headrace::Product;

constexpr int64_t PANEL_VECTORS = 2;
constexpr int64_t PANEL         = PANEL_VECTORS * LANES;  // results computed together
constexpr int64_t PANEL_DEPTH   = 128;                    // blocks turned around at a time: 144 KiB of the second cache
constexpr int64_t FEW_ROWS_MAX  = 12;                     // up to here each tile of rows turns weights around for itself
constexpr int64_t BLOCK         = 32;                     // numbers
constexpr int64_t WORDS         = BLOCK / 4;              // of four numbers
constexpr int64_t CACHE_LINE    = 64;
static_assert(sizeof(block_q8_0) == 2 + BLOCK && QK8_0 == BLOCK);
static_assert(PANEL_DEPTH % 2 == 0);  // blocks are turned around in pairs

struct alignas(64) Panel {
    uint32_t words[PANEL_DEPTH * WORDS * PANEL];  // block, word, result
    float    scales[PANEL_DEPTH * PANEL];         // block, result
};

// What is needed of a row's block beside its numbers.
struct RowBlock {
    float   scale;
    int32_t begin;  // -128 times the sum of its numbers
};

inline const block_q8_0 * weights_of(const Product & p, int64_t result) {
    return static_cast<const block_q8_0 *>(p.weights) + result * p.weights_step;
}

inline const block_q8_0 * rows_of(const Product & p, int64_t row) {
    return static_cast<const block_q8_0 *>(p.rows) + row * p.rows_step;
}

inline __m256i numbers_of(const block_q8_0 & block) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.qs));
}

// 16 results' blocks d and d + 1, words of the one and then of the other; only the first one where `to` ends.
inline void load_turned(const block_q8_0 * weights, int64_t step, int64_t d, int64_t to, __m512i words[LANES]) {
    const int64_t second = std::min(d + 1, to - 1);
    for (int i = 0; i < LANES; ++i) {
        const block_q8_0 * of = weights + i * step;
        words[i]              = _mm512_xor_si512(
            _mm512_inserti64x4(_mm512_castsi256_si512(numbers_of(of[d])), numbers_of(of[second]), 1),
            _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    headrace::turn(words);
}

inline __m512 scales_of(const block_q8_0 * weights, int64_t step) {
    const auto at = [&](int i) { return static_cast<int16_t>(weights[i * step].d); };
    return _mm512_cvtph_ps(_mm256_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10),
                                             at(11), at(12), at(13), at(14), at(15)));
}

// Two blocks of the next 16 results are asked for. Weights lie row after row, so those begin where these end.
HEADRACE_ALWAYS inline void ask_for(const block_q8_0 * next, int64_t d) {
    const char * begin = reinterpret_cast<const char *>(next) + d * LANES * sizeof(block_q8_0);
    for (int64_t byte = 0; byte < 2 * LANES * int64_t(sizeof(block_q8_0)); byte += CACHE_LINE) {
        _mm_prefetch(begin + byte, _MM_HINT_T0);
    }
}

template <int VECTORS> void turn_panel(const Product & p, int64_t result, int64_t from, int64_t to, Panel & panel) {
    for (int64_t v = 0; v < VECTORS; ++v) {
        const block_q8_0 * weights  = weights_of(p, result + LANES * v);
        const bool         has_next = result + LANES * (v + 1) < p.num_results;
        for (int64_t d = from; d < to; d += 2) {
            if (has_next) {
                ask_for(weights + LANES * p.weights_step, d);
            }
            __m512i words[LANES];
            load_turned(weights, p.weights_step, d, to, words);
            for (int i = 0; i < LANES; ++i) {
                _mm512_store_si512(panel.words + (((d - from) * WORDS + i) * VECTORS + v) * LANES, words[i]);
            }
        }
        for (int64_t d = from; d < to; ++d) {
            _mm512_store_ps(panel.scales + ((d - from) * VECTORS + v) * LANES, scales_of(weights + d, p.weights_step));
        }
    }
}

struct Thread {
    std::vector<RowBlock> row_blocks;  // row, block
    Panel                 panel;
};

Thread & of_this_thread() {
    static thread_local const auto thread = std::make_unique<Thread>();
    return *thread;
}

// Each thread for itself: next to the products, with their hundreds of results for a row, it is little.
void prepare(const Product & p) {
    std::vector<RowBlock> & blocks = of_this_thread().row_blocks;
    blocks.resize(p.num_rows * p.depth);
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t row = 0; row < p.num_rows; ++row) {
        const block_q8_0 * of = rows_of(p, row);
        for (int64_t d = 0; d < p.depth; ++d) {
            const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, numbers_of(of[d]));
            const __m128i four  = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
            const __m128i two   = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
            const __m128i one   = _mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1));
            blocks[row * p.depth + d] = { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(of[d].d))),
                                          -128 * _mm_cvtsi128_si32(one) };
        }
    }
}

inline __m512i four_of(const block_q8_0 & block, int64_t word) {
    int32_t four;
    __builtin_memcpy(&four, block.qs + 4 * word, sizeof(four));
    return _mm512_set1_epi32(four);
}

// One order and one rounding for each result, in strips and in panels.
inline __m512 scaled_sum(__m512 sum, __m512i count, __m512 of_weights, const RowBlock & of_row) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(count), _mm512_mul_ps(of_weights, _mm512_set1_ps(of_row.scale)), sum);
}

template <int ROWS, int VECTORS>
void tile(const Product & p, const Panel & panel, const RowBlock * row_block, int64_t result, int64_t row, int64_t from,
          int64_t to) {
    const block_q8_0 * rows    = rows_of(p, row);
    float *            results = p.results + row * p.results_step + result;
    const uint32_t *   words   = panel.words;
    const float *      scales  = panel.scales;
    __m512             sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            sum[r][v] = from == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(results + r * p.results_step + LANES * v);
        }
    }
    for (int64_t d = from; d < to; ++d, scales += VECTORS * LANES) {
        __m512i count[ROWS][VECTORS];
        for (int r = 0; r < ROWS; ++r) {
            for (int v = 0; v < VECTORS; ++v) {
                count[r][v] = _mm512_set1_epi32(row_block[r * p.depth + d].begin);
            }
        }
        for (int64_t word = 0; word < WORDS; ++word, words += VECTORS * LANES) {
            __m512i weight[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                weight[v] = _mm512_load_si512(words + v * LANES);
            }
            for (int r = 0; r < ROWS; ++r) {
                const __m512i four = four_of(rows[r * p.rows_step + d], word);
                for (int v = 0; v < VECTORS; ++v) {
                    count[r][v] = _mm512_dpbusd_epi32(count[r][v], weight[v], four);
                }
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            const __m512 of_weights = _mm512_load_ps(scales + v * LANES);
            for (int r = 0; r < ROWS; ++r) {
                sum[r][v] = scaled_sum(sum[r][v], count[r][v], of_weights, row_block[r * p.depth + d]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < VECTORS; ++v) {
            _mm512_storeu_ps(results + r * p.results_step + LANES * v, sum[r][v]);
        }
    }
}

// 16 results of some rows, where these are so few that nothing turned around is worth keeping.
template <int ROWS> void strip(const Product & p, const RowBlock * row_block, int64_t result, int64_t row) {
    const block_q8_0 * rows     = rows_of(p, row);
    const block_q8_0 * weights  = weights_of(p, result);
    const bool         has_next = row == 0 && result + LANES < p.num_results;
    __m512             sum[ROWS];
    for (auto & one : sum) {
        one = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < p.depth; d += 2) {
        if (has_next) {
            ask_for(weights + LANES * p.weights_step, d);
        }
        __m512i words[LANES];
        load_turned(weights, p.weights_step, d, p.depth, words);
        const auto add = [&](const __m512i * of_block, int64_t block) {
            const __m512 of_weights = scales_of(weights + block, p.weights_step);
            for (int r = 0; r < ROWS; ++r) {
                __m512i count = _mm512_set1_epi32(row_block[r * p.depth + block].begin);
                for (int64_t word = 0; word < WORDS; ++word) {
                    count = _mm512_dpbusd_epi32(count, of_block[word], four_of(rows[r * p.rows_step + block], word));
                }
                sum[r] = scaled_sum(sum[r], count, of_weights, row_block[r * p.depth + block]);
            }
        };
        add(words, d);
        if (d + 1 < p.depth) {
            add(words + WORDS, d + 1);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm512_storeu_ps(p.results + (row + r) * p.results_step + result, sum[r]);
    }
}

template <int VECTORS> void many_rows(const Product & p, const RowBlock * row_blocks, int64_t result, Panel & panel) {
    for (int64_t from = 0; from < p.depth; from += PANEL_DEPTH) {
        const int64_t to = std::min(p.depth, from + PANEL_DEPTH);
        turn_panel<VECTORS>(p, result, from, to, panel);
        in_tiles(p.num_rows, [&](auto height, int64_t row) {
            tile<decltype(height)::value, VECTORS>(p, panel, row_blocks + row * p.depth, result, row, from, to);
        });
    }
}

bool suits(const Product & p) {
    return p.num_results % LANES == 0;
}

void compute(const Product & p, int64_t begin, int64_t end) {
    Thread & thread = of_this_thread();
    if (p.num_rows <= FEW_ROWS_MAX) {
        for (int64_t result = begin; result < end; result += LANES) {
            in_tiles(p.num_rows, [&](auto height, int64_t row) {
                strip<decltype(height)::value>(p, thread.row_blocks.data() + row * p.depth, result, row);
            });
        }
    } else if (end - begin == PANEL) {
        many_rows<PANEL_VECTORS>(p, thread.row_blocks.data(), begin, thread.panel);
    } else {
        many_rows<1>(p, thread.row_blocks.data(), begin, thread.panel);
    }
}

constexpr headrace::Kernel KERNEL = { PANEL, suits, prepare, compute };

}  // namespace

const headrace::Kernel * headrace::q8_0_kernel() {
    return &KERNEL;
}

#else

const headrace::Kernel * headrace::q8_0_kernel() {
    return nullptr;
}

#endif
