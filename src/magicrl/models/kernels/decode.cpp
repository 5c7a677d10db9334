// Attention of a decoding step: one new token for each row, over the blocks of a cache.

#include "vectors.h"

namespace {

constexpr int CHUNK = 64;  // keys whose scores stand in the table at once
constexpr int TILE = 4;    // queries that meet them together

// Queries that meet keys chunk by chunk: what they have seen so far, as an online softmax keeps it.
struct Queries {
  int dim;
  float scale;
  std::vector<bf16> q;                   // [queries, dim]
  std::vector<float> seen, most, total;  // [queries, dim] in the order of `add`, [queries], [queries]
  std::vector<uint32_t> keys;            // [dim / 2, CHUNK] pairs of a key's numbers
  const bf16 *next = nullptr, *behind = nullptr;  // the next head's keys, or the next row's: they lie behind this one's
  float scores[TILE * CHUNK];
  bf16 weights[TILE * CHUNK];

  Queries(int count, int width, float scaling)
      : dim(width), scale(scaling), q(count * width), seen(count * width), most(count), total(count),
        keys(width / 2 * CHUNK) {}

  void begin() {
    std::fill(seen.begin(), seen.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(most.begin(), most.end(), -INFINITY);
  }

  // So that 16 keys fill a vector and no sum runs across one.
  void turn(const bf16* k, const bf16* v, int count) {
    for (int key = 0; key < count; key += 16) {
      for (int i = 0; i < 16; ++i) fetch(v + int64_t(key + i) * dim);  // arrives while scores are computed
      turned(&keys[key], CHUNK, k + int64_t(key) * dim, dim, count - key, dim);
    }
  }

  template <int N>
  void score(int first, int count) {
    for (int key = 0; key < count; key += 32) {  // two vectors: enough sums that do not wait for each other
      __m512 sum[N][2] = {};
      for (int pair = 0; pair < dim / 2; ++pair) {
        const auto left = (__m512bh)_mm512_loadu_si512(&keys[pair * CHUNK + key]);
        const auto right = (__m512bh)_mm512_loadu_si512(&keys[pair * CHUNK + key + 16]);
        for (int i = 0; i < N; ++i) {
          const auto query = (__m512bh)_mm512_set1_epi32(((const int*)&q[(first + i) * dim])[pair]);
          sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, query);
          sum[i][1] = _mm512_dpbf16_ps(sum[i][1], right, query);
        }
      }
      for (int i = 0; i < N; ++i)
        for (int half = 0; half < 2; ++half)
          _mm512_storeu_ps(&scores[i * CHUNK + key + 16 * half],
                           _mm512_mul_ps(sum[i][half], _mm512_set1_ps(scale)));
    }
  }

