// Products with the weight of a linear layer, for decoding: few rows, so that reading the weight takes the time.
//
// A bfloat16 weight is kept in the order in which it is read, a float32 one as it is. A row's bits don't depend on the
// other rows.

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

// Of a float32 product: rows and columns of a tile, which with a row's part and a column's fill the registers, and bytes
// of the rows and of the block of the weight that stay in the caches of level 1 and 2.
constexpr int TALL = ONE > 8 ? 6 : 3, WIDE = 4, ROWS_BYTES = 24 << 10, BLOCK_BYTES = 200 << 10;

// Products of `rows`, from 1 to R, of x with WIDE rows of the weight.
template <int R>
[[gnu::always_inline]] inline void dots(float* out, int64_t columns, const float* x, const float* weight,
                                        int64_t width, int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return dots<R - 1>(out, columns, x, weight, width, rows);
  One sum[R][WIDE] = {};
  for (int64_t at = 0; at < width; at += ONE) {
    One part[R];
    for (int row = 0; row < R; ++row) part[row] = load_one(x + row * width + at);
    for (int column = 0; column < WIDE; ++column) {
      const One factor = load_one(weight + column * width + at);
      for (int row = 0; row < R; ++row) sum[row][column] = fma_one(part[row], factor, sum[row][column]);
    }
  }
  for (int row = 0; row < R; ++row) {
    const One* s = sum[row];
    const __m256 fours =
        _mm256_hadd_ps(_mm256_hadd_ps(eight_of(s[0]), eight_of(s[1])), _mm256_hadd_ps(eight_of(s[2]), eight_of(s[3])));
    _mm_storeu_ps(out + row * columns, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
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

// out [rows, columns] = x [rows, width] times a weight [columns, width] in float32. `width` is a multiple of 16, `columns`
// at least WIDE: the last tile begins earlier if it would be narrower, and writes some values twice.
void multiply_rows(float* out, const float* x, const float* weight, int64_t rows, int64_t width, int64_t columns,
                   int threads) {
  const int64_t row_bytes = 4 * width, together = std::max<int64_t>(1, ROWS_BYTES / (TALL * row_bytes)) * TALL;
  const int64_t block = std::max<int64_t>(WIDE, BLOCK_BYTES / row_bytes / WIDE * WIDE);
  // Each tile fetches its part of the next block: reading that from memory takes as long as computing with ten rows.
  const int64_t tiles = (rows + TALL - 1) / TALL * (block / WIDE), lines = (block * row_bytes / 64 + tiles - 1) / tiles;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t end = std::min(columns, first + block);
    const char* next = (const char*)(weight + end * width);
    for (int64_t start = 0; start < rows; start += together)
      for (int64_t column = first; column < end; column += WIDE)
        for (int64_t row = start; row < std::min(rows, start + together); row += TALL) {
          for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
          const int64_t at = std::min(column, columns - WIDE);
          dots<TALL>(out + row * columns + at, columns, x + row * width, weight + at * width, width, rows - row);
        }
  }
}
}
