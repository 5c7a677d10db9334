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

// Keys are the rows of a product and 16 queries its columns, so keys are read as they lie in the cache. A query's bits do
// not depend on the other 15.
struct TileQueries : Seen<bf16> {
  std::vector<uint32_t> columns;            // [blocks of SIDE queries, words, SIDE]
  std::vector<uint32_t> pairs;              // [CHUNK / 2, dim], values of neighbouring keys
  std::vector<bf16> rest;                   // [SIDE, dim], the last keys and zeros
  std::vector<float> sums;                  // [SIDE, dim], what a chunk adds to `seen`
  alignas(64) float scores[CHUNK * SIDE];   // of keys and queries
  alignas(64) uint32_t weights[SIDE * CHUNK / 2];  // of queries and pairs of keys
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
    for (int key = 0; key < count; key += 2)
      for (int i = 0; i < dim; i += 32) {
        const Bits even = load_bits(v + int64_t(key) * dim + i);
        const Bits odd = key + 1 < count ? load_bits(v + int64_t(key + 1) * dim + i) : all_bits(0);
        store_bits(&pairs[key / 2 * dim + i], pair_first_fours(even, odd));
        store_bits(&pairs[key / 2 * dim + i + 16], pair_second_fours(even, odd));
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
        if (key + SIDE >= count) continue;
        _tile_loadd(5, rows(key + SIDE) + 2 * step, 2 * dim);
        _tile_dpbf16ps(1, 5, 6);
      }
      _tile_stored(0, scores + key * SIDE, 4 * SIDE);
      _tile_stored(1, scores + (key + SIDE) * SIDE, 4 * SIDE);
    }
  }

  // Scores of `count` keys become weights. Queries see as many of the keys as `limits` say. Returns what earlier weights
  // shrink by. `meanwhile` gets the number of each key.
  template <class Meanwhile>
  Floats weigh(Floats& largest, Floats& sum, Bits limits, int count, const Meanwhile& meanwhile) {
    const Floats factor = all(scale);
    const auto score = [&](int key) { return load(scores + key * SIDE) * factor; };
    const auto sees = [&](int key) { return greater(limits, all_bits(key)); };
    Floats tops[4] = {largest, largest, largest, largest};
    for (int key = 0; key < count; ++key) {
      meanwhile(key);
      tops[key % 4] = larger(tops[key % 4], choose(sees(key), score(key), all(-INFINITY)));
    }
    const Floats now = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    const Floats before = exponential(largest - now);
    Floats parts[4] = {all(0), all(0), all(0), all(0)};
    for (int start = 0; start < count; start += 2 * SIDE) {
      Bits rows[SIDE];
      for (int key = 0; key < 2 * SIDE; key += 2) {
        Floats w[2];
        for (int i = 0; i < 2; ++i) {
          const int at = start + key + i;
          w[i] = at < count ? keep(sees(at), exponential(score(at) - now)) : all(0);
          parts[(key + i) % 4] = parts[(key + i) % 4] + w[i];
        }
        rows[key / 2] = pairs_of(w[0], w[1]);
      }
      transpose(rows);
      for (int query = 0; query < SIDE; ++query) store_bits(weights + query * CHUNK / 2 + start / 2, rows[query]);
    }
    largest = now;
    sum = fma(sum, before, (parts[0] + parts[1]) + (parts[2] + parts[3]));
    return before;
  }

  // Products of the weights of `count` keys with the values in `pairs`.
  void multiply(int count) {
    written_before();
    for (int at = 0; at < dim; at += 2 * SIDE) {
      _tile_zero(0);
      _tile_zero(1);
      for (int key = 0; key < count; key += 2 * SIDE) {
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
  template <class SeenBy, class Meanwhile = Nothing>
  void see(int first, int last, const bf16* k, const bf16* v, int count, const SeenBy& seen_by,
           const Meanwhile& meanwhile = {}) {
    const int left = count % SIDE;
    std::fill(std::copy(k + int64_t(count - left) * dim, k + int64_t(count) * dim, rest.begin()), rest.end(), bf16(0));
    pair(v, count);
    for (int query = first; query < last; query += SIDE) {
      const Mask here = lanes(last - query);
      alignas(64) int limits[SIDE];
      alignas(64) float shrink[SIDE];
      for (int i = 0; i < SIDE; ++i) limits[i] = query + i < last ? seen_by(query + i) : count;
      score(&columns[(query - first) * words], k, count);
      Floats largest = load(&most[query], here), sum = load(&total[query], here);
      store(shrink, weigh(largest, sum, load_bits(limits), count, meanwhile));
      store(&most[query], largest, here);
      store(&total[query], sum, here);
      multiply(count);
      for (int i = 0; i < std::min(SIDE, last - query); ++i)
        for (int at = 0; at < dim; at += 16) {
          float* place = &seen[(query + i) * dim + at];
          store(place, fma(load(place), all(shrink[i]), load(&sums[i * dim + at])));
        }
    }
  }

  // Queries [first, last) meet the first `length` tokens of a sequence, which begins at `offset` in every block.
  void meet(int first, int last, const bf16* const* k, const bf16* const* v, int64_t width, int64_t offset,
            int64_t length) {
    turn(first, last);
    for (int64_t start = 0; start < length; start += width, ++k, ++v)
      for (int64_t at = 0; at < std::min(width, length - start); at += CHUNK) {
        const int count = int(std::min({int64_t(CHUNK), width - at, length - start - at}));
        const bf16 *keys = *k + (offset * width + at) * dim, *values = *v + (offset * width + at) * dim;
        // On their way from memory into the second cache: the next chunk, or the first of the next head or row.
        const int64_t ahead = (at + CHUNK < std::min(width, length - start) ? CHUNK : width - at) * dim;
        const auto fetch = [&](int key) {
          for (int64_t i = ahead + int64_t(key) * dim; i < ahead + int64_t(key + 1) * dim; i += 32) {
            _mm_prefetch((const char*)(keys + i), _MM_HINT_T1);
            _mm_prefetch((const char*)(values + i), _MM_HINT_T1);
          }
        };
        see(first, last, keys, values, count, [&](int) { return count; }, fetch);
      }
  }
};

#endif

}  // namespace
