// All layers of a decoding step in one call: calls of Python would take as long as the products of a small model.
//
// The parts are those of the other files, in the order and with the rounding of `decoding.py`.

#include "parts.h"

namespace {

// Addresses of a layer's weights, null for none. Norms, products and biases are those of `_Layer` in `decoding.py`.
struct Layer {
  const void *before_attention, *before_mlp, *query_norm, *key_norm;
  const void *qkv, *out, *gate_up, *down, *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
};

// Addresses of a layer's blocks in the cache.
struct Stored {
  const void *prompt_keys, *prompt_values, *keys, *values;
};

struct Sizes {
  int64_t rows, width, inner, kv_heads, group, dim;
};

template <class T>
struct Step {
  const Sizes sizes;
  const bool exact;
  const float eps;
  const int threads;
  mutable Table<T> part;  // [rows, width], a product before it is added

  Step(const Sizes& of, bool rounds_twice, float epsilon, int count)
      : sizes(of), exact(rounds_twice), eps(epsilon), threads(count), part(of.rows * of.width) {}

  // to [rows, columns] += from [columns] or [rows, columns], rounded
  void add(T* to, const T* from, int64_t columns, bool same_for_all_rows) const {
    for (int64_t row = 0; row < sizes.rows; ++row)
      for (int64_t i = 0; i < columns; i += 16) {
        const Mask here = lanes(columns - i);
        T* place = to + row * columns + i;
        store(place, load(place, here) + load(from + (same_for_all_rows ? 0 : row * columns) + i, here), here);
      }
  }

  void multiply(T* out, const T* x, const void* weight, const void* bias, const T* residual, int64_t width,
                int64_t columns) const {
    if constexpr (sizeof(T) == sizeof(bf16))
      multiply_packed(out, x, (const uint32_t*)weight, (const T*)bias, residual, sizes.rows, width / 2, columns, threads);
    else {
      multiply_rows(out, x, (const T*)weight, sizes.rows, width, columns, threads);
      if (bias) add(out, (const T*)bias, columns, true);
    }
  }

  // x += the product, rounded once in bfloat16 unless exact
  void multiply_added(T* x, const T* from, const void* weight, const void* bias, int64_t width) const {
    if (sizeof(T) == sizeof(bf16) && !exact) return multiply(x, from, weight, bias, x, width, sizes.width);
    multiply(part.data(), from, weight, bias, nullptr, width, sizes.width);
    add(x, part.data(), sizes.width, false);
  }
};

}  // namespace

extern "C" {

// x [rows, width] runs through `count` layers. `sizes` are those of `Sizes`; `cos` and `sin` are [rows, dim]. The rest is
// as for `attend`. Numbers are float32 if `wide`, else bfloat16; `exact` rounds a product before it is added.
void decode_layers(int wide, int exact, void* x, const void* layers, const void* stored, int64_t count,
                   const int64_t* sizes, const void* cos, const void* sin, float eps, float scale, int64_t prompt_width,
                   int64_t response_width, const int64_t* order, const int64_t* parts, int64_t part_count,
                   int64_t most_rows, const int64_t* owners, const int64_t* prompt_lengths, const int64_t* held,
                   int threads) {
  in_precision(wide, [&](auto number) {
    using T = decltype(number);
    const Sizes s = *(const Sizes*)sizes;
    const Step<T> step(s, exact, eps, threads);
    const int64_t heads = s.kv_heads * s.group, row = (heads + 2 * s.kv_heads) * s.dim;
    const auto room = [&](int64_t columns) { return Table<T>(s.rows * columns); };
    Table<T> all_normed = room(s.width), all_qkv = room(row), all_seen = room(heads * s.dim);
    Table<T> all_gates = room(2 * s.inner), all_gate = room(s.inner);
    T *const normed = all_normed.data(), *const qkv = all_qkv.data(), *const seen = all_seen.data();
    T *const gates = all_gates.data(), *const gate = all_gate.data();
    T *const keys = qkv + heads * s.dim, *const values = keys + s.kv_heads * s.dim;
    for (int64_t i = 0; i < count; ++i) {
      const Layer& layer = ((const Layer*)layers)[i];
      const Stored& cache = ((const Stored*)stored)[i];
      normalise(wide, normed, x, layer.before_attention, s.rows, s.width, eps, threads);
      step.multiply(qkv, normed, layer.qkv, layer.qkv_bias, nullptr, s.width, row);
      if (layer.query_norm) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t at = 0; at < s.rows * row; at += row) {
          normalise(wide, qkv + at, qkv + at, layer.query_norm, heads, s.dim, eps, 1);
          normalise(wide, keys + at, keys + at, layer.key_norm, s.kv_heads, s.dim, eps, 1);
        }
      }
      rotate(wide, qkv, row, qkv, row, cos, sin, s.rows, heads + s.kv_heads, s.dim, threads);
      attend(wide, seen, qkv, row, keys, values, row, row, cache.prompt_keys, cache.prompt_values, prompt_width,
             cache.keys, cache.values, response_width, order, parts, part_count, most_rows, owners, prompt_lengths, held,
             s.kv_heads, s.group, s.dim, scale, threads);
      step.multiply_added((T*)x, seen, layer.out, layer.out_bias, heads * s.dim);
      normalise(wide, normed, x, layer.before_mlp, s.rows, s.width, eps, threads);
      step.multiply(gates, normed, layer.gate_up, layer.gate_up_bias, nullptr, s.width, 2 * s.inner);
      gated(wide, gate, gates, gates + s.inner, 2 * s.inner, s.rows, s.inner, threads);
      step.multiply_added((T*)x, gate, layer.down, layer.down_bias, s.inner);
    }
  });
}
}
