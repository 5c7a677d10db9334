// Attention over the sequences of a packed row, with its backward pass.
//
// Keys are the rows of every product and queries its columns, so that what a softmax takes over keys are sums and maxima of
// whole vectors.

#include "row.h"
#include "tiles.h"

namespace {

constexpr int QUERIES = 64;  // of a block
constexpr int KEYS = 96;     // of a block; whole tiles of pairs
// of a product's tile: its rows, and vectors of its columns
constexpr int ROWS = REGISTERS > 16 ? 6 : 4, WIDE = REGISTERS > 16 ? 4 : 1, NARROW = REGISTERS > 16 ? 2 : 1;

using Words = Table<uint32_t>;  // pairs of bfloat16, the first in the low half
using Numbers = Table<float>;
using Row = View<bf16>;

template <int J>
inline void columns_of(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                       int rows, int pairs, bool add) {
  for (; rows >= ROWS; rows -= ROWS, c += ROWS * c_row, a += ROWS * a_row)
    tile<ROWS, J>(c, c_row, a, a_row, b, b_row, pairs, add);
  if (rows) few_rows<ROWS - 1, J>(c, c_row, a, a_row, b, b_row, rows, pairs, add);
}

// The same for any number of rows and a multiple of 32 columns. On AMX rows and pairs are rounded up to whole tiles: all
// tables have room for them, and what is summed over is 0 there in `a` or `b`, and finite in the other.
void product(float* c, int64_t c_row, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int rows,
             int columns, int pairs, bool add) {
  if (has_tiles()) {
    const int whole = int(whole_tiles(rows)), depth = int(whole_tiles(pairs));
    for (int row = 0; row < whole; row += 2 * SIDE)
      for (int at = 0; at < columns; at += 2 * SIDE) {
        float* place = c + row * c_row + at;
        const uint32_t* left = a + row * a_row;
        if (row + SIDE < whole)
          tile_product<2>(place, c_row, LeftRows{left, a_row}, RightRows{b + at, b_row}, depth, add);
        else
          tile_product<1>(place, c_row, LeftRows{left, a_row}, RightRows{b + at, b_row}, depth, add);
      }
    return;
  }
  int at = 0;
  for (; at + 16 * WIDE <= columns; at += 16 * WIDE)
    columns_of<WIDE>(c + at, c_row, a, a_row, b + at, b_row, rows, pairs, add);
  for (; at < columns; at += 16 * NARROW)
    columns_of<NARROW>(c + at, c_row, a, a_row, b + at, b_row, rows, pairs, add);
}

// [dim / 2, QUERIES] of a block of queries
void turned_block(Words& to, const bf16* from, int64_t row, int count, int dim) {
  for (int first = 0; first < QUERIES; first += 16)
    turned(&to[first], QUERIES, from + first * row, row, count - first, dim / 2);
}

// [ceil(count / 2), dim] of `count` rows of bfloat16: neighbouring rows as pairs; a last one alone is paired with 0.
void paired(uint32_t* to, const bf16* from, int64_t row, int64_t count, int dim) {
  for (int64_t at = 0; at < count; at += 2)
    for (int i = 0; i < dim; i += 32) {
      Bits first = load_bits(from + at * row + i);
      Bits second = at + 1 < count ? load_bits(from + (at + 1) * row + i) : all_bits(0);
      interleave(first, second);
      store_bits(to + at / 2 * dim + i, first);
      store_bits(to + at / 2 * dim + i + 16, second);
    }
}

// [dim, QUERIES] float32 to rows of bfloat16
void written(bf16* to, int64_t row, const float* from, int count, int dim) {
  for (int first = 0; first < count; first += 16)
    for (int at = 0; at < dim; at += 16) {
      Bits r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_bits(from + (at + i) * QUERIES + first);
      transpose(r);
      for (int i = 0; i < std::min(16, count - first); ++i) store(to + (first + i) * row + at, as_floats(r[i]));
    }
}

// lanes of the queries from `query` on that see key `key`
Mask sees(const Sequence& s, int64_t key, int64_t query) {
  const int64_t before = key - (s.keys - s.queries) - query;
  return before <= 0 ? 0xffff : before >= 16 ? 0 : Mask(0xffff << before);
}

// tokens of a sequence with those that fill its last tile of pairs
int64_t padded(int64_t tokens) { return 2 * whole_tiles((tokens + 1) / 2); }

// A head's keys or values of a sequence, one after the other, and zeros behind them.
Words gathered(const Row& x, const Sequence& s, const int64_t* source, int64_t head, int dim) {
  Words found(padded(s.keys) * dim / 2);
  s.gather((bf16*)found.data(), x, source, head, dim);
  return found;
}

// [dim, count / 2] words of rows that `gathered` returned, pairs of neighbouring rows.
Words columns_of_pairs(const Words& x, int64_t count, int dim) {
  Words pairs(count / 2 * dim), found(dim * count / 2);
  paired(pairs.data(), (const bf16*)x.data(), dim, count, dim);
  for (int64_t pair = 0; pair < count / 2; pair += 16)
    for (int at = 0; at < dim; at += 16) {
      Bits r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_bits(&pairs[(pair + i) * dim + at]);
      transpose(r);
      for (int i = 0; i < 16; ++i) store_bits(&found[(at + i) * count / 2 + pair], r[i]);
    }
  return found;
}

constexpr int LANES = QUERIES / 16;

// Zeros behind the pairs of `count` keys, up to a whole tile.
inline void clear_rest(uint32_t* pairs, int count) {
  const int64_t first = (count + 1) / 2;
  std::fill(pairs + first * QUERIES, pairs + whole_tiles(first) * QUERIES, 0u);
}

// A block of queries of one head as it meets keys: an online softmax.
struct Softmax {
  Floats most[LANES], total[LANES];
  float scale;
  explicit Softmax(float scaling) : scale(scaling) {
    for (int j = 0; j < LANES; ++j) most[j] = all(-INFINITY), total[j] = all(0);
  }
  // Scores [count, QUERIES] of keys from `key` on become weights in pairs; `before` is what earlier weights shrink by.
  void weigh(uint32_t* weights, const float* scores, const Sequence& s, int64_t key, int count, int64_t query,
             Floats* before) {
    const Floats factor = all(scale);
    for (int j = 0; j < LANES; ++j) {
      Floats now = most[j], sum = all(0);
      const auto score = [&](int i) { return load(scores + i * QUERIES + 16 * j) * factor; };
      const auto seen = [&](int i) { return i < count ? sees(s, key + i, query + 16 * j) : Mask(0); };
      for (int i = 0; i < count; ++i) now = choose(seen(i), larger(now, score(i)), now);
      before[j] = exponential(most[j] - now);
      for (int i = 0; i < count; i += 2) {
        const Floats even = keep(seen(i), exponential(score(i) - now));
        const Floats odd = seen(i + 1) ? keep(seen(i + 1), exponential(score(i + 1) - now)) : all(0);
        sum = sum + (even + odd);
        store_bits(weights + i / 2 * QUERIES + 16 * j, pairs_of(even, odd));
      }
      most[j] = now;
      total[j] = fma(total[j], before[j], sum);
    }
    clear_rest(weights, count);
  }
};

void forward(bf16* out, float* log_sums, const Row& q, const Row& k, const Row& v, const int64_t* source,
             const Sequence& s, int64_t heads, int64_t group, int64_t kv_head, int dim, float scale) {
  const Words keys = gathered(k, s, source, kv_head, dim);
  const int64_t places = padded(s.keys);
  const Words values = columns_of_pairs(gathered(v, s, source, kv_head, dim), places, dim);
  const Tiles tiles;
  Words queries(dim / 2 * QUERIES), weights(KEYS / 2 * QUERIES);
  Numbers scores(KEYS * QUERIES), seen(dim * QUERIES);
  for (int64_t query = 0; query < s.queries; query += QUERIES)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int count = int(std::min(int64_t(QUERIES), s.queries - query));
      turned_block(queries, q.at(s.first + query, head), q.row, count, dim);
      std::fill(seen.begin(), seen.end(), 0.0f);
      Softmax softmax(scale);
      for (int64_t key = 0; key < s.reach(query + QUERIES); key += KEYS) {
        const int some = int(std::min(int64_t(KEYS), s.reach(query + QUERIES) - key));
        Floats before[LANES];
        product(scores.data(), QUERIES, &keys[key * dim / 2], dim / 2, queries.data(), QUERIES, some, QUERIES, dim / 2,
                false);
        softmax.weigh(weights.data(), scores.data(), s, key, some, query, before);
        if (key)
          for (int i = 0; i < dim * LANES; ++i) {
            float* place = &seen[16 * i];
            store(place, load(place) * before[i % LANES]);
          }
        product(seen.data(), QUERIES, &values[key / 2], places / 2, weights.data(), QUERIES, dim, QUERIES,
                (some + 1) / 2, true);
      }
      for (int i = 0; i < dim * LANES; ++i) {
        float* place = &seen[16 * i];
        store(place, load(place) / softmax.total[i % LANES]);
      }
      written(out + ((s.first + query) * heads + head) * dim, heads * dim, seen.data(), count, dim);
      for (int i = 0; i < count; ++i)
        log_sums[(s.first + query + i) * heads + head] =
            ((float*)softmax.most)[i] + std::log(((float*)softmax.total)[i]);
    }
}

