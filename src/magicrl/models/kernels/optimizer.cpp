// The passes of an update over all weights, whose time is that of their memory: float32 masters, gradients and moments,
// and the model's rounded copy.

#include "vectors.h"

namespace {

constexpr int64_t PART = 1 << 14;  // numbers that one thread takes at once

template <typename Step>
void in_parts(int64_t count, int threads, Step step) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < count; first += PART)
    for (int64_t i = first; i < std::min(count, first + PART); i += 16) step(i, lanes(count - i));
}

}  // namespace

extern "C" {

// total += part
void add_widened(float* total, const bf16* part, int64_t count, int threads) {
  in_parts(count, threads, [=](int64_t i, Mask some) {
    const Floats sum = load(total + i, some) + load(part + i, some);
    store(total + i, sum, some);
  });
}

// The sum of squares. Parts are summed in float32 and added in float64, in their order.
void square_sum(double* sum, const float* x, int64_t count, int threads) {
  constexpr int CHAINS = 4;  // additions that do not wait for each other
  std::vector<double> sums((count + PART - 1) / PART);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t part = 0; part < int64_t(sums.size()); ++part) {
    const int64_t end = std::min(count, (part + 1) * PART);
    Floats chains[CHAINS] = {all(0), all(0), all(0), all(0)};
    for (int64_t i = part * PART; i < end; i += 16 * CHAINS)
      for (int chain = 0; chain < CHAINS; ++chain) {
        const Floats some = load(x + i + 16 * chain, lanes(end - i - 16 * chain));
        chains[chain] = fma(some, some, chains[chain]);
      }
    for (const Floats& chain : chains) sums[part] += sum_of(chain);
  }
  *sum = 0;
  for (double part : sums) *sum += part;
}

// One step of AdamW (Loshchilov and Hutter 2019) in torch's order of operations, from gradients times `factor`. Writes the
// rounded weights to `copy`, zeros over the gradients, and a 0 to `finite` if a weight is not finite.
void adamw(float* weight, bf16* copy, float* gradient, float* mean, float* square, int* finite, int64_t count,
           float factor, double decay, double beta1, double beta2, double step_size, double correction, double eps,
           int threads) {
  in_parts(count, threads, [=](int64_t i, Mask some) {
    const Floats g = load(gradient + i, some) * all(factor);
    const Floats before = load(mean + i, some), second = load(square + i, some);
    const Floats m = fma(all(1 - beta1), g - before, before);
    const Floats v = fma(all(1 - beta2) * g, g, second * all(beta2));
    const Floats spread = root(v) / all(correction) + all(eps);
    Floats w = load(weight + i, some) * all(decay);
    w = w + all(-step_size) * m / spread;
    store(mean + i, m, some);
    store(square + i, v, some);
    store(weight + i, w, some);
    store(gradient + i, all(0), some);
    store(copy + i, w, some);
    if (some & ~less(w * all(0), all(1))) {  // NaN is not less
#pragma omp atomic write
      *finite = 0;
    }
  });
}
}
