// In bfloat16 on a CPU with AVX512-BF16: the parts of a decoding step between its matrix products, the softmax of a
// language-model head with its gradient, and attention over the sequences of a packed row with its backward pass.
//
// Plain C++ without torch's headers: it compiles in seconds, and one build serves every version of torch. OpenMP's
// functions are those of the runtime that torch has loaded. `cpu_kernels.py` compiles, loads and calls it.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int CHUNK = 64;  // keys whose scores stand in the table at once
constexpr int TILE = 4;    // queries that meet them together

// the first `count` of a vector's
inline __mmask16 lanes(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
}
inline __m512 load(const bf16* from, __mmask16 some = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from)), 16));
}
inline void store(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

// e^x of x <= 0; NaN stays NaN, since `max` gives its second operand then
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);
  const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691e-4f);
  for (float next : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 0.16666665f, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(next));
  return _mm512_scalef_ps(sum, power);
}

// 16 by 16 words
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// [dim / 2, 16] words, in rows of `to_row`, of up to 16 rows of bfloat16: each a column of pairs; the others are 0.
inline void turned(uint32_t* to, int64_t to_row, const bf16* from, int64_t row, int count, int dim) {
  for (int pair = 0; pair < dim / 2; pair += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = i < count ? _mm512_loadu_si512(from + i * row + 2 * pair) : _mm512_setzero_si512();
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (pair + i) * to_row, r[i]);
  }
}

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

// Attention over the sequences of a row. Keys are the rows of every product and queries its columns, so that what a
// softmax takes over keys are sums and maxima of whole vectors, and nothing is transposed but what goes in and out.

constexpr int QUERIES = 64;  // of a block
constexpr int KEYS = 96;     // of a block; even
constexpr int ROWS = 6;      // of a product's tile

using Words = std::vector<uint32_t>;  // pairs of bfloat16, the first in the low half
using Numbers = std::vector<float>;

// c = a b, or c += a b, of float32 [M, 16 J]. `b` has a row for each pair of what is summed over, a word a column; the
// word of `a` for row m and pair p is a[m * a_row + p * a_pair].
template <int M, int J>
inline void tile(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, int64_t a_pair, const uint32_t* b,
                 int64_t b_row, int pairs, bool add) {
  __m512 sum[M][J];
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) sum[m][j] = add ? _mm512_loadu_ps(c + m * c_row + 16 * j) : _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; ++pair) {
    __m512bh right[J];
    for (int j = 0; j < J; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + pair * b_row + 16 * j);
    for (int m = 0; m < M; ++m) {
      const auto left = (__m512bh)_mm512_set1_epi32(int(a[m * a_row + pair * a_pair]));
      for (int j = 0; j < J; ++j) sum[m][j] = _mm512_dpbf16_ps(sum[m][j], right[j], left);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < J; ++j) _mm512_storeu_ps(c + m * c_row + 16 * j, sum[m][j]);
}

template <int J>
inline void columns_of(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, int64_t a_pair, const uint32_t* b,
                       int64_t b_row, int rows, int pairs, bool add) {
  for (; rows >= ROWS; rows -= ROWS, c += ROWS * c_row, a += ROWS * a_row)
    tile<ROWS, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
  if (rows == 5) tile<5, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
  if (rows == 4) tile<4, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
  if (rows == 3) tile<3, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
  if (rows == 2) tile<2, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
  if (rows == 1) tile<1, J>(c, c_row, a, a_row, a_pair, b, b_row, pairs, add);
}

// The same for any number of rows and a multiple of 32 columns.
void product(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, int64_t a_pair, const uint32_t* b,
             int64_t b_row, int rows, int columns, int pairs, bool add) {
  int at = 0;
  for (; at + 64 <= columns; at += 64) columns_of<4>(c + at, c_row, a, a_row, a_pair, b + at, b_row, rows, pairs, add);
  if (at < columns) columns_of<2>(c + at, c_row, a, a_row, a_pair, b + at, b_row, rows, pairs, add);
}

