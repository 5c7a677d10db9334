// Queries that meet keys chunk by chunk, and how they do so in bfloat16 on AMX.

#pragma once

#include "tiles.h"

namespace {

constexpr int CHUNK = 64;  // keys whose scores stand in the table at once

// Queries and what they have seen so far, as an online softmax keeps it.
template <class T>
struct Seen {
  using Number = T;
  int dim, words;  // of a key: words of 32 bits, each a number or a pair
  float scale;
  std::vector<T> q;                      // [queries, dim]
  std::vector<float> seen, most, total;  // [queries, dim] in the order of the sums, [queries], [queries]

  Seen(int count, int width, float scaling)
      : dim(width), words(width * int(sizeof(T)) / 4), scale(scaling), q(count * width), seen(count * width),
        most(count), total(count) {}

  void begin() {
    std::fill(seen.begin(), seen.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(most.begin(), most.end(), -INFINITY);
  }

  void write(int query, T* out) const {
    const Floats sum = all(total[query]);
    for (int i = 0; i < dim; i += 32) {
      Floats first = load(&seen[query * dim + i]), second = load(&seen[query * dim + i + 16]);
      if constexpr (sizeof(T) == sizeof(bf16)) in_order(first, second);
      store(out + i, first / sum);
      store(out + i + 16, second / sum);
    }
  }
};

#ifdef __AMX_BF16__

// Columns 0 to 3 of 16 rows of SIDE numbers.
inline void four_columns(const float* from, Floats* to) {
  Floats r[4];
  for (int i = 0; i < 4; ++i) {
    const auto four = [&](int row) { return _mm_loadu_ps(from + (row + i) * SIDE); };
    r[i] = _mm512_insertf32x4(_mm512_castps128_ps512(four(0)), four(4), 1);
    r[i] = _mm512_insertf32x4(_mm512_insertf32x4(r[i], four(8), 2), four(12), 3);
  }
  const __m512d low[2] = {(__m512d)_mm512_unpacklo_ps(r[0], r[1]), (__m512d)_mm512_unpacklo_ps(r[2], r[3])};
  const __m512d high[2] = {(__m512d)_mm512_unpackhi_ps(r[0], r[1]), (__m512d)_mm512_unpackhi_ps(r[2], r[3])};
  to[0] = (Floats)_mm512_unpacklo_pd(low[0], low[1]);
  to[1] = (Floats)_mm512_unpackhi_pd(low[0], low[1]);
  to[2] = (Floats)_mm512_unpacklo_pd(high[0], high[1]);
  to[3] = (Floats)_mm512_unpackhi_pd(high[0], high[1]);
}

// Keys and values on their way into the second cache, in the order of their use: as far ahead as a chunk, and a few at a
// time, since many at once would keep those waiting that are computed with.
struct Ahead {
  const bf16 *const *k = nullptr, *const *v = nullptr;  // blocks of `width` keys
  int64_t width = 0, length = 0, dim = 0;
  int64_t offset = 0, key = 0, block = 0, at = 0;  // the next: its sequence, its place there, its block and place there
  int64_t left = 0;

  // What was fetched with the sequence before.
  void skip(int64_t keys) {
    offset += keys / length;
    key = keys % length;
    block = key / width;
    at = key % width;
  }

  void fetch(int keys) {
    for (; keys > 0 && left > 0; --keys, --left) {
      const int64_t place = (offset * width + at) * dim;
      for (int64_t i = place; i < place + dim; i += 32) {
        _mm_prefetch((const char*)(k[block] + i), _MM_HINT_T1);
        _mm_prefetch((const char*)(v[block] + i), _MM_HINT_T1);
      }
      if (++at == width) at = 0, ++block;
      if (++key == length) key = at = block = 0, ++offset;
    }
  }
};

// Keys are the rows of a product and 16 queries its columns, so keys are read as they lie in the cache. A query's bits do
// not depend on the other 15.
struct TileQueries : Seen<bf16> {
  std::vector<uint32_t> columns;            // [blocks of SIDE queries, words, SIDE]
  std::vector<uint32_t> pairs;              // [CHUNK / 2, dim], values of neighbouring keys
  std::vector<bf16> rest;                   // [SIDE, dim], the last keys and zeros
  std::vector<float> sums;                  // [SIDE, dim], what a chunk adds to `seen`
  alignas(64) float scores[CHUNK * SIDE];   // of keys and queries
  alignas(64) uint32_t weights[SIDE * CHUNK / 2];  // of queries and pairs of keys
  Ahead ahead;
  const Tiles tiles;

  TileQueries(int count, int width, float scaling)
      : Seen(count, width, scaling), columns(whole_tiles(count) * words), pairs(CHUNK / 2 * width), rest(SIDE * width),
        sums(SIDE * width) {}

  // Call it before `see` for the same queries.
  void turn(int first, int last) {
    for (int query = first; query < last; query += SIDE)
      turned(&columns[(query - first) * words], SIDE, &q[query * dim], dim, last - query, words);
  }

  // Pairs of the values of `count` keys, and zeros up to a whole tile of them.
  void pair(const bf16* v, int count) {
    for (int key = 0; key < count; key += 2) {
      if (key % 4 == 0) ahead.fetch(1);
      for (int i = 0; i < dim; i += 32) {
        const Bits even = load_bits(v + int64_t(key) * dim + i);
        const Bits odd = key + 1 < count ? load_bits(v + int64_t(key + 1) * dim + i) : all_bits(0);
        store_bits(&pairs[key / 2 * dim + i], pair_first_fours(even, odd));
        store_bits(&pairs[key / 2 * dim + i + 16], pair_second_fours(even, odd));
      }
    }
    const int64_t end = (count + 1) / 2;
    std::fill(pairs.begin() + end * dim, pairs.begin() + whole_tiles(end) * dim, 0u);
  }

