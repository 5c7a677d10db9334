// The parts of a decoder layer between its matrix products, each rounded once.

#include "vectors.h"

namespace {

// 1 / (1 + e^-x); NaN stays NaN
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));  // at most 1
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, small), _mm512_add_ps(small, one));
}

}  // namespace

extern "C" {

// silu(gate) * up of [rows, width] each, in rows of `row` numbers, rounded once. The numbers of this file
// are float32 if `wide`, else bfloat16.
void gated(int wide, void* out, const void* gate, const void* up, int64_t row, int64_t rows, int64_t width,
           int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; i += 16) {
        const __m512 g = load((const T*)gate + r * row + i), u = load((const T*)up + r * row + i);
        store((T*)out + r * width + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u));
      }
  });
}

// The first `heads` heads of each row of `x`, rotated and rounded once: x cos + x' sin, x' being x with its halves in each
// other's place and `sin` carrying the signs. `cos` and `sin` are [rows, dim]; `out` may be `x`.
void rotate(int wide, void* out, int64_t out_row, const void* x, int64_t x_row, const void* cos, const void* sin,
            int64_t rows, int64_t heads, int64_t dim, int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < dim / 2; i += 16) {
        const T *cosines = (const T*)cos + row * dim + i, *sines = (const T*)sin + row * dim + i;
        const __m512 c[2] = {load(cosines), load(cosines + dim / 2)}, s[2] = {load(sines), load(sines + dim / 2)};
        for (int64_t head = 0; head < heads; ++head) {
          const T* from = (const T*)x + row * x_row + head * dim + i;
          T* place = (T*)out + row * out_row + head * dim + i;
          const __m512 low = load(from), high = load(from + dim / 2);
          store(place, _mm512_fmadd_ps(low, c[0], _mm512_mul_ps(high, s[0])));
          store(place + dim / 2, _mm512_fmadd_ps(high, c[1], _mm512_mul_ps(low, s[1])));
        }
      }
  });
}

// x / rms(x) * weight, rounded once.
void normalise(int wide, void* out, const void* x, const void* weight, int64_t rows, int64_t width, float eps,
               int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = (const T*)x + row * width;
      __m512 squares = _mm512_setzero_ps();
      for (int64_t i = 0; i < width; i += 16) squares = _mm512_fmadd_ps(load(from + i), load(from + i), squares);
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps));
      for (int64_t i = 0; i < width; i += 16)
        store((T*)out + row * width + i, _mm512_mul_ps(_mm512_mul_ps(load(from + i), scale), load((const T*)weight + i)));
    }
  });
}

// Its gradients from `pull`, and its values again, `count` numbers each. With s = sigmoid(g), silu'(g) = s (1 + g - g s).
void gated_backward(int wide, void* out, void* gate_slope, void* up_slope, const void* pull, const void* gate,
                    const void* up, int64_t count, int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i += 16) {
      const __m512 g = load((const T*)gate + i), u = load((const T*)up + i), p = load((const T*)pull + i);
      const __m512 s = sigmoid(g), active = _mm512_mul_ps(g, s);
      const __m512 slope = _mm512_mul_ps(s, _mm512_add_ps(one, _mm512_fnmadd_ps(active, one, g)));
      store((T*)out + i, _mm512_mul_ps(active, u));
      store((T*)gate_slope + i, _mm512_mul_ps(_mm512_mul_ps(p, u), slope));
      store((T*)up_slope + i, _mm512_mul_ps(p, active));
    }
  });
}

// Its gradients from `pull`: that of x, rounded once, and that of the weight, float32 [ceil(rows / block), width] sums
// over blocks of rows, so that they do not depend on the number of threads.
void normalise_backward(int wide, void* x_slope, float* weight_slopes, const void* pull, const void* x,
                        const void* weight, int64_t rows, int64_t width, int64_t block, float eps, int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
    const T* weights = (const T*)weight;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < rows; first += block) {
      float* sums = weight_slopes + first / block * width;
      std::fill(sums, sums + width, 0.0f);
      for (int64_t row = first; row < std::min(rows, first + block); ++row) {
        const T *from = (const T*)x + row * width, *p = (const T*)pull + row * width;
        __m512 squares = _mm512_setzero_ps(), products = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += 16) {
          const __m512 number = load(from + i);
          squares = _mm512_fmadd_ps(number, number, squares);
          products = _mm512_fmadd_ps(_mm512_mul_ps(load(p + i), load(weights + i)), number, products);
        }
        const float factor = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps);
        // the part along x, which a normalisation does not change
        const __m512 along = _mm512_set1_ps(_mm512_reduce_add_ps(products) * factor * factor / float(width));
        const __m512 scale = _mm512_set1_ps(factor);
        for (int64_t i = 0; i < width; i += 16) {
          const __m512 number = load(from + i), pulled = load(p + i);
          const __m512 slope = _mm512_fnmadd_ps(number, along, _mm512_mul_ps(pulled, load(weights + i)));
          store((T*)x_slope + row * width + i, _mm512_mul_ps(slope, scale));
          _mm512_storeu_ps(sums + i,
                           _mm512_fmadd_ps(_mm512_mul_ps(pulled, scale), number, _mm512_loadu_ps(sums + i)));
        }
      }
    }
  });
}
}
