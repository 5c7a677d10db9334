// The softmax of a language-model head, with its gradient.

#include "vectors.h"

extern "C" {

// Of each row's numbers, times the row's `factor`: the largest, sums of e^(x - largest) by blocks of neighbours, the logarithm
// of their total, and the entropy. What is further than 87 below the largest has weight 0; NaN makes sums NaN. A row's bits
// don't depend on the other rows.
void softmax_sums(float* largest, double* blocks, double* log_totals, double* entropies, const bf16* x, int64_t x_row,
                  const float* factor, int64_t rows, int64_t width, int64_t block, int threads) {
  const int64_t count = (width + block - 1) / block;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* from = x + row * x_row;
    const auto there = [&](int64_t i) { return lanes(width - i); };
    const auto numbers = [&](int64_t i) { return load(from + i, there(i)); };
    Floats top = all(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) top = choose(there(i), larger(top, numbers(i)), top);
    const Floats scale = all(factor[row]);
    const Floats most = all(largest_of(top)) * scale;
    double total = 0, moment = 0;
    for (int64_t b = 0; b < count; ++b) {
      Floats sum = all(0), along = all(0);
      for (int64_t i = b * block; i < std::min(width, (b + 1) * block); i += 16) {
        const Floats below = numbers(i) * scale - most;
        const Mask counts = there(i) & not_less(below, all(-87.0f));
        const Floats w = exponential(below);
        sum = choose(counts, sum + w, sum);
        along = choose(counts, fma(w, below, along), along);
      }
      blocks[row * count + b] = sum_of(sum);
      total += blocks[row * count + b];
      moment += sum_of(along);
    }
    largest[row] = first_of(most);
    log_totals[row] = std::log(total);
    entropies[row] = log_totals[row] - moment / total;
  }
}

// The gradient of a language-model head's products over them, in place. With z = x factor and p = e^(z - log_sum) it is
// factor (p (constant - slope z) + pull at the target), `slope` being null for 0; targets out of range are of no row.
void softmax_pull(bf16* x, float factor, const float* log_sums, const float* constants, const float* slopes,
                  const float* pulls, const int64_t* targets, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    bf16* place = x + row * width;
    const Floats scale = all(factor), under = all(log_sums[row]);
    const Floats constant = all(constants[row]), slope = all(slopes ? slopes[row] : 0.0f);
    const int64_t target = targets[row];
    for (int64_t i = 0; i < width; i += 16) {
      const Mask there = lanes(width - i);
      const Floats z = load(place + i, there) * scale;
      Floats found = exponential(z - under) * fnma(slope, z, constant);
      if (target >= i && target < i + 16)
        found = choose(Mask(1u << (target - i)), found + all(pulls[row]), found);
      store(place + i, found * scale, there);
    }
  }
}
}
