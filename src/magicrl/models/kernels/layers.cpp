// The parts of a decoder layer between its matrix products, each rounded once.

#include "parts.h"

namespace {

// 1 / (1 + e^-x); NaN stays NaN
inline Floats sigmoid(Floats x) {
  const Floats one = all(1.0f);
  const Floats small = exponential(-absolute(x));  // at most 1
  const Mask negative = less(x, all(0));
  return choose(negative, small, one) / (small + one);
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
        const Floats g = load((const T*)gate + r * row + i), u = load((const T*)up + r * row + i);
        store((T*)out + r * width + i, g * sigmoid(g) * u);
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
        const Floats c[2] = {load(cosines), load(cosines + dim / 2)}, s[2] = {load(sines), load(sines + dim / 2)};
        for (int64_t head = 0; head < heads; ++head) {
          const T* from = (const T*)x + row * x_row + head * dim + i;
          T* place = (T*)out + row * out_row + head * dim + i;
          const Floats low = load(from), high = load(from + dim / 2);
          store(place, fma(low, c[0], high * s[0]));
          store(place + dim / 2, fma(high, c[1], low * s[1]));
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
      Floats squares = all(0);
      for (int64_t i = 0; i < width; i += 16) squares = fma(load(from + i), load(from + i), squares);
      const Floats scale = all(1.0f / std::sqrt(sum_of(squares) / float(width) + eps));
      for (int64_t i = 0; i < width; i += 16)
        store((T*)out + row * width + i, load(from + i) * scale * load((const T*)weight + i));
    }
  });
}

// Its gradients from `pull`, and its values again, `count` numbers each. With s = sigmoid(g), silu'(g) = s (1 + g - g s).
void gated_backward(int wide, void* out, void* gate_slope, void* up_slope, const void* pull, const void* gate,
                    const void* up, int64_t count, int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
    const Floats one = all(1.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i += 16) {
      const Floats g = load((const T*)gate + i), u = load((const T*)up + i), p = load((const T*)pull + i);
      const Floats s = sigmoid(g), active = g * s;
      const Floats slope = s * (one + fnma(active, one, g));
      store((T*)out + i, active * u);
      store((T*)gate_slope + i, p * u * slope);
      store((T*)up_slope + i, p * active);
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
        Floats squares = all(0), products = all(0);
        for (int64_t i = 0; i < width; i += 16) {
          const Floats number = load(from + i);
          squares = fma(number, number, squares);
          products = fma(load(p + i) * load(weights + i), number, products);
        }
        const float factor = 1.0f / std::sqrt(sum_of(squares) / float(width) + eps);
        // the part along x, which a normalisation does not change
        const Floats along = all(sum_of(products) * factor * factor / float(width));
        const Floats scale = all(factor);
        for (int64_t i = 0; i < width; i += 16) {
          const Floats number = load(from + i), pulled = load(p + i);
          const Floats slope = fnma(number, along, pulled * load(weights + i));
          store((T*)x_slope + row * width + i, slope * scale);
          store(sums + i, fma(pulled * scale, number, load(sums + i)));
        }
      }
    }
  });
}
}
