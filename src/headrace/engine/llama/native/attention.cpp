// Attention over F16 keys and values, summed in F32: stands in front of ggml's flash attention (linked with --wrap).
//
// ggml has two ways: 64 or more rows of a sequence in tiles, fewer one by one, with an exponential at a time and sums of
// values in F16. Here there is one. The query heads that share keys and values are rows beside each other, so that already
// a single token has several, and what is masked for all of them is passed over block by block.
//
// A row's result depends on nothing but its own queries, mask and the keys and values it sees: not on what other rows are
// computed with it, nor in which portion of a prompt it comes.
//
//     for each block of 64 keys:  scores = queries x keys turned around,  + mask
//                                 weights = exp(scores - largest so far),  results = results x correction + weights x values
//
// (Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; in tiles: Dao et
// al., "FlashAttention", arXiv 2205.14135.)

#include "tiles.h"

#include "ggml.h"

#include "common.h"
#include "ggml-cpu-impl.h"
#include "vec.h"

#include <algorithm>
#include <cmath>

extern "C" void __real_ggml_compute_forward_flash_attn_ext(const ggml_compute_params *, ggml_tensor *);
extern "C" void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params *, ggml_tensor *);

#ifdef HEADRACE_WIDE

namespace {

using headrace::in_tiles;
using headrace::LANES;
using headrace::of_vectors;

using F16 = ggml_fp16_t;

constexpr int64_t ROWS  = 64;  // of queries at a time
constexpr int64_t BLOCK = 64;  // keys and values at a time
constexpr int64_t CHUNK = 64;  // of a result at a time

// What ggml sets aside for each thread of its own tiles has to be enough for these, and to begin at a cache line.
static_assert(ROWS <= ggml_fa_tile_config::Q && BLOCK <= ggml_fa_tile_config::KV);
constexpr int64_t LINE_FLOATS = 16;
constexpr int64_t LINE_HALVES = 2 * LINE_FLOATS;
static_assert(ROWS * BLOCK >= 2 * ROWS + LINE_FLOATS);

struct Attention {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    ggml_tensor *       result;
    float               scale;
    int64_t             key_size, value_size;
    int64_t             heads_together;  // query heads that share keys and values
    int64_t             tokens_together;

    // So few tokens together that each thread gets some; the height of a tile changes no bit.
    Attention(ggml_tensor * dst, int64_t threads) :
        q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), mask(dst->src[3]), result(dst),
        scale(ggml_get_op_params_f32(dst, 0)), key_size(k->ne[0]), value_size(v->ne[0]),
        heads_together(std::max<int64_t>(1, q->ne[2] / k->ne[2])),
        tokens_together(std::max<int64_t>(
            1, std::min(ROWS / heads_together, (q->ne[1] * k->ne[2] * q->ne[3] + threads - 1) / threads))) {}

    int64_t token_tiles() const { return (q->ne[1] + tokens_together - 1) / tokens_together; }
    int64_t jobs() const { return token_tiles() * k->ne[2] * q->ne[3]; }

    // Position biases, capped scores, sinks, other types and sizes are ggml's.
    bool is_ours() const {
        const bool is_plain = ggml_get_op_params_f32(result, 1) == 0 && ggml_get_op_params_f32(result, 2) == 0 &&
                              result->src[4] == nullptr;
        const bool are_types = q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 &&
                               (mask == nullptr || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
        const bool are_sizes = key_size % LANES == 0 && value_size % LANES == 0 && k->ne[1] % BLOCK == 0 &&
                               v->ne[1] == k->ne[1] && v->ne[2] == k->ne[2] && heads_together <= ROWS &&
                               q->ne[2] % k->ne[2] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3];
        const bool are_rows = q->nb[0] == sizeof(float) && k->nb[0] == sizeof(F16) && v->nb[0] == sizeof(F16) &&
                              (mask == nullptr || mask->nb[0] == sizeof(F16));
        return is_plain && are_types && are_sizes && are_rows;
    }
};

template <typename T> const T * at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<const T *>(static_cast<const char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] +
                                       i3 * t->nb[3]);
}

// Room for one job, within what ggml set aside for the thread.
struct Room {
    float * queries;  // ROWS x key_size, scaled
    float * keys;     // key_size x BLOCK: turned around
    float * values;   // BLOCK x value_size
    float * scores;   // ROWS x BLOCK, then the weights
    float * results;  // ROWS x value_size
    float * largest;  // ROWS
    float * total;    // ROWS

    Room(const ggml_compute_params * params, int64_t key_size, int64_t value_size) {
        const int64_t floats =
            ROWS * key_size + 2 * ROWS * BLOCK + ROWS * value_size + BLOCK * value_size + BLOCK * key_size;
        GGML_ASSERT(params->nth * floats * sizeof(float) <= params->wsize);
        float *         begin = static_cast<float *>(params->wdata) + params->ith * floats;
        const uintptr_t past  = reinterpret_cast<uintptr_t>(begin) % (LINE_FLOATS * sizeof(float));
        if (past != 0) {
            begin += LINE_FLOATS - past / sizeof(float);
        }
        queries = begin;
        keys    = queries + ROWS * key_size;
        values  = keys + BLOCK * key_size;
        scores  = values + BLOCK * value_size;
        results = scores + ROWS * BLOCK;
        largest = results + ROWS * value_size;
        total   = largest + ROWS;
    }
};

