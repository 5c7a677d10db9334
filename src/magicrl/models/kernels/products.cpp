// Products with the weight of a linear layer, for decoding: few rows, so that reading the weight takes the time.
//
// The weight is kept in the order in which it is read. A row's bits don't depend on the other rows.

#include "vectors.h"

namespace {

constexpr int COLUMNS = 48;  // of a block of the weight
// of a tile: its most rows, and vectors of its columns
constexpr int MOST = REGISTERS > 16 ? 8 : 4, VECTORS = REGISTERS > 16 ? COLUMNS / 16 : 1;

// Rounds sums of [rows, COLUMNS] once, after adding what is given. `columns` are those of `out` and `residual`, of which
// `some` are from this block on.
void finished(bf16* out, int64_t columns, const float* sums, int rows, int64_t some, const bf16* bias,
              const bf16* residual) {
  for (int row = 0; row < rows; ++row)
    for (int at = 0; at < std::min(int64_t(COLUMNS), some); at += 16) {
      const Mask here = lanes(some - at);
      Floats sum = load(sums + row * COLUMNS + at);
      if (bias) sum = sum + load(bias + at, here);
      if (residual) sum = sum + load(residual + row * columns + at, here);
      store(out + row * columns + at, sum, here);
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
      for (int part = 0; part < COLUMNS; part += 16 * VECTORS)
        few_rows<MOST, VECTORS>(sums + part, COLUMNS, (const uint32_t*)x + row * pairs, pairs,
                                weight + at * pairs + part, COLUMNS, int(some), int(pairs), false);
      const int64_t place = row * columns + at;
      finished(out + place, columns, sums, int(some), columns - at, bias ? bias + at : nullptr,
               residual ? residual + place : nullptr);
    }
}
}