void backward(bf16* dq, float* dk, float* dv, const Row& pull, const Row& out, const float* log_sums, const Row& q,
              const Row& k, const Row& v, const int64_t* source, const Sequence& s, int64_t heads, int64_t group,
              int64_t kv_head, int dim, float scale) {
  const int64_t places = padded(s.keys);
  const Words keys = gathered(k, s, source, kv_head, dim), key_columns = columns_of_pairs(keys, places, dim);
  const Words values = gathered(v, s, source, kv_head, dim);
  const Tiles tiles;
  Words queries(dim / 2 * QUERIES), pulls(dim / 2 * QUERIES), query_pairs(QUERIES / 2 * dim), pull_pairs(QUERIES / 2 * dim);
  Words weights(KEYS * QUERIES / 2), slopes(KEYS * QUERIES / 2), slope_pairs(KEYS / 2 * QUERIES);
  Numbers scores(KEYS * QUERIES), slants(KEYS * QUERIES), query_slopes(dim * QUERIES);
  Numbers key_slopes(places * dim), value_slopes(places * dim);
  const Floats factor = all(scale);
  for (int64_t query = 0; query < s.queries; query += QUERIES)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int count = int(std::min(int64_t(QUERIES), s.queries - query));
      const int64_t first = s.first + query;
      turned_block(queries, q.at(first, head), q.row, count, dim);
      turned_block(pulls, pull.at(first, head), pull.row, count, dim);
      for (auto& [pairs, x] : {std::pair<Words&, const Row&>{query_pairs, q}, {pull_pairs, pull}}) {
        paired(pairs.data(), x.at(first, head), x.row, count, dim);
        std::fill(pairs.begin() + (count + 1) / 2 * dim, pairs.end(), 0u);
      }
      alignas(64) float sums[QUERIES] = {}, along[QUERIES] = {};
      for (int i = 0; i < count; ++i) {
        const bf16 *a = pull.at(first + i, head), *b = out.at(first + i, head);
        Floats sum = all(0);
        for (int at = 0; at < dim; at += 16) sum = fma(load(a + at), load(b + at), sum);
        along[i] = sum_of(sum);
        sums[i] = log_sums[(first + i) * heads + head];
      }
      std::fill(query_slopes.begin(), query_slopes.end(), 0.0f);
      for (int64_t key = 0; key < s.reach(query + QUERIES); key += KEYS) {
        const int some = int(std::min(int64_t(KEYS), s.reach(query + QUERIES) - key));
        product(scores.data(), QUERIES, &keys[key * dim / 2], dim / 2, queries.data(), QUERIES, some, QUERIES, dim / 2,
                false);
        product(slants.data(), QUERIES, &values[key * dim / 2], dim / 2, pulls.data(), QUERIES, some, QUERIES, dim / 2,
                false);
        for (int i = 0; i < some; i += 2)
          for (int j = 0; j < LANES; ++j) {
            Floats slope[2] = {all(0), all(0)};
            for (int n = 0; n < std::min(2, some - i); ++n) {
              const int at = (i + n) * QUERIES + 16 * j;
              const Mask seen = sees(s, key + i + n, query + 16 * j) & lanes(s.queries - query - 16 * j);
              const Floats score = load(&scores[at]) * factor;
              const Floats w = keep(seen, exponential(score - load(sums + 16 * j)));
              const Floats slant = load(&slants[at]) - load(along + 16 * j);
              slope[n] = w * slant * factor;
              store((bf16*)weights.data() + at, w);
              store((bf16*)slopes.data() + at, slope[n]);
            }
            store_bits(&slope_pairs[i / 2 * QUERIES + 16 * j], pairs_of(slope[0], slope[1]));
          }
        clear_rest(slope_pairs.data(), some);
        // the rows of a tile behind them belong to keys that these queries do not see
        for (Words* rows : {&weights, &slopes})
          std::fill(rows->begin() + some * QUERIES / 2, rows->begin() + whole_tiles(some) * QUERIES / 2, 0u);
        product(&value_slopes[key * dim], dim, weights.data(), QUERIES / 2, pull_pairs.data(), dim, some, dim,
                (count + 1) / 2, true);
        product(&key_slopes[key * dim], dim, slopes.data(), QUERIES / 2, query_pairs.data(), dim, some, dim,
                (count + 1) / 2, true);
        product(query_slopes.data(), QUERIES, &key_columns[key / 2], places / 2, slope_pairs.data(), QUERIES, dim,
                QUERIES, (some + 1) / 2, true);
      }
      written(dq + (first * heads + head) * dim, heads * dim, query_slopes.data(), count, dim);
    }
  const int64_t kv_heads = heads / group;
  for (int64_t i = 0; i < s.keys; ++i)
    for (int at = 0; at < dim; at += 16) {
      const int64_t place = (source[s.offset + i] * kv_heads + kv_head) * dim + at;
      store(dk + place, load(dk + place) + load(&key_slopes[i * dim + at]));
      store(dv + place, load(dv + place) + load(&value_slopes[i * dim + at]));
    }
}

}  // namespace

extern "C" {

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
