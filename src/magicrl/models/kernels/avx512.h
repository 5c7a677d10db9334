// Vectors of 16 numbers on CPUs with AVX512. `avx2.h` has the same functions for other CPUs.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using bf16 = uint16_t;
using Floats = __m512;   // 16 float32 numbers, with + - * /
using Bits = __m512i;    // 16 words of 32 bits: numbers, or pairs of bfloat16 numbers, the first in the low half
using Mask = __mmask16;  // a bit for each number

constexpr int REGISTERS = 32;  // that hold a vector

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Bits all_bits(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline Floats as_floats(Bits x) { return _mm512_castsi512_ps(x); }

inline Bits load_bits(const void* from) { return _mm512_loadu_si512(from); }
inline void store_bits(void* to, Bits x) { _mm512_storeu_si512(to, x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask some) { return _mm512_maskz_loadu_ps(some, from); }
inline Floats load(const bf16* from, Mask some = 0xffff) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from)), 16));
}
#ifdef __AVX512BF16__
inline __m256i rounded_to_bf16(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else  // to the nearest, even if two are, and NaN stays NaN
inline __m256i rounded_to_bf16(Floats x) {
  const Bits bits = (Bits)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all_bits(1));
  const Bits sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, all_bits(0x7fff)));
  const Mask numbers = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  const Bits rounded = _mm512_mask_mov_epi32(_mm512_or_si512(bits, all_bits(0x400000)), numbers, sum);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
#endif
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, Floats x, Mask some) { _mm512_mask_storeu_ps(to, some, x); }
inline void store(bf16* to, Floats x) { _mm256_storeu_si256((__m256i*)to, rounded_to_bf16(x)); }
inline void store(bf16* to, Floats x, Mask some) { _mm256_mask_storeu_epi16(to, some, rounded_to_bf16(x)); }

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c, rounded once
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }                // b if one is NaN
inline Floats root(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats whole(Floats x) { return _mm512_roundscale_ps(x, 0); }                        // the nearest, even if two are
inline Floats times_power(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }    // x 2^power
inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }       // false for NaN
inline Mask not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // true for NaN
inline Mask greater(Bits a, Bits b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Floats choose(Mask some, Floats x, Floats otherwise) { return _mm512_mask_mov_ps(otherwise, some, x); }
inline Floats keep(Mask some, Floats x) { return _mm512_maskz_mov_ps(some, x); }  // 0 elsewhere
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// one register of float32 numbers, for sums that need all registers
using One = __m512;
constexpr int ONE = 16;  // its numbers
inline One load_one(const float* from) { return _mm512_loadu_ps(from); }
inline One fma_one(One a, One b, One c) { return _mm512_fmadd_ps(a, b, c); }
inline __m256 eight_of(One x) { return _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1); }  // sums of two each

// `sum` plus the products of pairs of bfloat16 numbers
inline Floats even_of(Bits pairs) { return as_floats(_mm512_slli_epi32(pairs, 16)); }
inline Floats odd_of(Bits pairs) { return as_floats(_mm512_and_si512(pairs, all_bits(0xffff0000))); }
#if defined SLOW_PAIRS || !defined __AVX512BF16__  // there is no instruction for it, or one that takes as long as four of float32
constexpr bool WIDENS = true;
inline Floats add_pairs(Floats sum, Bits a, Bits b) {
  return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), sum));
}
#else
constexpr bool WIDENS = false;
inline Floats add_pairs(Floats sum, Bits a, Bits b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif
inline Bits pairs_of(Floats even, Floats odd) {
  const auto words = [](Floats x) { return _mm512_cvtepu16_epi32(rounded_to_bf16(x)); };
  return _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16));
}

// Pairs of neighbours of two rows of 32 bfloat16 numbers: by fours, since that takes one instruction. The first result
// has the numbers 0 to 3 of every eight, the second the others. `in_order` puts what was computed with them in order.
inline Bits pair_first_fours(Bits even, Bits odd) { return _mm512_unpacklo_epi16(even, odd); }
inline Bits pair_second_fours(Bits even, Bits odd) { return _mm512_unpackhi_epi16(even, odd); }
inline void in_order(Floats& first, Floats& second) {
  const Bits order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const Floats fours = first;
  first = _mm512_permutex2var_ps(fours, order, second);
  second = _mm512_permutex2var_ps(fours, _mm512_add_epi32(order, _mm512_set1_epi32(8)), second);
}

// Two rows of 32 bfloat16 numbers become the pairs of their neighbours.
inline void interleave(Bits& even, Bits& odd) {
  alignas(64) uint16_t order[2][32];
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 32; ++i) order[half][i] = uint16_t(16 * half + i / 2 + 32 * (i % 2));
  const Bits first = even;
  even = _mm512_permutex2var_epi16(first, _mm512_load_si512(order[0]), odd);
  odd = _mm512_permutex2var_epi16(first, _mm512_load_si512(order[1]), odd);
}

// 16 by 16 words
inline void transpose(Bits* r) {
  Bits t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

}  // namespace
