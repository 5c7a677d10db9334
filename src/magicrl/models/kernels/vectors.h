// What the kernels share: vectors of 16 numbers in bfloat16 and float32, and products of small tiles.
//
// They are plain C++ without torch's headers: they compile in seconds, and one build serves every version of torch.
// OpenMP's functions are those of the runtime that torch has loaded. `cpu_kernels.py` compiles, loads and calls them.

#pragma once

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace {

#define ALWAYS __attribute__((always_inline)) inline  // a call would write all vectors to memory

constexpr int LINE = 64;  // bytes of a cache line, and of a vector

// Memory at the start of a cache line: a vector that crosses one takes twice as long.
template <class T>
struct OnLines {
  using value_type = T;
  OnLines() = default;
  template <class U>
  OnLines(const OnLines<U>&) {}
  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(LINE)); }
  void deallocate(T* place, size_t) { ::operator delete(place, std::align_val_t(LINE)); }
  bool operator==(const OnLines&) const { return true; }
  bool operator!=(const OnLines&) const { return false; }
};
template <class T>
using Table = std::vector<T, OnLines<T>>;

// the first `count` of a vector's
inline Mask lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : Mask((1u << count) - 1); }

// `run` with a number of the precision in which the caller computes.
template <class Run>
void in_precision(int wide, const Run& run) {
  if (wide) run(float());
  else run(bf16());
}

// e^x of x <= 0; NaN stays NaN, since `larger` gives its second operand then
ALWAYS Floats exponential(Floats x) {
  x = larger(all(-87.0f), x);  // the smallest normal number; processors are slow with smaller ones
  const Floats power = whole(x * all(1.44269504f));
  Floats rest = fnma(power, all(0.693359375f), x);
  rest = fnma(power, all(-2.12194440e-4f), rest);
  Floats sum = all(1.9875691e-4f);
  for (float next : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 0.16666665f, 0.5f, 1.0f, 1.0f})
    sum = fma(sum, rest, all(next));
  return times_power(sum, power);
}

// [words, 16] columns of up to 16 rows of `words` words of 32 bits; the others are 0. `row` numbers lie from one to the next.
template <class T>
void turned(uint32_t* to, int64_t to_row, const T* from, int64_t row, int count, int words) {
  for (int word = 0; word < words; word += 16) {
    Bits r[16];
    for (int i = 0; i < 16; ++i)
      r[i] = i < count ? load_bits((const uint32_t*)(from + i * row) + word) : all_bits(0);
    transpose(r);
    for (int i = 0; i < 16; ++i) store_bits(to + (word + i) * to_row, r[i]);
  }
}

// `sum` plus the products of 16 pairs and a pair of a row: a word, or two float32 numbers.
inline Floats add_pair(Floats sum, Bits b, const uint32_t* row, int pair) { return add_pairs(sum, b, all_bits(row[pair])); }
inline Floats add_pair(Floats sum, Bits b, const float* row, int pair) {
  return fma(even_of(b), all(row[2 * pair]), fma(odd_of(b), all(row[2 * pair + 1]), sum));
}

// c = a b, or c += a b, of float32 [M, 16 J]. Words are pairs of what is summed over: `a` has a row of them for each row
// of c, which may be widened to float32, `b` a row for each pair.
template <int M, int J, class T>
inline void tile(float* c, int64_t c_row, const T* a, int64_t a_row, const uint32_t* b, int64_t b_row, int pairs,
                 bool add) {
  Floats sum[M][J];
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) sum[m][j] = add ? load(c + m * c_row + 16 * j) : all(0);
  for (int pair = 0; pair < pairs; ++pair) {
    Bits right[J];
    for (int j = 0; j < J; ++j) right[j] = load_bits(b + pair * b_row + 16 * j);
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < J; ++j) sum[m][j] = add_pair(sum[m][j], right[j], a + m * a_row, pair);
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) store(c + m * c_row + 16 * j, sum[m][j]);
}

// The same for `rows` from 1 to M.
template <int M, int J, class T>
inline void few_rows(float* c, int64_t c_row, const T* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                     int rows, int pairs, bool add) {
  if (rows == M)
    tile<M, J>(c, c_row, a, a_row, b, b_row, pairs, add);
  else if constexpr (M > 1)
    few_rows<M - 1, J>(c, c_row, a, a_row, b, b_row, rows, pairs, add);
}

}  // namespace
