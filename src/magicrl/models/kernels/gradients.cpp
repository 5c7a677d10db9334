// The gradient of a linear layer's weight. It is a sum over all rows, added to float32 numbers that are read once.

#include "tiles.h"

namespace {

constexpr int BLOCK = 2 * SIDE;            // columns that are packed and multiplied together, and rows of a step
constexpr int64_t STEP = BLOCK * SIDE;     // words of a step
constexpr int64_t CACHED_BYTES = 1 << 20;  // of blocks that stay in the second cache

// BLOCK rows and columns of x as words, each a pair of rows: a tile of SIDE pairs by SIDE columns, then that of the other
// columns. `across`: the tiles are turned. Rows and columns from `rows` and `columns` on count as 0.
void pack_step(uint32_t* to, const bf16* x, int64_t row, int64_t rows, int64_t columns, bool across) {
  bf16 edge[BLOCK * BLOCK];
  if (rows < BLOCK || columns < BLOCK) {
    std::fill(edge, edge + BLOCK * BLOCK, bf16(0));
    for (int64_t i = 0; i < std::min<int64_t>(rows, BLOCK); ++i)
      std::copy(x + i * row, x + i * row + std::min<int64_t>(columns, BLOCK), edge + i * BLOCK);
    x = edge, row = BLOCK;
  }
  Bits left[SIDE], right[SIDE];
  for (int pair = 0; pair < SIDE; ++pair) {
    left[pair] = load_bits(x + 2 * pair * row), right[pair] = load_bits(x + (2 * pair + 1) * row);
    interleave(left[pair], right[pair]);
  }
  if (across) transpose(left), transpose(right);
  for (int i = 0; i < SIDE; ++i) store_bits(to + i * SIDE, left[i]), store_bits(to + (SIDE + i) * SIDE, right[i]);
}

// c [BLOCK, BLOCK] = a b of packed blocks, the steps of `a` across
void multiply_blocks(float* c, int64_t c_row, const uint32_t* a, const uint32_t* b, int steps) {
  if (has_tiles()) {
    tile_product<2>(c, c_row, TilesInOrder{a}, TilesInOrder{b}, steps * SIDE, false);
    return;
  }
  for (int step = 0; step < steps; ++step)
    for (int part = 0; part < 4; ++part) {
      const int64_t first = part / 2 * SIDE, column = part % 2 * SIDE;
      for (int64_t i = first; i < first + SIDE; i += 4)
        few_rows<4, 1>(c + i * c_row + column, c_row, a + step * STEP + i * SIDE, SIDE,
                       b + step * STEP + column * SIDE, SIDE, 4, SIDE, step > 0);
    }
}

}  // namespace

extern "C" {

// total [columns, width] += pull [rows, columns], transposed, times x [rows, width]. `room` holds whole steps of both.
void add_gradient(float* total, const bf16* pull, const bf16* x, uint32_t* room, int64_t rows, int64_t columns,
                  int64_t width, int threads) {
  const int64_t steps = (rows + BLOCK - 1) / BLOCK, block = steps * STEP;
  const int64_t lefts = (columns + BLOCK - 1) / BLOCK, rights = (width + BLOCK - 1) / BLOCK;
  const int64_t together = std::min(rights, std::max<int64_t>(1, CACHED_BYTES / (4 * block))), strip = together * BLOCK;
  uint32_t* other = room + lefts * block;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Tiles tiles;
    Table<float> sums(BLOCK * strip);  // of rows that are added at once: memory is read in its order
#pragma omp for schedule(static)
    for (int64_t step = 0; step < steps; ++step) {  // rows in their order in memory
      const int64_t at = step * BLOCK;
      for (int64_t i = 0; i < lefts; ++i)
        pack_step(room + i * block + step * STEP, pull + at * columns + i * BLOCK, columns, rows - at,
                  columns - i * BLOCK, true);
      for (int64_t i = 0; i < rights; ++i)
        pack_step(other + i * block + step * STEP, x + at * width + i * BLOCK, width, rows - at, width - i * BLOCK,
                  false);
    }
    for (int64_t first = 0; first < rights; first += together) {
      const int64_t end = std::min(rights, first + together), some = std::min(width - first * BLOCK, strip);
#pragma omp for schedule(static)
      for (int64_t left = 0; left < lefts; ++left) {
        for (int64_t right = first; right < end; ++right)
          multiply_blocks(&sums[(right - first) * BLOCK], strip, room + left * block, other + right * block, int(steps));
        for (int64_t i = 0; i < std::min<int64_t>(BLOCK, columns - left * BLOCK); ++i) {
          float* place = total + (left * BLOCK + i) * width + first * BLOCK;
          for (int64_t at = 0; at < some; at += 16) {
            const Mask here = lanes(some - at);
            store(place + at, load(place + at, here) + load(&sums[i * strip + at]), here);
          }
        }
      }
    }
  }
}
}