// [dim / 2, QUERIES] of a block of queries
void turned_block(Words& to, const bf16* from, int64_t row, int count, int dim) {
  for (int first = 0; first < QUERIES; first += 16)
    turned(&to[first], QUERIES, from + first * row, row, count - first, dim);
}

// [rows / 2, dim] of `count` rows of bfloat16: neighbouring rows as pairs; a last one alone is paired with 0.
void paired(uint32_t* to, const bf16* from, int64_t row, int64_t count, int dim) {
  alignas(64) uint16_t order[2][32];
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 32; ++i) order[half][i] = uint16_t(16 * half + i / 2 + 32 * (i % 2));
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  for (int64_t at = 0; at < count; at += 2)
    for (int i = 0; i < dim; i += 32) {
      const __m512i even = _mm512_loadu_si512(from + at * row + i);
      const __m512i odd = at + 1 < count ? _mm512_loadu_si512(from + (at + 1) * row + i) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + at / 2 * dim + i, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(to + at / 2 * dim + i + 16, _mm512_permutex2var_epi16(even, high, odd));
    }
}

inline __m512i pairs_of(__m512 even, __m512 odd) {
  const auto words = [](__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); };
  return _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16));
}

// [dim, QUERIES] float32 to rows of bfloat16
void written(bf16* to, int64_t row, const float* from, int count, int dim) {
  for (int first = 0; first < count; first += 16)
    for (int at = 0; at < dim; at += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (at + i) * QUERIES + first);
      transpose(r);
      for (int i = 0; i < std::min(16, count - first); ++i) store(to + (first + i) * row + at, (__m512)r[i]);
    }
}

// A sequence as the caller's table has it: its queries are those of the last keys.
struct Sequence {
  int64_t first, queries, offset, keys;  // its first query in the row; where its keys stand in `source`

  // lanes of the queries from `query` on that see key `key`
  __mmask16 sees(int64_t key, int64_t query) const {
    const int64_t before = key - (keys - queries) - query;
    return before <= 0 ? 0xffff : before >= 16 ? 0 : __mmask16(0xffff << before);
  }
  __mmask16 there(int64_t query) const {
    return lanes(queries - query);
  }
  int64_t reach(int64_t query) const { return std::min(keys, keys - queries + query + QUERIES); }
};

// Rows of bfloat16 numbers: [tokens, heads, dim] with the last axis contiguous.
struct View {
  const bf16* data;
  int64_t row, head;
  const bf16* at(int64_t token, int64_t which) const { return data + token * row + which * head; }
};

// A head's keys or values of a sequence, one after the other.
Words gathered(const View& x, const Sequence& s, const int64_t* source, int64_t head, int dim) {
  Words found(s.keys * dim / 2);
  for (int64_t i = 0; i < s.keys; ++i)
    std::memcpy(&found[i * dim / 2], x.at(source[s.offset + i], head), dim * sizeof(bf16));
  return found;
}

Words pairs_of_rows(const Words& x, int64_t count, int dim) {
  Words found((count + 1) / 2 * dim);
  paired(found.data(), (const bf16*)x.data(), dim, count, dim);
  return found;
}

constexpr int LANES = QUERIES / 16;

// A block of queries of one head as it meets keys: an online softmax.
struct Softmax {
  __m512 most[LANES], total[LANES];
  float scale;
  explicit Softmax(float scaling) : scale(scaling) {
    for (int j = 0; j < LANES; ++j) most[j] = _mm512_set1_ps(-INFINITY), total[j] = _mm512_setzero_ps();
  }
  // Scores [count, QUERIES] of keys from `key` on become weights in pairs; `before` is what earlier weights shrink by.
  void weigh(uint32_t* weights, const float* scores, const Sequence& s, int64_t key, int count, int64_t query,
             __m512* before) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (int j = 0; j < LANES; ++j) {
      __m512 now = most[j], sum = _mm512_setzero_ps();
      const auto score = [&](int i) {
        return _mm512_mul_ps(_mm512_loadu_ps(scores + i * QUERIES + 16 * j), factor);
      };
      const auto seen = [&](int i) { return i < count ? s.sees(key + i, query + 16 * j) : __mmask16(0); };
      for (int i = 0; i < count; ++i) now = _mm512_mask_max_ps(now, seen(i), now, score(i));
      before[j] = exponential(_mm512_sub_ps(most[j], now));
      for (int i = 0; i < count; i += 2) {
        const __m512 even = _mm512_maskz_mov_ps(seen(i), exponential(_mm512_sub_ps(score(i), now)));
        const __m512 odd = seen(i + 1) ? _mm512_maskz_mov_ps(seen(i + 1), exponential(_mm512_sub_ps(score(i + 1), now)))
                                       : _mm512_setzero_ps();
        sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        _mm512_storeu_si512(weights + i / 2 * QUERIES + 16 * j, pairs_of(even, odd));
      }
      most[j] = now;
      total[j] = _mm512_fmadd_ps(total[j], before[j], sum);
    }
  }
};