  // Scores of `count` keys and a block of queries. The last keys that fill no tile are in `rest`.
  void score(const uint32_t* block, const bf16* k, int count) {
    const auto rows = [&](int key) { return key + SIDE > count ? rest.data() : k + int64_t(key) * dim; };
    written_before();
    for (int key = 0; key < count; key += 2 * SIDE) {
      _tile_zero(0);
      _tile_zero(1);
      for (int step = 0; step < words; step += SIDE) {
        _tile_loadd(6, block + step * SIDE, 4 * SIDE);
        _tile_loadd(4, rows(key) + 2 * step, 2 * dim);
        _tile_dpbf16ps(0, 4, 6);
        ahead.fetch(4);
        if (key + SIDE >= count) continue;
        _tile_loadd(5, rows(key + SIDE) + 2 * step, 2 * dim);
        _tile_dpbf16ps(1, 5, 6);
      }
      _tile_stored(0, scores + key * SIDE, 4 * SIDE);
      _tile_stored(1, scores + (key + SIDE) * SIDE, 4 * SIDE);
    }
  }

  // Scores of `count` keys and the queries [first, last) become weights. Query i sees the first `limits[i - first]` keys.
  // `shrink` gets what the earlier weights of each shrink by.
  void weigh(int first, int last, const int* limits, int count, float* shrink) {
    const Floats factor = all(scale);
    for (int query = first; query < last; query += 4) {
      Floats s[CHUNK / 16][4];
      for (int at = 0; at < count; at += 16) four_columns(scores + at * SIDE + query - first, s[at / 16]);
      for (int i = 0; i < std::min(4, last - query); ++i) {
        const int limit = limits[query - first + i];
        Floats top = all(-INFINITY), sum = all(0);
        for (int at = 0; at < count; at += 16) {
          Floats& score = s[at / 16][i];
          score = score * factor;
          top = larger(top, choose(lanes(limit - at), score, all(-INFINITY)));
        }
        float &largest = most[query + i], &whole = total[query + i];
        const float now = std::max(largest, largest_of(top));
        for (int at = 0; at < count; at += 32) {
          Floats w[2];
          for (int half = 0; half < 2; ++half) {
            const int key = at + 16 * half;
            w[half] = key < count ? keep(lanes(limit - key), exponential(s[key / 16][i] - all(now))) : all(0);
            sum = sum + w[half];
          }
          ahead.fetch(2);
          store_bits(weights + (query - first + i) * CHUNK / 2 + at / 2, (Bits)_mm512_cvtne2ps_pbh(w[1], w[0]));
        }
        const float before = first_of(exponential(all(largest - now)));
        shrink[query - first + i] = before;
        whole = std::fma(whole, before, sum_of(sum));
        largest = now;
      }
    }
  }

  // Products of the weights of `count` keys with the values in `pairs`.
  void multiply(int count) {
    written_before();
    for (int at = 0; at < dim; at += 2 * SIDE) {
      _tile_zero(0);
      _tile_zero(1);
      for (int key = 0; key < count; key += 2 * SIDE) {
        ahead.fetch(4);
        _tile_loadd(4, weights + key / 2, 2 * CHUNK);
        _tile_loadd(5, &pairs[key / 2 * dim + at], 4 * dim);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, &pairs[key / 2 * dim + at + SIDE], 4 * dim);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, &sums[at], 4 * dim);
      _tile_stored(1, &sums[at + SIDE], 4 * dim);
    }
  }

  // Queries [first, last) meet a chunk of `count` keys, of which query i sees the first `seen_by(i)`.
  template <class SeenBy>
  void see(int first, int last, const bf16* k, const bf16* v, int count, const SeenBy& seen_by) {
    const int left = count % SIDE;
    std::fill(std::copy(k + int64_t(count - left) * dim, k + int64_t(count) * dim, rest.begin()), rest.end(), bf16(0));
    pair(v, count);
    for (int query = first; query < last; query += SIDE) {
      const int end = std::min(last, query + SIDE);
      int limits[SIDE];
      float shrink[SIDE];
      for (int i = query; i < end; ++i) limits[i - query] = seen_by(i);
      score(&columns[(query - first) * words], k, count);
      weigh(query, end, limits, count, shrink);
      multiply(count);
      for (int i = 0; i < end - query; ++i)
        for (int at = 0; at < dim; at += 16) {
          float* place = &seen[(query + i) * dim + at];
          store(place, fma(load(place), all(shrink[i]), load(&sums[i * dim + at])));
        }
    }
  }

  // Queries [first, last) meet the first `length` tokens of a sequence, which begins at `offset` in every block.
  void meet(int first, int last, const bf16* const* k, const bf16* const* v, int64_t width, int64_t offset,
            int64_t length) {
    if (length == 0) return;
    turn(first, last);
    ahead = {k, v, width, length, dim, offset};
    ahead.skip(CHUNK);
    for (int64_t start = 0; start < length; start += width, ++k, ++v)
      for (int64_t at = 0; at < std::min(width, length - start); at += CHUNK) {
        const int count = int(std::min({int64_t(CHUNK), width - at, length - start - at}));
        const bf16 *keys = *k + (offset * width + at) * dim, *values = *v + (offset * width + at) * dim;
        ahead.left += count;
        see(first, last, keys, values, count, [&](int) { return count; });
        ahead.fetch(CHUNK);
      }
  }
};

#endif

}  // namespace
