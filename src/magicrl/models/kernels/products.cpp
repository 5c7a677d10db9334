// Products with the weight of a linear layer, for decoding: few rows, so that reading the weight takes the time.
//
// A bfloat16 weight is kept in the order in which it is read, a float32 one as it is. A row's bits don't depend on the
// other rows.

#include "tiles.h"
#include "parts.h"

namespace {

#ifdef __AMX_BF16__
constexpr int COLUMNS = 2 * SIDE;  // of a block of the weight
#else
constexpr int COLUMNS = 48;
#endif
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

#ifdef __AMX_BF16__

// Where sums of up to 2 SIDE rows and COLUMNS columns belong in `out`.
struct Place {
  bf16* out;
  const bf16 *bias, *residual;
  int64_t columns, row, at, count;

  // Rounds rows [first, end) of the sums once, after adding what is given. `far`: past the caches.
  void write(const float* sums, int64_t first, int64_t end, bool far) const {
    const int64_t some = columns - at;
    for (int64_t i = first; i < std::min(end, count); ++i) {
      const int64_t place = (row + i) * columns + at;
      Floats sum[2];
      for (int half = 0; half < 2; ++half) {
        const Mask here = lanes(some - 16 * half);
        sum[half] = load(sums + i * COLUMNS + 16 * half);
        if (bias) sum[half] = sum[half] + load(bias + at + 16 * half, here);
        if (residual) sum[half] = sum[half] + load(residual + place + 16 * half, here);
        if (some < COLUMNS) store(out + place + 16 * half, sum[half], here);
      }
      const Bits both = (Bits)_mm512_cvtne2ps_pbh(sum[1], sum[0]);
      if (some < COLUMNS) continue;
      if (far) _mm512_stream_si512((Bits*)(out + place), both);
      else store_bits(out + place, both);
    }
  }
};

// `multiply_packed` on tiles. While two by two tiles are multiplied, the sums before them are rounded, and the next block
// of the weight arrives in the second cache.
void multiply_on_tiles(bf16* out, const uint32_t* x, const uint32_t* weight, const bf16* bias, const bf16* residual,
                       int64_t rows, int64_t pairs, int64_t columns, int threads) {
  constexpr int64_t TOGETHER = 2 * SIDE, CACHED = 4 * TOGETHER;  // rows; those whose results stay in the caches
  const int64_t whole = rows / TOGETHER * TOGETHER, parts = (rows + TOGETHER - 1) / TOGETHER, steps = pairs / SIDE;
  Table<uint32_t> last(TOGETHER * pairs);  // the last rows, and zeros behind them
  std::copy(x + whole * pairs, x + rows * pairs, last.begin());
  const int64_t lines = (COLUMNS * SIDE / 16 / parts + QUARTERS - 1) / QUARTERS;  // of a quarter of a step
  const int64_t each = (TOGETHER + steps - 1) / steps;
  const bool far = rows > CACHED && columns % COLUMNS == 0 && (uintptr_t)out % sizeof(Bits) == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Tiles tiles;
    alignas(64) float sums[2][TOGETHER * COLUMNS];
    int which = 0;
    Place before{out, bias, residual, columns, 0, 0, 0};
#pragma omp for schedule(static)
    for (int64_t at = 0; at < columns; at += COLUMNS) {
      const uint32_t *block = weight + at * pairs, *next = block + pairs * COLUMNS, *behind = next + pairs * COLUMNS;
      for (int64_t row = 0; row < rows; row += TOGETHER, which = 1 - which) {
        const LeftRows left{row < whole ? x + row * pairs : last.data(), pairs};
        const auto meanwhile = [&](int quarter) {
          for (int64_t i = 0; i < lines && next < behind; ++i, next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
          const int step = quarter / QUARTERS;
          if (quarter % QUARTERS == 0) before.write(sums[1 - which], step * each, (step + 1) * each, far);
        };
        const int64_t count = std::min(TOGETHER, rows - row);
        if (count > SIDE)
          tile_product<2>(sums[which], COLUMNS, left, TilesInOrder{block}, int(pairs), false, meanwhile);
        else
          tile_product<1>(sums[which], COLUMNS, left, TilesInOrder{block}, int(pairs), false, meanwhile);
        before.row = row, before.at = at, before.count = count;
      }
    }
    before.write(sums[1 - which], 0, TOGETHER, far);
    if (far) _mm_sfence();
  }
}

#else

void multiply_on_tiles(bf16*, const uint32_t*, const uint32_t*, const bf16*, const bf16*, int64_t, int64_t, int64_t, int) {}

#endif

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

// [columns, 2 pairs] to blocks of [pairs, COLUMNS] words, each a pair of neighbours of one column, or to such blocks as
// `TilesInOrder`. What is missing in the last block is 0.
void pack_weight(uint32_t* to, const bf16* from, int64_t columns, int64_t pairs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < columns; first += COLUMNS)
    for (int at = 0; at < COLUMNS; at += 16) {
      const bf16* rows = from + (first + at) * 2 * pairs;
      const int count = int(columns - first) - at;
      if (!has_tiles())
        turned(to + first * pairs + at, COLUMNS, rows, 2 * pairs, count, int(pairs));
      else
        for (int64_t pair = 0; pair < pairs; pair += SIDE)
          turned(to + first * pairs + pair * COLUMNS + at * SIDE, SIDE, rows + 2 * pair, 2 * pairs, count, SIDE);
    }
}

// out [rows, columns] = x [rows, 2 pairs] times a packed weight, plus `bias` and `residual` [rows, columns] unless null.
void multiply_packed(bf16* out, const bf16* x, const uint32_t* weight, const bf16* bias, const bf16* residual,
                     int64_t rows, int64_t pairs, int64_t columns, int threads) {
  if (has_tiles()) {
    multiply_on_tiles(out, (const uint32_t*)x, weight, bias, residual, rows, pairs, columns, threads);
    return;
  }
  Table<float> wide(WIDENS ? rows * 2 * pairs : 0);  // x, for all columns
  for (size_t i = 0; i < wide.size(); i += 16) store(&wide[i], load(x + i));
  const int64_t blocks = (rows + MOST - 1) / MOST;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t at = 0; at < columns; at += COLUMNS)
    for (int64_t block = 0; block < blocks; ++block) {
      // blocks of nearly the same size
      const int64_t row = block * rows / blocks, some = (block + 1) * rows / blocks - row;
      alignas(64) float sums[MOST * COLUMNS];
      for (int part = 0; part < COLUMNS; part += 16 * VECTORS) {
        const uint32_t* words = weight + at * pairs + part;
        if constexpr (WIDENS)
          few_rows<MOST, VECTORS>(sums + part, COLUMNS, &wide[row * 2 * pairs], 2 * pairs, words, COLUMNS, int(some),
                                  int(pairs), false);
        else
          few_rows<MOST, VECTORS>(sums + part, COLUMNS, (const uint32_t*)x + row * pairs, pairs, words, COLUMNS,
                                  int(some), int(pairs), false);
      }
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