void forward(bf16* out, float* log_sums, const View& q, const View& k, const View& v, const int64_t* source,
             const Sequence& s, int64_t heads, int64_t group, int64_t kv_head, int dim, float scale) {
  const Words keys = gathered(k, s, source, kv_head, dim);
  const Words values = pairs_of_rows(gathered(v, s, source, kv_head, dim), s.keys, dim);
  Words queries(dim / 2 * QUERIES), weights(KEYS / 2 * QUERIES);
  Numbers scores(KEYS * QUERIES), seen(dim * QUERIES);
  for (int64_t query = 0; query < s.queries; query += QUERIES)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int count = int(std::min(int64_t(QUERIES), s.queries - query));
      turned_block(queries, q.at(s.first + query, head), q.row, count, dim);
      std::fill(seen.begin(), seen.end(), 0.0f);
      Softmax softmax(scale);
      for (int64_t key = 0; key < s.reach(query); key += KEYS) {
        const int some = int(std::min(int64_t(KEYS), s.reach(query) - key));
        __m512 before[LANES];
        product(scores.data(), QUERIES, &keys[key * dim / 2], dim / 2, 1, queries.data(), QUERIES, some, QUERIES,
                dim / 2, false);
        softmax.weigh(weights.data(), scores.data(), s, key, some, query, before);
        if (key)
          for (int i = 0; i < dim * LANES; ++i) {
            float* place = &seen[16 * i];
            _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), before[i % LANES]));
          }
        product(seen.data(), QUERIES, &values[key / 2 * dim], 1, dim, weights.data(), QUERIES, dim, QUERIES,
                (some + 1) / 2, true);
      }
      for (int i = 0; i < dim * LANES; ++i) {
        float* place = &seen[16 * i];
        _mm512_storeu_ps(place, _mm512_div_ps(_mm512_loadu_ps(place), softmax.total[i % LANES]));
      }
      written(out + ((s.first + query) * heads + head) * dim, heads * dim, seen.data(), count, dim);
      for (int i = 0; i < count; ++i)
        log_sums[(s.first + query + i) * heads + head] =
            ((float*)softmax.most)[i] + std::log(((float*)softmax.total)[i]);
    }
}

