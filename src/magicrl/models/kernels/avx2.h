// The vectors of `avx512.h` on CPUs that have only AVX2 and FMA: two registers of 8 numbers each, and bfloat16 numbers as
// the high halves of float32 ones.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
struct Floats {
  __m256 low, high;
};
struct Bits {
  __m256i low, high;
};
using Mask = uint16_t;

constexpr int REGISTERS = 8;

inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Bits all_bits(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline Floats as_floats(Bits x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator-(Floats x) { return {-x.low, -x.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats root(Floats x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats whole(Floats x) { return {_mm256_round_ps(x.low, 0), _mm256_round_ps(x.high, 0)}; }

// 2^power as a number's exponent: 0 below 2^-126
inline Floats times_power(Floats x, Floats power) {
  const auto factor = [](__m256 exponent) {
    return (__m256)_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
  };
  return {x.low * factor(power.low), x.high * factor(power.high)};
}

inline Mask mask_of(__m256 low, __m256 high) { return Mask(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8); }
inline Mask less(Floats a, Floats b) {
  return mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ));
}
inline Mask not_less(Floats a, Floats b) {
  return mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_NLT_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NLT_UQ));
}
// all bits of the numbers whose bit is set
inline Floats spread(Mask some) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  const __m256i bits = _mm256_set1_epi32(some);
  return {(__m256)_mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low),
          (__m256)_mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high)};
}
inline Floats choose(Mask some, Floats x, Floats otherwise) {
  const Floats chosen = spread(some);
  return {_mm256_blendv_ps(otherwise.low, x.low, chosen.low), _mm256_blendv_ps(otherwise.high, x.high, chosen.high)};
}
inline Floats keep(Mask some, Floats x) {
  const Floats kept = spread(some);
  return {_mm256_and_ps(x.low, kept.low), _mm256_and_ps(x.high, kept.high)};
}

using One = __m256;
constexpr int ONE = 8;
inline One load_one(const float* from) { return _mm256_loadu_ps(from); }
inline One fma_one(One a, One b, One c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 eight_of(One x) { return x; }

inline float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }
inline float sum_of(Floats x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float largest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Bits load_bits(const void* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
inline void store_bits(void* to, Bits x) {
  _mm256_storeu_si256((__m256i*)to, x.low);
  _mm256_storeu_si256((__m256i*)to + 1, x.high);
}
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(const bf16* from) {
  const auto eight = [&](int at) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + at))), 16);
  };
  return {eight(0), eight(8)};
}
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

// bfloat16 in the high half of each word; to the nearest, even if two are, and NaN stays NaN
inline Bits rounded_to_bf16(Floats x) {
  const auto rounded = [](__m256 number) {
    const __m256i bits = (__m256i)number;
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(sum, quiet, (__m256i)_mm256_cmp_ps(number, number, _CMP_UNORD_Q));
  };
  return {rounded(x.low), rounded(x.high)};
}
inline void store(bf16* to, Floats x) {
  const Bits bits = rounded_to_bf16(x);
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(bits.low, 16), _mm256_srli_epi32(bits.high, 16));
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

// The same for the first numbers of a vector, as `lanes` has them.
template <class T>
Floats load(const T* from, Mask some) {
  if (some == 0xffff) return load(from);
  T part[16] = {};
  std::memcpy(part, from, __builtin_popcount(some) * sizeof(T));
  return load(part);
}
template <class T>
void store(T* to, Floats x, Mask some) {
  if (some == 0xffff) return store(to, x);
  T part[16];
  store(part, x);
  std::memcpy(to, part, __builtin_popcount(some) * sizeof(T));
}

inline __m256 even_of(__m256i pairs) { return (__m256)_mm256_slli_epi32(pairs, 16); }
inline __m256 odd_of(__m256i pairs) { return (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))); }
inline Floats even_of(Bits pairs) { return {even_of(pairs.low), even_of(pairs.high)}; }
inline Floats odd_of(Bits pairs) { return {odd_of(pairs.low), odd_of(pairs.high)}; }
constexpr bool WIDENS = true;
inline Floats add_pairs(Floats sum, Bits a, Bits b) {
  return fma(even_of(a), even_of(b), fma(odd_of(a), odd_of(b), sum));
}
inline Bits pairs_of(Floats even, Floats odd) {
  const Bits first = rounded_to_bf16(even), second = rounded_to_bf16(odd);
  const auto pairs = [](__m256i low, __m256i high) {
    return _mm256_or_si256(_mm256_srli_epi32(low, 16), (__m256i)odd_of(high));
  };
  return {pairs(first.low, second.low), pairs(first.high, second.high)};
}

inline Bits pair_first_fours(Bits even, Bits odd) {
  return {_mm256_unpacklo_epi16(even.low, odd.low), _mm256_unpacklo_epi16(even.high, odd.high)};
}
inline Bits pair_second_fours(Bits even, Bits odd) {
  return {_mm256_unpackhi_epi16(even.low, odd.low), _mm256_unpackhi_epi16(even.high, odd.high)};
}
inline void in_order(Floats& first, Floats& second) {
  const Floats a = first, b = second;
  first = {_mm256_permute2f128_ps(a.low, b.low, 0x20), _mm256_permute2f128_ps(a.low, b.low, 0x31)};
  second = {_mm256_permute2f128_ps(a.high, b.high, 0x20), _mm256_permute2f128_ps(a.high, b.high, 0x31)};
}

inline void interleave(Bits& even, Bits& odd) {
  Floats fours = as_floats(pair_first_fours(even, odd)), others = as_floats(pair_second_fours(even, odd));
  in_order(fours, others);
  even = {(__m256i)fours.low, (__m256i)fours.high};
  odd = {(__m256i)others.low, (__m256i)others.high};
}

// Products of `x` with the first `count` of 8 rows of `width` numbers, times `scale`.
inline void dot_products(float* to, const float* x, const float* rows, int width, int count, float scale) {
  const float* row[8];
  for (int i = 0; i < 8; ++i) row[i] = rows + (i < count ? i : 0) * width;
  __m256 sum[8] = {};
  for (int at = 0; at < width; at += 8) {
    const __m256 part = _mm256_loadu_ps(x + at);
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_fmadd_ps(part, _mm256_loadu_ps(row[i] + at), sum[i]);
  }
  const auto fours = [&](int i) {
    return _mm256_hadd_ps(_mm256_hadd_ps(sum[i], sum[i + 1]), _mm256_hadd_ps(sum[i + 2], sum[i + 3]));
  };
  const __m256 low = fours(0), high = fours(4);
  const __m256 found = _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
  _mm256_storeu_ps(to, found * _mm256_set1_ps(scale));
}

// 8 by 8 words
inline void transpose_eight(__m256i* r) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

inline void transpose(Bits* r) {
  __m256i part[8];
  Bits t[16];
  for (int rows = 0; rows < 16; rows += 8)
    for (int columns = 0; columns < 2; ++columns) {
      for (int i = 0; i < 8; ++i) part[i] = columns ? r[rows + i].high : r[rows + i].low;
      transpose_eight(part);
      for (int i = 0; i < 8; ++i) (rows ? t[8 * columns + i].high : t[8 * columns + i].low) = part[i];
    }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace
