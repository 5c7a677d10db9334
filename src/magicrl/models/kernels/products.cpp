// Products with the weight of a linear layer, for decoding: few rows, so that reading the weight takes the time.
//
// The weight is kept in the order in which it is read. A row's bits don't depend on the other rows.

#include "vectors.h"

namespace {

constexpr int COLUMNS = 48;  // of a block of the weight
constexpr int MOST = 8;      // rows that are computed at once

// Rounds sums of [rows, COLUMNS] once, after adding what is given. `columns` are those of `out` and `residual`, of which
// `some` are from this block on.
void finished(bf16* out, int64_t columns, const float* sums, int rows, int64_t some, const bf16* bias,
              const bf16* residual) {
  for (int row = 0; row < rows; ++row)
    for (int at = 0; at < std::min(int64_t(COLUMNS), some); at += 16) {
      const __mmask16 here = lanes(some - at);
      __m512 sum = load(sums + row * COLUMNS + at);
      if (bias) sum = _mm512_add_ps(sum, load(bias + at, here));
      if (residual) sum = _mm512_add_ps(sum, load(residual + row * columns + at, here));
      _mm256_mask_storeu_epi16(out + row * columns + at, here, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

}  // namespace

extern "C" {

// [columns, 2 pairs] to blocks of [pairs, COLUMNS] words, each a pair of neighbours of one column. What is missing in the
// last block is 0.
void pack_weight(uint32_t* to, const bf16* from, int64_t columns, int64_t pairs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < columns; first += COLUMNS)
    for (int at = 0; at < COLUMNS; at += 16)
      turned(to + first * pairs + at, COLUMNS, from + (first + at) * 2 * pairs, 2 * pairs, int(columns - first) - at,
             int(pairs));
}

// out [rows, columns] = x [rows, 2 pairs] times a packed weight, plus `bias` and `residual` [rows, columns] unless null.
void multiply_packed(bf16* out, const bf16* x, const uint32_t* weight, const bf16* bias, const bf16* residual,
                     int64_t rows, int64_t pairs, int64_t columns, int threads) {
  const int64_t blocks = (rows + MOST - 1) / MOST;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t at = 0; at < columns; at += COLUMNS)
    for (int64_t block = 0; block < blocks; ++block) {
      // blocks of nearly the same size
      const int64_t row = block * rows / blocks, some = (block + 1) * rows / blocks - row;
      alignas(64) float sums[MOST * COLUMNS];
      few_rows<MOST, COLUMNS / 16>(sums, COLUMNS, (const uint32_t*)x + row * pairs, pairs, weight + at * pairs, COLUMNS,
                                   int(some), int(pairs), false);
      const int64_t place = row * columns + at;
      finished(out + place, columns, sums, int(some), columns - at, bias ? bias + at : nullptr,
               residual ? residual + place : nullptr);
    }
}
}