void backward(bf16* dq, float* dk, float* dv, const View& pull, const View& out, const float* log_sums, const View& q,
              const View& k, const View& v, const int64_t* source, const Sequence& s, int64_t heads, int64_t group,
              int64_t kv_head, int dim, float scale) {
  const Words keys = gathered(k, s, source, kv_head, dim), key_pairs = pairs_of_rows(keys, s.keys, dim);
  const Words values = gathered(v, s, source, kv_head, dim);
  Words queries(dim / 2 * QUERIES), pulls(dim / 2 * QUERIES), query_pairs(QUERIES / 2 * dim), pull_pairs(QUERIES / 2 * dim);
  Words weights(KEYS * QUERIES / 2), slopes(KEYS * QUERIES / 2), slope_pairs(KEYS / 2 * QUERIES);
  Numbers scores(KEYS * QUERIES), slants(KEYS * QUERIES), query_slopes(dim * QUERIES);
  Numbers key_slopes(s.keys * dim), value_slopes(s.keys * dim);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t query = 0; query < s.queries; query += QUERIES)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int count = int(std::min(int64_t(QUERIES), s.queries - query));
      const int64_t first = s.first + query;
      turned_block(queries, q.at(first, head), q.row, count, dim);
      turned_block(pulls, pull.at(first, head), pull.row, count, dim);
      paired(query_pairs.data(), q.at(first, head), q.row, count, dim);
      paired(pull_pairs.data(), pull.at(first, head), pull.row, count, dim);
      alignas(64) float sums[QUERIES] = {}, along[QUERIES] = {};
      for (int i = 0; i < count; ++i) {
        const bf16 *a = pull.at(first + i, head), *b = out.at(first + i, head);
        __m512 sum = _mm512_setzero_ps();
        for (int at = 0; at < dim; at += 16) sum = _mm512_fmadd_ps(load(a + at), load(b + at), sum);
        along[i] = _mm512_reduce_add_ps(sum);
        sums[i] = log_sums[(first + i) * heads + head];
      }
      std::fill(query_slopes.begin(), query_slopes.end(), 0.0f);
      for (int64_t key = 0; key < s.reach(query); key += KEYS) {
        const int some = int(std::min(int64_t(KEYS), s.reach(query) - key));
        product(scores.data(), QUERIES, &keys[key * dim / 2], dim / 2, 1, queries.data(), QUERIES, some, QUERIES,
                dim / 2, false);
        product(slants.data(), QUERIES, &values[key * dim / 2], dim / 2, 1, pulls.data(), QUERIES, some, QUERIES,
                dim / 2, false);
        for (int i = 0; i < some; i += 2)
          for (int j = 0; j < LANES; ++j) {
            __m512 slope[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int n = 0; n < std::min(2, some - i); ++n) {
              const int at = (i + n) * QUERIES + 16 * j;
              const __mmask16 seen = s.sees(key + i + n, query + 16 * j) & s.there(query + 16 * j);
              const __m512 score = _mm512_mul_ps(_mm512_loadu_ps(&scores[at]), factor);
              const __m512 w =
                  _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(score, _mm512_load_ps(sums + 16 * j))));
              const __m512 slant = _mm512_sub_ps(_mm512_loadu_ps(&slants[at]), _mm512_load_ps(along + 16 * j));
              slope[n] = _mm512_mul_ps(_mm512_mul_ps(w, slant), factor);
              store((bf16*)weights.data() + at, w);
              store((bf16*)slopes.data() + at, slope[n]);
            }
            _mm512_storeu_si512(&slope_pairs[i / 2 * QUERIES + 16 * j], pairs_of(slope[0], slope[1]));
          }
        product(&value_slopes[key * dim], dim, weights.data(), QUERIES / 2, 1, pull_pairs.data(), dim, some, dim,
                (count + 1) / 2, true);
        product(&key_slopes[key * dim], dim, slopes.data(), QUERIES / 2, 1, query_pairs.data(), dim, some, dim,
                (count + 1) / 2, true);
        product(query_slopes.data(), QUERIES, &key_pairs[key / 2 * dim], 1, dim, slope_pairs.data(), QUERIES, dim,
                QUERIES, (some + 1) / 2, true);
      }
      written(dq + (first * heads + head) * dim, heads * dim, query_slopes.data(), count, dim);
    }
  const int64_t kv_heads = heads / group;
  for (int64_t i = 0; i < s.keys; ++i)
    for (int at = 0; at < dim; at += 16) {
      const int64_t place = (source[s.offset + i] * kv_heads + kv_head) * dim + at;
      _mm512_storeu_ps(dk + place, _mm512_add_ps(_mm512_loadu_ps(dk + place), _mm512_loadu_ps(&key_slopes[i * dim + at])));
      _mm512_storeu_ps(dv + place,
                       _mm512_add_ps(_mm512_loadu_ps(dv + place), _mm512_loadu_ps(&value_slopes[i * dim + at])));
    }
}

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

