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
  in_parts(count, threads, [=](int64_t i, __mmask16 some) {
    const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(some, total + i), load(part + i, some));
    _mm512_mask_storeu_ps(total + i, some, sum);
  });
}

// One step of AdamW (Loshchilov and Hutter 2019) in torch's order of operations, from gradients times `factor`. Writes the
// rounded weights to `copy`, and zeros over the gradients.
void adamw(float* weight, bf16* copy, float* gradient, float* mean, float* square, int64_t count, float factor,
           double decay, double beta1, double beta2, double step_size, double correction, double eps, int threads) {
  const auto all = [](double x) { return _mm512_set1_ps(float(x)); };
  in_parts(count, threads, [=](int64_t i, __mmask16 some) {
    const __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, gradient + i), all(factor));
    const __m512 before = _mm512_maskz_loadu_ps(some, mean + i), second = _mm512_maskz_loadu_ps(some, square + i);
    const __m512 m = _mm512_fmadd_ps(all(1 - beta1), _mm512_sub_ps(g, before), before);
    const __m512 v = _mm512_fmadd_ps(_mm512_mul_ps(all(1 - beta2), g), g, _mm512_mul_ps(second, all(beta2)));
    const __m512 spread = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), all(correction)), all(eps));
    __m512 w = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, weight + i), all(decay));
    w = _mm512_add_ps(w, _mm512_div_ps(_mm512_mul_ps(all(-step_size), m), spread));
    _mm512_mask_storeu_ps(mean + i, some, m);
    _mm512_mask_storeu_ps(square + i, some, v);
    _mm512_mask_storeu_ps(weight + i, some, w);
    _mm512_mask_storeu_ps(gradient + i, some, _mm512_setzero_ps());
    _mm256_mask_storeu_epi16(copy + i, some, (__m256i)_mm512_cvtneps_pbh(w));
  });
}
}