// out[row * out_step + i] (+)= sum over d of a[row * depth + d] * b[d * b_step + i], for 16 i's of each of VECTORS.
template <int VECTORS, bool ADDS>
void multiply(const float * a, const float * b, int64_t b_step, float * out, int64_t out_step, int64_t rows,
              int64_t depth) {
    in_tiles(rows, [&](auto height, int64_t row) {
        constexpr int HEIGHT = decltype(height)::value;
        const float * of_a   = a + row * depth;
        float *       of_out = out + row * out_step;
        __m512        sum[HEIGHT][VECTORS];
        for (int r = 0; r < HEIGHT; ++r) {
            for (int v = 0; v < VECTORS; ++v) {
                sum[r][v] = ADDS ? _mm512_loadu_ps(of_out + r * out_step + LANES * v) : _mm512_setzero_ps();
            }
        }
        for (int64_t d = 0; d < depth; ++d) {
            __m512 shared[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                shared[v] = _mm512_loadu_ps(b + d * b_step + LANES * v);
            }
            for (int r = 0; r < HEIGHT; ++r) {
                const __m512 own = _mm512_set1_ps(of_a[r * depth + d]);
                for (int v = 0; v < VECTORS; ++v) {
                    sum[r][v] = _mm512_fmadd_ps(own, shared[v], sum[r][v]);
                }
            }
        }
        for (int r = 0; r < HEIGHT; ++r) {
            for (int v = 0; v < VECTORS; ++v) {
                _mm512_storeu_ps(of_out + r * out_step + LANES * v, sum[r][v]);
            }
        }
    });
}

inline __m512 widened(const F16 * from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// Which keys of a block one token's row of the mask lets it see, a bit each.
uint64_t seen_of(const F16 * mask) {
    const __m512i minus_infinity = _mm512_set1_epi16(static_cast<int16_t>(0xfc00));
    uint64_t      seen           = 0;
    for (int64_t c = 0; c < BLOCK; c += 32) {
        seen |= uint64_t(_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(mask + c), minus_infinity)) << c;
    }
    return seen;
}

// A row of the next block is asked for: a head's rows lie apart from each other, and each would be waited for.
HEADRACE_ALWAYS inline void ask_for(const ggml_tensor * t, int64_t key, int64_t head, int64_t stream) {
    if (key < t->ne[1]) {
        const F16 * row = at<F16>(t, key, head, stream);
        for (int64_t d = 0; d < t->ne[0]; d += LINE_HALVES) {
            _mm_prefetch(reinterpret_cast<const char *>(row + d), _MM_HINT_T0);
        }
    }
}

// The keys of a block turned around, its values widened. Values that nobody sees are none: what was left in their place could
// be infinite, and no weight makes nothing of that.
void take(const Attention & of, const Room & room, int64_t key, int64_t head, int64_t stream, uint64_t seen) {
    for (int64_t c = 0; c < BLOCK; c += LANES) {
        for (int i = 0; i < LANES; ++i) {
            ask_for(of.k, key + BLOCK + c + i, head, stream);
        }
        for (int64_t d = 0; d < of.key_size; d += LANES) {
            __m512i words[LANES];
            for (int i = 0; i < LANES; ++i) {
                words[i] = _mm512_castps_si512(widened(at<F16>(of.k, key + c + i, head, stream) + d));
            }
            headrace::store_turned(words, reinterpret_cast<uint32_t *>(room.keys + d * BLOCK + c), BLOCK);
        }
    }
    for (int64_t c = 0; c < BLOCK; ++c) {
        ask_for(of.v, key + BLOCK + c, head, stream);
        const F16 * from = at<F16>(of.v, key + c, head, stream);
        for (int64_t d = 0; d < of.value_size; d += LANES) {
            _mm512_storeu_ps(room.values + c * of.value_size + d,
                             (seen >> c & 1) != 0 ? widened(from + d) : _mm512_setzero_ps());
        }
    }
}