// silu(gate) * up of [rows, 2 width], gate before up, rounded once.
void gated(bf16* out, const bf16* x, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 gate = load(x + 2 * row * width + i), up = load(x + (2 * row + 1) * width + i);
      // e^-|x|, which is at most 1; NaN stays NaN
      const __m512 small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
      const __m512 over = _mm512_add_ps(small, _mm512_set1_ps(1.0f));
      const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 part = _mm512_mask_mul_ps(gate, negative, gate, small);
      store(out + row * width + i, _mm512_mul_ps(_mm512_div_ps(part, over), up));
    }
}

// The first `heads` heads of each row of `x` rotated in place, rounded once: x cos + x' sin, x' being x with its halves
// in each other's place and `sin` carrying the signs. `cos` and `sin` are [rows, dim].
void rotate(bf16* x, int64_t x_row, const bf16* cos, const bf16* sin, int64_t rows, int64_t heads, int64_t dim,
            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < dim / 2; i += 16) {
      const int64_t j = i + dim / 2;
      const __m512 c[2] = {load(cos + row * dim + i), load(cos + row * dim + j)};
      const __m512 s[2] = {load(sin + row * dim + i), load(sin + row * dim + j)};
      for (int64_t head = 0; head < heads; ++head) {
        bf16* place = x + row * x_row + head * dim;
        const __m512 low = load(place + i), high = load(place + j);
        store(place + i, _mm512_fmadd_ps(low, c[0], _mm512_mul_ps(high, s[0])));
        store(place + j, _mm512_fmadd_ps(high, c[1], _mm512_mul_ps(low, s[1])));
      }
    }
}

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

// x / rms(x) * weight, rounded once.
void normalise(bf16* out, const bf16* x, const bf16* weight, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = row * width; i < (row + 1) * width; i += 16)
      squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps));
    for (int64_t i = 0; i < width; i += 16)
      store(out + row * width + i, _mm512_mul_ps(_mm512_mul_ps(load(x + row * width + i), scale), load(weight + i)));
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

// Attention over the sequences of a row, in float32 sums: [tokens, heads, dim] and [tokens, heads] logarithms of sums.
// `q_row` and the like are strides in numbers. `sequences` are rows of `Sequence`, `source` the tokens of their keys.
void attend_row(bf16* out, float* log_sums, const bf16* q, int64_t q_row, int64_t q_head, const bf16* k, int64_t k_row,
                int64_t k_head, const bf16* v, int64_t v_row, int64_t v_head, const int64_t* sequences,
                const int64_t* source, int64_t count, int64_t kv_heads, int64_t group, int64_t dim, float scale,
                int threads) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i)
    for (int64_t head = 0; head < kv_heads; ++head)
      forward(out, log_sums, {q, q_row, q_head}, {k, k_row, k_head}, {v, v_row, v_head}, source,
              ((const Sequence*)sequences)[i], kv_heads * group, group, head, int(dim), scale);
}

// Its backward pass: `dq` as `out`, `dk` and `dv` float32 [tokens, kv_heads, dim] to which is added. `families` are
// bounds in `sequences`: those that share keys follow each other, and are taken in order by one thread.
void attend_row_backward(bf16* dq, float* dk, float* dv, const bf16* pull, const bf16* out, const float* log_sums,
                         const bf16* q, int64_t q_row, int64_t q_head, const bf16* k, int64_t k_row, int64_t k_head,
                         const bf16* v, int64_t v_row, int64_t v_head, const int64_t* sequences, const int64_t* source,
                         const int64_t* families, int64_t count, int64_t kv_heads, int64_t group, int64_t dim,
                         float scale, int threads) {
  const int64_t heads = kv_heads * group;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t family = 0; family < count; ++family)
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t i = families[family]; i < families[family + 1]; ++i)
        backward(dq, dk, dv, {pull, heads * dim, dim}, {out, heads * dim, dim}, log_sums, {q, q_row, q_head},
                 {k, k_row, k_head}, {v, v_row, v_head}, source, ((const Sequence*)sequences)[i], heads, group, head,
                 int(dim), scale);
}
}
