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
  Table<T> q;                      // [queries, dim]
  Table<float> seen, most, total;  // [queries, dim] in the order of the sums, [queries], [queries]

  Seen(int count, int width, float scaling)
      : dim(width), words(width * int(sizeof(T)) / 4), scale(scaling), q(count * width), seen(count * width),
        most(count), total(count) {}

  void begin() {
    std::fill(seen.begin(), seen.end(), 0.0f);
    std::fill(total.begin(), total.end(), 0.0f);
    std::fill(most.begin(), most.end(), -INFINITY);
  }
};

#ifdef __AMX_BF16__

// Columns 0 to 3 of 16 rows of SIDE numbers.
ALWAYS void four_columns(const float* from, Floats* to) {
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

// The sums or maxima of the numbers of four vectors, in every four numbers of the result.
template <class Combine>
ALWAYS Floats combined(const Floats* x, const Combine& combine) {
  const auto low = [](Floats a, Floats b) { return (__m512d)_mm512_unpacklo_ps(a, b); };
  const auto high = [](Floats a, Floats b) { return (__m512d)_mm512_unpackhi_ps(a, b); };
  const auto left = (__m512d)combine((Floats)low(x[0], x[1]), (Floats)high(x[0], x[1]));
  const auto right = (__m512d)combine((Floats)low(x[2], x[3]), (Floats)high(x[2], x[3]));
  Floats fours = combine((Floats)_mm512_unpacklo_pd(left, right), (Floats)_mm512_unpackhi_pd(left, right));
  fours = combine(fours, _mm512_shuffle_f32x4(fours, fours, 0x4e));
  return combine(fours, _mm512_shuffle_f32x4(fours, fours, 0xb1));
}

// Keys and values of the next chunk on their way into the first cache: a few lines at a time, since many at once would keep
// those waiting that are computed with.
struct Ahead {
  const char *k = nullptr, *v = nullptr;
  int64_t lines = 0;  // of either that are left

  void start(const bf16* keys, const bf16* values, int64_t place, int64_t numbers) {
    k = (const char*)(keys + place);
    v = (const char*)(values + place);
    lines = numbers * int64_t(sizeof(bf16)) / LINE;
  }

  void fetch(int count) {
    if (lines <= 0) return;
    for (int i = 0; i < count; ++i) {
      _mm_prefetch(k + LINE * i, _MM_HINT_T0);
      _mm_prefetch(v + LINE * i, _MM_HINT_T0);
    }
    k += LINE * count;
    v += LINE * count;
    lines -= count;
  }
};

// Keys are the rows of a product and 16 queries its columns, so keys are read in the layout of the cache. So are values, two
// numbers to a word: a weight has two rows of the product, which meet the even numbers and the odd ones. A query's bits do not
// depend on the others.
struct TileQueries : Seen<bf16> {
  static constexpr int HALF = SIDE / 2;           // queries whose weights fill a tile
  Table<uint32_t> columns;                        // [blocks of SIDE queries, words, SIDE]
  Table<bf16> last_keys, last_values;             // [SIDE, dim], those that fill no tile, and zeros
  Table<float> sums;                              // [dim / 32, 2 HALF, SIDE], what a chunk adds to `seen`
  alignas(LINE) float scores[CHUNK * SIDE];       // of keys and queries
  alignas(LINE) uint32_t weights[2 * SIDE * CHUNK];  // [queries, 2, CHUNK]: in the low half of a word, in the high half
  Ahead ahead;
  Tiles tiles;

  TileQueries(int count, int width, float scaling)
      : Seen(count, width, scaling), columns(whole_tiles(count) * words), last_keys(SIDE * width),
        last_values(SIDE * width), sums(HALF * width) {}

  // Call it before `see` for the same queries.
  void turn(int first, int last) {
    tiles.set_rows(2 * std::min(last - first, HALF));
    for (int query = first; query < last; query += SIDE)
      turned(&columns[(query - first) * words], SIDE, &q[query * dim], dim, last - query, words);
  }

  // The rows of a chunk that fill no tile.
  void set_last(Table<bf16>& rows, const bf16* from, int count) const {
    const int64_t left = count % SIDE * dim, whole = int64_t(count) * dim - left;
    std::fill(std::copy(from + whole, from + whole + left, rows.begin()), rows.end(), bf16(0));
  }

  // A tile's rows from `key`.
  const bf16* rows(const bf16* from, const Table<bf16>& last, int key, int count) const {
    return key + SIDE > count ? last.data() : from + int64_t(key) * dim;
  }

  // Scores of `count` keys and a block of queries.
  void score(const uint32_t* block, const bf16* k, int count) {
    written_before();
    for (int key = 0; key < count; key += 2 * SIDE) {
      _tile_zero(0);
      _tile_zero(1);
      for (int step = 0; step < words; step += SIDE) {
        _tile_loadd(6, block + step * SIDE, 4 * SIDE);
        _tile_loadd(4, rows(k, last_keys, key, count) + 2 * step, 2 * dim);
        _tile_dpbf16ps(0, 4, 6);
        ahead.fetch(6);
        if (key + SIDE >= count) continue;
        _tile_loadd(5, rows(k, last_keys, key + SIDE, count) + 2 * step, 2 * dim);
        _tile_dpbf16ps(1, 5, 6);
        ahead.fetch(6);
      }
      _tile_stored(0, scores + key * SIDE, 4 * SIDE);
      _tile_stored(1, scores + (key + SIDE) * SIDE, 4 * SIDE);
    }
  }

  // Scores of 16 V keys and the queries [first, last) become weights. Query i sees the first `limits[i - first]` keys.
  // `shrink` gets what the earlier weights of each shrink by.
  template <int V>
  void weigh(int first, int last, const int* limits, float* shrink) {
    for (int query = first; query < last; query += 4) {
      const int at = query - first;
      Floats s[V][4], top[4], sum[4];
      for (int v = 0; v < V; ++v) four_columns(scores + 16 * v * SIDE + at, s[v]);
      for (int i = 0; i < 4; ++i) {
        top[i] = all(-INFINITY);
        sum[i] = all(0);
        for (int v = 0; v < V; ++v) {
          s[v][i] = s[v][i] * all(scale);
          top[i] = larger(top[i], choose(lanes(limits[at + i] - 16 * v), s[v][i], all(-INFINITY)));
        }
      }
      const Mask present = lanes(std::min(4, last - query));
      const Floats before = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps(__mmask8(present), &most[query]));
      const Floats now = larger(before, combined(top, larger)), factor = exponential(before - now);
      const Floats largest[] = {_mm512_permute_ps(now, 0x00), _mm512_permute_ps(now, 0x55),
                                _mm512_permute_ps(now, 0xaa), _mm512_permute_ps(now, 0xff)};
      for (int i = 0; i < 4; ++i) {
        if (query + i == last) break;
        uint32_t* even = weights + 2 * (at + i) * CHUNK;
        for (int v = 0; v < V; ++v) {
          const Floats w = keep(lanes(limits[at + i] - 16 * v), exponential(s[v][i] - largest[i]));
          const Bits word = _mm512_cvtepu16_epi32(rounded_to_bf16(w));
          sum[i] = sum[i] + w;
          store_bits(even + 16 * v, word);
          store_bits(even + CHUNK + 16 * v, _mm512_slli_epi32(word, 16));
        }
        ahead.fetch(8);
      }
      const auto plus = [](Floats a, Floats b) { return a + b; };
      store(&total[query], fma(load(&total[query], present), factor, combined(sum, plus)), present);
      store(&most[query], now, present);
      store(shrink + at, factor, present);
    }
  }

  // Products of the weights of `count` keys and HALF queries with the values.
  void multiply(const uint32_t* some, const bf16* v, int count) {
    written_before();
    for (int at = 0; at < dim; at += 4 * SIDE) {
      const bool two = at + 2 * SIDE < dim;
      _tile_zero(2);
      _tile_zero(3);
      for (int key = 0; key < count; key += SIDE) {
        const bf16* from = rows(v, last_values, key, count) + at;
        _tile_loadd(7, some + key, 4 * CHUNK);
        _tile_loadd(4, from, 2 * dim);
        _tile_dpbf16ps(2, 7, 4);
        ahead.fetch(6);
        if (!two) continue;
        _tile_loadd(5, from + 2 * SIDE, 2 * dim);
        _tile_dpbf16ps(3, 7, 5);
        ahead.fetch(6);
      }
      _tile_stored(2, &sums[at * HALF], 4 * SIDE);
      if (two) _tile_stored(3, &sums[(at + 2 * SIDE) * HALF], 4 * SIDE);
    }
  }

  // Queries [first, last) meet a chunk of `count` keys, of which query i sees the first `seen_by(i)`.
  template <class SeenBy>
  void see(int first, int last, const bf16* k, const bf16* v, int count, const SeenBy& seen_by) {
    if (count % SIDE) set_last(last_keys, k, count), set_last(last_values, v, count);
    for (int query = first; query < last; query += SIDE) {
      const int end = std::min(last, query + SIDE);
      int limits[SIDE] = {};
      float shrink[SIDE];
      for (int i = query; i < end; ++i) limits[i - query] = seen_by(i);
      score(&columns[(query - first) * words], k, count);
      if (count > 48) weigh<4>(query, end, limits, shrink);
      else if (count > 32) weigh<3>(query, end, limits, shrink);
      else if (count > 16) weigh<2>(query, end, limits, shrink);
      else weigh<1>(query, end, limits, shrink);
      for (int half = query; half < end; half += HALF) {
        multiply(weights + 2 * (half - query) * CHUNK, v, count);
        for (int i = half; i < std::min(end, half + HALF); ++i)
          for (int at = 0; at < dim; at += 16) {
            float* place = &seen[i * dim + at];
            const float* more = &sums[at / 32 * 32 * HALF + (2 * (i - half) + at / 16 % 2) * SIDE];
            store(place, fma(load(place), all(shrink[i - query]), load(more)));
          }
      }
    }
  }

  // Queries [first, last) meet the first `length` tokens of a sequence, which begins at `offset` in every block.
  void meet(int first, int last, const bf16* const* k, const bf16* const* v, int64_t width, int64_t offset,
            int64_t length) {
    if (length == 0) return;
    turn(first, last);
    const bf16 *const first_k = *k, *const first_v = *v;
    const auto keys = [&](int64_t start, int64_t at) {
      return int(std::min({int64_t(CHUNK), width - at, length - start}));
    };
    for (int64_t start = 0, at = 0; start < length;) {
      const int count = keys(start, at);
      const int64_t here = (offset * width + at) * dim;
      const bf16 *const some = *k + here, *const their = *v + here;
      start += count;
      at += count;
      if (at == width) at = 0, ++k, ++v;
      if (start < length)
        ahead.start(*k, *v, (offset * width + at) * dim, keys(start, at) * dim);
      else  // the next head or row
        ahead.start(first_k, first_v, (offset + 1) * width * dim, keys(0, 0) * dim);
      see(first, last, some, their, count, [&](int) { return count; });
      ahead.fetch(int(ahead.lines));
    }
  }

  void write(int query, bf16* out) const {
    const Floats share = all(1 / total[query]);
    for (int i = 0; i < dim; i += 32) {
      const float* from = &seen[query * dim + i];
      store_bits(out + i, pairs_of(load(from) * share, load(from + 16) * share));
    }
  }
};

#endif

}  // namespace
