// The softmax of a language-model head, with its gradient.

#include "vectors.h"

extern "C" {

// Of each row's numbers, times the row's `factor`: the largest, sums of e^(x - largest) by blocks of neighbours, and the
// sum of e^(x - largest) (x - largest). What is further than 87 below the largest has weight 0; NaN makes sums NaN.
void softmax_sums(float* largest, double* blocks, double* moments, const bf16* x, int64_t x_row, const float* factor,
                  int64_t rows, int64_t width, int64_t block, int threads) {
  const int64_t count = (width + block - 1) / block;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* from = x + row * x_row;
    const auto there = [&](int64_t i) { return lanes(width - i); };
    const auto numbers = [&](int64_t i) { return load(from + i, there(i)); };
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) top = _mm512_mask_max_ps(top, there(i), top, numbers(i));
    const __m512 scale = _mm512_set1_ps(factor[row]);
    const __m512 most = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(top)), scale);
    double moment = 0;
    for (int64_t b = 0; b < count; ++b) {
      __m512 sum = _mm512_setzero_ps(), along = _mm512_setzero_ps();
      for (int64_t i = b * block; i < std::min(width, (b + 1) * block); i += 16) {
        const __m512 below = _mm512_sub_ps(_mm512_mul_ps(numbers(i), scale), most);
        const __mmask16 counts = _mm512_mask_cmp_ps_mask(there(i), below, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
        const __m512 w = exponential(below);
        sum = _mm512_mask_add_ps(sum, counts, sum, w);
        along = _mm512_mask3_fmadd_ps(w, below, along, counts);
      }
      blocks[row * count + b] = _mm512_reduce_add_ps(sum);
      moment += _mm512_reduce_add_ps(along);
    }
    largest[row] = _mm512_cvtss_f32(most);
    moments[row] = moment;
  }
}

// The gradient of a language-model head's products over them, in place. With z = x factor and p = e^(z - log_sum) it is
// chain (p (constant - slope z) + pull at the target), `slope` being null for 0; targets out of range are of no row.
void softmax_pull(bf16* x, float factor, float chain, const float* log_sums, const float* constants,
                  const float* slopes, const float* pulls, const int64_t* targets, int64_t rows, int64_t width,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    bf16* place = x + row * width;
    const __m512 scale = _mm512_set1_ps(factor), under = _mm512_set1_ps(log_sums[row]), outer = _mm512_set1_ps(chain);
    const __m512 constant = _mm512_set1_ps(constants[row]), slope = _mm512_set1_ps(slopes ? slopes[row] : 0.0f);
    const int64_t target = targets[row];
    for (int64_t i = 0; i < width; i += 16) {
      const __mmask16 there = lanes(width - i);
      const __m512 z = _mm512_mul_ps(load(place + i, there), scale);
      __m512 found = _mm512_mul_ps(exponential(_mm512_sub_ps(z, under)), _mm512_fnmadd_ps(slope, z, constant));
      if (target >= i && target < i + 16)
        found = _mm512_mask_add_ps(found, __mmask16(1u << (target - i)), found, _mm512_set1_ps(pulls[row]));
      _mm256_mask_storeu_epi16(place + i, there, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(found, outer)));
    }
  }
}
}
