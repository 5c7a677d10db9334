// What the kernels share: vectors of 16 numbers in bfloat16 and float32, and products of small tiles.
//
// The kernels are for CPUs with AVX512-BF16. They are plain C++ without torch's headers: they compile in seconds, and one
// build serves every version of torch. OpenMP's functions are those of the runtime that torch has loaded.
// `cpu_kernels.py` compiles, loads and calls them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

// the first `count` of a vector's
inline __mmask16 lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
}
inline __m512 load(const bf16* from, __mmask16 some = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from)), 16));
}
inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

// `run` with a number of the precision in which the caller computes.
template <class Run>
void in_precision(int wide, const Run& run) {
  if (wide) run(float());
  else run(bf16());
}

// e^x of x <= 0; NaN stays NaN, since `max` gives its second operand then
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);
  const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691e-4f);
  for (float next : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 0.16666665f, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(next));
  return _mm512_scalef_ps(sum, power);
}

// 16 by 16 words
inline void transpose(__m512i* r) {
  __m512i t[16];
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

// [words, 16] columns of up to 16 rows of `words` words of 32 bits; the others are 0. `row` numbers lie from one to the next.
template <class T>
void turned(uint32_t* to, int64_t to_row, const T* from, int64_t row, int count, int words) {
  for (int word = 0; word < words; word += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i)
      r[i] = i < count ? _mm512_loadu_si512((const uint32_t*)(from + i * row) + word) : _mm512_setzero_si512();
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (word + i) * to_row, r[i]);
  }
}

// c = a b, or c += a b, of float32 [M, 16 J]. Words are pairs of what is summed over: `a` has a row of them for each row
// of c, `b` a row for each pair.
template <int M, int J>
inline void tile(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int pairs,
                 bool add) {
  __m512 sum[M][J];
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) sum[m][j] = add ? _mm512_loadu_ps(c + m * c_row + 16 * j) : _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; ++pair) {
    __m512bh right[J];
    for (int j = 0; j < J; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + pair * b_row + 16 * j);
    for (int m = 0; m < M; ++m) {
      const auto left = (__m512bh)_mm512_set1_epi32(int(a[m * a_row + pair]));
      for (int j = 0; j < J; ++j) sum[m][j] = _mm512_dpbf16_ps(sum[m][j], right[j], left);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) _mm512_storeu_ps(c + m * c_row + 16 * j, sum[m][j]);
}

// The same for `rows` from 1 to M.
template <int M, int J>
inline void few_rows(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                     int rows, int pairs, bool add) {
  if (rows == M)
    tile<M, J>(c, c_row, a, a_row, b, b_row, pairs, add);
  else if constexpr (M > 1)
    few_rows<M - 1, J>(c, c_row, a, a_row, b, b_row, rows, pairs, add);
}

}  // namespace