  void weigh(int place, int query, int count) {
    const float* from = &scores[place * CHUNK];
    const auto present = [&](int key) { return lanes(count - key); };
    __m512 top = _mm512_set1_ps(most[query]), sum = _mm512_setzero_ps();
    for (int key = 0; key < count; key += 16)
      top = _mm512_mask_max_ps(top, present(key), top, _mm512_loadu_ps(from + key));
    const __m512 now = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    const __m512 before = exponential(_mm512_sub_ps(_mm512_set1_ps(most[query]), now));
    for (int key = 0; key < count; key += 16) {
      const __m512 w =
          _mm512_maskz_mov_ps(present(key), exponential(_mm512_sub_ps(_mm512_loadu_ps(from + key), now)));
      sum = _mm512_add_ps(sum, w);
      store(&weights[place * CHUNK + key], w);
    }
    most[query] = _mm512_cvtss_f32(now);
    total[query] = total[query] * _mm512_cvtss_f32(before) + _mm512_reduce_add_ps(sum);
    for (int i = 0; i < dim; i += 16) {
      float* place = &seen[query * dim + i];
      _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), before));
    }
  }

  template <int N>
  void add(int first, const bf16* v, int count) {
    for (int i = 0; i < dim; i += 32) {
      __m512 sum[N][2];
      for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half) sum[n][half] = _mm512_loadu_ps(&seen[(first + n) * dim + i + 16 * half]);
      for (int key = 0; key < count; key += 2) {
        const bf16* value = v + int64_t(key) * dim + i;
        const __m512i even = _mm512_loadu_si512(value);
        const __m512i odd = _mm512_loadu_si512(key + 1 < count ? value + dim : value);  // weight 0 behind the last
        const auto low = (__m512bh)_mm512_unpacklo_epi16(even, odd), high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        for (int n = 0; n < N; ++n) {
          const auto pair = (__m512bh)_mm512_set1_epi32(((const int*)&weights[n * CHUNK])[key / 2]);
          sum[n][0] = _mm512_dpbf16_ps(sum[n][0], low, pair);
          sum[n][1] = _mm512_dpbf16_ps(sum[n][1], high, pair);
        }
      }
      for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half) _mm512_storeu_ps(&seen[(first + n) * dim + i + 16 * half], sum[n][half]);
    }
  }

  // A row on its way from memory into the cache.
  void fetch(const bf16* row) const {
    for (int i = 0; i < dim; i += 32) _mm_prefetch((const char*)(row + i), _MM_HINT_T0);
  }

  template <int N>
  void tile(int first, const bf16* v, int count) {
    score<N>(first, count);
    for (int n = 0; n < N; ++n) {
      // a part of them at a time, while there is something to compute: few reads may be on their way at once
      for (int i = 0; i < (count + N - 1) / N && next < behind; ++i, next += dim) fetch(next);
      weigh(n, first + n, count);
    }
    add<N>(first, v, count);
  }

  // Queries [first, last) meet the first `length` tokens of a sequence, which begins at `offset` in every block.
  void meet(int first, int last, const bf16* const* k, const bf16* const* v, int64_t width, int64_t offset,
            int64_t length) {
    for (int64_t start = 0; start < length; start += width, ++k, ++v)
      for (int64_t at = 0; at < std::min(width, length - start); at += CHUNK) {
        const int count = int(std::min({int64_t(CHUNK), width - at, length - start - at}));
        const bf16 *keys = *k + (offset * width + at) * dim, *values = *v + (offset * width + at) * dim;
        turn(keys, values, count);
        next = keys + width * dim;
        behind = next + int64_t(count) * dim;
        int query = first;
        for (; query + TILE <= last; query += TILE) tile<TILE>(query, values, count);
        if (last - query == 3) tile<3>(query, values, count);
        if (last - query == 2) tile<2>(query, values, count);
        if (last - query == 1) tile<1>(query, values, count);
      }
  }

  void write(int query, bf16* out) const {
    // unpacking took fours: the even ones of 32 numbers stand in the first vector, the odd ones in the second
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i behind = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    const __m512 sum = _mm512_set1_ps(total[query]);
    for (int i = 0; i < dim; i += 32) {
      const __m512 even = _mm512_loadu_ps(&seen[query * dim + i]), odd = _mm512_loadu_ps(&seen[query * dim + i + 16]);
      store(out + i, _mm512_div_ps(_mm512_permutex2var_ps(even, order, odd), sum));
      store(out + i + 16, _mm512_div_ps(_mm512_permutex2var_ps(even, behind, odd), sum));
    }
  }
};

}  // namespace

extern "C" {

// One new token for each row. `parts` are pairs of bounds in `order`: rows of one prompt, by which work is shared out.
void attend(bf16* out, const bf16* q, int64_t q_row, const bf16* k, const bf16* v, int64_t k_row, int64_t v_row,
            const bf16* const* prompt_k, const bf16* const* prompt_v, int64_t prompt_width, bf16* const* response_k,
            bf16* const* response_v, int64_t response_width, const int64_t* order, const int64_t* parts,
            int64_t part_count, int64_t most_rows, const int64_t* owners, const int64_t* prompt_lengths,
            const int64_t* held, int64_t kv_heads, int64_t group, int64_t dim, float scale, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Queries queries(int(most_rows * kv_heads * group), int(dim), scale);
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < part_count; ++part) {
      const int64_t* rows = order + parts[2 * part];
      const int64_t count = parts[2 * part + 1] - parts[2 * part];
      const auto place = [&](int64_t head, int64_t i) { return int((head * count + i) * group); };
      queries.begin();
      // heads change fastest: memory is read in the order in which it lies
      for (int64_t head = 0; head < kv_heads; ++head) {
        for (int64_t i = 0; i < count; ++i)
          std::memcpy(&queries.q[place(head, i) * dim], q + rows[i] * q_row + head * group * dim,
                      group * dim * sizeof(bf16));
        queries.meet(place(head, 0), place(head, count), prompt_k, prompt_v, prompt_width,
                     owners[rows[0]] * kv_heads + head, prompt_lengths[rows[0]]);
      }
      for (int64_t i = 0; i < count; ++i)
        for (int64_t head = 0; head < kv_heads; ++head) {
          const int64_t row = rows[i], offset = row * kv_heads + head, block = held[row] / response_width;
          const int64_t end = (offset * response_width + held[row] % response_width) * dim;
          std::memcpy(response_k[block] + end, k + row * k_row + head * dim, dim * sizeof(bf16));
          std::memcpy(response_v[block] + end, v + row * v_row + head * dim, dim * sizeof(bf16));
          queries.meet(place(head, i), place(head, i) + int(group), response_k, response_v, response_width, offset,
                       held[row] + 1);
          for (int64_t j = 0; j < group; ++j)
            queries.write(place(head, i) + int(j), out + (offset * group + j) * dim);
        }
    }
  }
}
}