// A row's scores of a block become weights; what it has summed up so far is corrected to its new largest score.
void weigh(const Attention & of, const Room & room, int64_t row, const F16 * mask) {
    float * scores  = room.scores + row * BLOCK;
    __m512  largest = _mm512_set1_ps(-INFINITY);
    __m512  score[BLOCK / LANES];
    for (int64_t i = 0; i < BLOCK / LANES; ++i) {
        score[i] = _mm512_loadu_ps(scores + LANES * i);
        if (mask != nullptr) {
            // What is hidden counts for nothing, be its score a number or not.
            const __m512    of_mask = widened(mask + LANES * i), hidden = _mm512_set1_ps(-INFINITY);
            const __mmask16 is_seen = _mm512_cmp_ps_mask(of_mask, hidden, _CMP_NEQ_UQ);
            score[i]                = _mm512_mask_add_ps(hidden, is_seen, score[i], of_mask);
        }
        largest = _mm512_max_ps(largest, score[i]);
    }
    const float before = room.largest[row];
    const float now    = std::max(_mm512_reduce_max_ps(largest), before);
    if (now == -INFINITY) {
        std::fill_n(scores, BLOCK, 0.0f);
        return;
    }
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < BLOCK / LANES; ++i) {
        const __m512 weight = ggml_v_expf(_mm512_sub_ps(score[i], _mm512_set1_ps(now)));
        total               = _mm512_add_ps(total, weight);
        _mm512_storeu_ps(scores + LANES * i, weight);
    }
    if (now > before) {
        const float correction = std::exp(before - now);
        float *     results    = room.results + row * of.value_size;
        for (int64_t d = 0; d < of.value_size; d += LANES) {
            _mm512_storeu_ps(results + d, _mm512_mul_ps(_mm512_loadu_ps(results + d), _mm512_set1_ps(correction)));
        }
        room.total[row] *= correction;
        room.largest[row] = now;
    }
    room.total[row] += _mm512_reduce_add_ps(total);
}

// The attention of some tokens of a sequence, in all heads that share the keys and values of one.
void attend(const Attention & of, const Room & room, int64_t first, int64_t num_tokens, int64_t head, int64_t stream) {
    const int64_t num_rows = num_tokens * of.heads_together;
    for (int64_t c = 0; c < BLOCK; ++c) {
        ask_for(of.k, c, head, stream);
        ask_for(of.v, c, head, stream);
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        const float * from =
            at<float>(of.q, first + row / of.heads_together, head * of.heads_together + row % of.heads_together, stream);
        float * to = room.queries + row * of.key_size;
        for (int64_t d = 0; d < of.key_size; d += LANES) {
            _mm512_storeu_ps(to + d, _mm512_mul_ps(_mm512_loadu_ps(from + d), _mm512_set1_ps(of.scale)));
        }
    }
    std::fill_n(room.results, num_rows * of.value_size, 0.0f);
    std::fill_n(room.largest, num_rows, -INFINITY);
    std::fill_n(room.total, num_rows, 0.0f);

    for (int64_t key = 0; key < of.k->ne[1]; key += BLOCK) {
        const auto mask_of = [&](int64_t token) -> const F16 * {
            return of.mask ? at<F16>(of.mask, first + token, 0, stream % of.mask->ne[3]) + key : nullptr;
        };
        uint64_t seen = of.mask == nullptr ? ~uint64_t(0) : 0;
        for (int64_t token = 0; token < num_tokens && ~seen != 0; ++token) {
            seen |= seen_of(mask_of(token));
        }
        if (seen == 0) {
            continue;
        }
        take(of, room, key, head, stream, seen);
        multiply<BLOCK / LANES, false>(room.queries, room.keys, BLOCK, room.scores, BLOCK, num_rows, of.key_size);
        for (int64_t row = 0; row < num_rows; ++row) {
            weigh(of, room, row, mask_of(row / of.heads_together));
        }
        for (int64_t d = 0; d < of.value_size; d += CHUNK) {
            of_vectors(std::min(CHUNK, of.value_size - d) / LANES, [&](auto vectors) {
                multiply<decltype(vectors)::value, true>(room.scores, room.values + d, of.value_size, room.results + d,
                                                         of.value_size, num_rows, BLOCK);
            });
        }
    }

    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t token   = first + row / of.heads_together;
        const int64_t q_head  = head * of.heads_together + row % of.heads_together;
        const float   part    = room.total[row] == 0 ? 0 : 1 / room.total[row];
        const float * results = room.results + row * of.value_size;
        // Heads and tokens have changed places: the result is read as one long row for each token.
        float * to = const_cast<float *>(at<float>(of.result, q_head, token, stream));
        for (int64_t d = 0; d < of.value_size; d += LANES) {
            _mm512_storeu_ps(to + d, _mm512_mul_ps(_mm512_loadu_ps(results + d), _mm512_set1_ps(part)));
        }
    }
}

}  // namespace

// All threads call it with the same tensor.
extern "C" void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * dst) {
    const Attention of(dst, params->nth);
    if (params->use_ref || !of.is_ours()) {
        __real_ggml_compute_forward_flash_attn_ext(params, dst);
        return;
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const Room    room(params, of.key_size, of.value_size);
    const int64_t num_jobs = of.jobs(), num_tiles = of.token_tiles(), num_heads = of.k->ne[2];
    int64_t       mine     = params->ith;
    while (mine < num_jobs) {
        const int64_t first = mine % num_tiles * of.tokens_together;
        attend(of, room, first, std::min(of.tokens_together, of.q->ne[1] - first), mine / num_tiles % num_heads,
               mine / num_tiles / num_heads);
        mine = ggml_threadpool_chunk_add(params->threadpool, 1);
    }
}

#else

extern "C" void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * dst) {
    __real_ggml_compute_forward_flash_attn_ext(params, dst);
}

#endif
