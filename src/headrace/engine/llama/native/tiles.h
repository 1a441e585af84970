// What the kernels are made of: rows in tiles, and 16 x 16 words turned around in registers.
//
// A tile is what the inner loops keep in registers: up to TILE_ROWS rows of results, each of a few vectors of 16 floats.
// With 512-bit vectors there are 32 registers: 6 x 4 for results, 4 for what all rows share, 1 for the row's own.
//
// HEADRACE_WIDE: the processor that is compiled for has what all kernels need.

#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__F16C__)
#    define HEADRACE_WIDE
#endif

#ifdef HEADRACE_WIDE

#include <cstdint>
#include <immintrin.h>
#include <type_traits>

namespace headrace {

// g++ takes a function that only fetches ahead for one without effect, and leaves out its calls.
#define HEADRACE_ALWAYS __attribute__((always_inline))

constexpr int64_t LANES = 16;
constexpr int64_t TILE_ROWS = 6;

// Calls compute(rows, first) for tiles of about the same height that make up `rows`; the number of a tile's rows is a
// constant of the type, so that the compiler keeps each of them in registers.
template <typename Compute> inline void in_tiles(int64_t rows, Compute && compute) {
    int64_t first = 0;
    for (int64_t left = (rows + TILE_ROWS - 1) / TILE_ROWS; left > 0; --left) {
        const int64_t height = (rows - first + left - 1) / left;
        switch (height) {
            case 1: compute(std::integral_constant<int, 1>(), first); break;
            case 2: compute(std::integral_constant<int, 2>(), first); break;
            case 3: compute(std::integral_constant<int, 3>(), first); break;
            case 4: compute(std::integral_constant<int, 4>(), first); break;
            case 5: compute(std::integral_constant<int, 5>(), first); break;
            default: compute(std::integral_constant<int, TILE_ROWS>(), first); break;
        }
        first += height;
    }
}

// Calls compute(vectors) with a constant for 1 to 4 vectors.
template <typename Compute> inline void of_vectors(int64_t vectors, Compute && compute) {
    switch (vectors) {
        case 1: compute(std::integral_constant<int, 1>()); break;
        case 2: compute(std::integral_constant<int, 2>()); break;
        case 3: compute(std::integral_constant<int, 3>()); break;
        default: compute(std::integral_constant<int, 4>()); break;
    }
}

// 16 rows of 16 words become 16 columns.
inline void turn(__m512i rows[16]) {
    __m512i pairs[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i]     = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Lane l of fours[4 * g + q] gets word 4 * l + q of the rows 4 * g to 4 * g + 3.
    __m512i fours[16];
    for (int i = 0; i < 16; i += 4) {
        fours[i]     = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    constexpr int EVEN = 0x88, ODD = 0xdd;
    for (int q = 0; q < 4; ++q) {
        const __m512i upper_even = _mm512_shuffle_i32x4(fours[q], fours[4 + q], EVEN);
        const __m512i upper_odd  = _mm512_shuffle_i32x4(fours[q], fours[4 + q], ODD);
        const __m512i lower_even = _mm512_shuffle_i32x4(fours[8 + q], fours[12 + q], EVEN);
        const __m512i lower_odd  = _mm512_shuffle_i32x4(fours[8 + q], fours[12 + q], ODD);
        rows[0 + q]  = _mm512_shuffle_i32x4(upper_even, lower_even, EVEN);
        rows[4 + q]  = _mm512_shuffle_i32x4(upper_odd, lower_odd, EVEN);
        rows[8 + q]  = _mm512_shuffle_i32x4(upper_even, lower_even, ODD);
        rows[12 + q] = _mm512_shuffle_i32x4(upper_odd, lower_odd, ODD);
    }
}

// The same, with row i stored at out + i * step, in words, each aligned to 64 bytes.
inline void store_turned(__m512i rows[16], uint32_t * out, int64_t step) {
    turn(rows);
    for (int i = 0; i < 16; ++i) {
        _mm512_store_si512(out + i * step, rows[i]);
    }
}

}  // namespace headrace

#endif
