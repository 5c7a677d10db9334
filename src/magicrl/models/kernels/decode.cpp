// Attention of a decoding step: one new token for each row, over the blocks of a cache, in bfloat16 or float32. Each query
// meets its keys chunk by chunk, with the same operations whatever is computed beside it. Whole sequences do the same, so
// that exact mode has equal bits in both.

#include "decode_tiles.h"
#include "parts.h"
#include "row.h"

namespace {

constexpr int TILE = REGISTERS > 16 ? 4 : 3;  // queries that meet them together
constexpr int BLOCK = 32;  // positions of a sequence whose queries are computed together

// Queries that meet keys in vectors.
template <class T>
struct Queries : Seen<T> {
  using Base = Seen<T>;
  using Base::dim, Base::words, Base::scale, Base::q, Base::seen, Base::most, Base::total;
  static constexpr bool WIDE = sizeof(T) == sizeof(float);
  static constexpr bool TURNS = !WIDE || REGISTERS > 16;  // the keys, so that no sum of a score runs across a vector
  Table<uint32_t> keys;                  // [words, CHUNK]
  const T* plain = nullptr;              // [keys, dim], the chunk as it lies in memory
  const T *next = nullptr, *behind = nullptr;  // the next head's keys, or the next row's: they lie behind this one's
  float scores[TILE * CHUNK];
  T weights[TILE * CHUNK];

  Queries(int count, int width, float scaling) : Base(count, width, scaling), keys(words * CHUNK) {}

  void turn(const T* k, const T* v, int count) {
    plain = k;
    for (int key = 0; key < count; key += 16) {
      for (int i = 0; i < 16; ++i) fetch(v + int64_t(key + i) * dim);  // arrives while scores are computed
      if constexpr (TURNS) turned(&keys[key], CHUNK, k + int64_t(key) * dim, dim, count - key, words);
    }
  }

  // `sum` plus the products of a word of each of 16 keys and a query's word.
  static Floats product(Floats sum, Bits some, int word) {
    const Bits query = all_bits(word);
    if constexpr (WIDE) return fma(as_floats(some), as_floats(query), sum);
    else return add_pairs(sum, some, query);
  }

  template <int N>
  void score(int first, int count) {
    if constexpr (!TURNS) {
      for (int key = 0; key < count; key += 8)
        for (int i = 0; i < N; ++i)
          dot_products(&scores[i * CHUNK + key], &q[(first + i) * dim], plain + int64_t(key) * dim, dim, count - key,
                       scale);
      return;
    }
    for (int key = 0; key < count; key += 32) {  // two vectors: enough sums that do not wait for each other
      Floats sum[N][2] = {};
      for (int word = 0; word < words; ++word) {
        const Bits left = load_bits(&keys[word * CHUNK + key]);
        const Bits right = load_bits(&keys[word * CHUNK + key + 16]);
        for (int i = 0; i < N; ++i) {
          const int query = ((const int*)&q[(first + i) * dim])[word];
          sum[i][0] = product(sum[i][0], left, query);
          sum[i][1] = product(sum[i][1], right, query);
        }
      }
      for (int i = 0; i < N; ++i)
        for (int half = 0; half < 2; ++half)
          store(&scores[i * CHUNK + key + 16 * half], sum[i][half] * all(scale));
    }
  }

  void weigh(int place, int query, int count) {
    const float* from = &scores[place * CHUNK];
    const auto present = [&](int key) { return lanes(count - key); };
    Floats top = all(most[query]), sum = all(0);
    for (int key = 0; key < count; key += 16)
      top = choose(present(key), larger(top, load(from + key)), top);
    const Floats now = all(largest_of(top));
    const Floats before = exponential(all(most[query]) - now);
    for (int key = 0; key < count; key += 16) {
      const Floats w = keep(present(key), exponential(load(from + key) - now));
      sum = sum + w;
      store(&weights[place * CHUNK + key], w);
    }
    most[query] = first_of(now);
    total[query] = total[query] * first_of(before) + sum_of(sum);
    for (int i = 0; i < dim; i += 16) {
      float* place = &seen[query * dim + i];
      store(place, load(place) * before);
    }
  }

  template <int N>
  void add(int first, const T* v, int count) {
    for (int i = 0; i < dim; i += 32) {
      Floats sum[N][2];
      for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half) sum[n][half] = load(&seen[(first + n) * dim + i + 16 * half]);
      for (int key = 0; key < count; key += WIDE ? 1 : 2) {
        const T* value = v + int64_t(key) * dim + i;
        Bits low = load_bits(value), high;
        if constexpr (WIDE) {
          high = load_bits(value + 16);
        } else {
          const Bits odd = load_bits(key + 1 < count ? value + dim : value);  // weight 0 behind the last
          high = pair_second_fours(low, odd);
          low = pair_first_fours(low, odd);
        }
        for (int n = 0; n < N; ++n) {
          const int weight = ((const int*)&weights[n * CHUNK])[WIDE ? key : key / 2];
          sum[n][0] = product(sum[n][0], low, weight);
          sum[n][1] = product(sum[n][1], high, weight);
        }
      }
      for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half) store(&seen[(first + n) * dim + i + 16 * half], sum[n][half]);
    }
  }

  // A row on its way from memory into the second cache, which waits for more reads at once than the first.
  void fetch(const T* row) const {
    for (int i = 0; i < dim; i += 64 / int(sizeof(T))) _mm_prefetch((const char*)(row + i), _MM_HINT_T1);
  }

  template <int N>
  void tile(int first, const T* v, int count) {
    score<N>(first, count);
    for (int n = 0; n < N; ++n) {
      // a part of them at a time, while there is something to compute: few reads may be on their way at once
      for (int i = 0; i < (count + N - 1) / N && next < behind; ++i, next += dim) fetch(next);
      weigh(n, first + n, count);
    }
    add<N>(first, v, count);
  }

  // Queries [first, last) meet the chunk of keys that was turned last.
  void tiles(int first, int last, const T* v, int count) {
    for (; first + TILE <= last; first += TILE) tile<TILE>(first, v, count);
    if constexpr (TILE > 3)
      if (last - first == 3) tile<3>(first, v, count);
    if (last - first == 2) tile<2>(first, v, count);
    if (last - first == 1) tile<1>(first, v, count);
  }

  void turn(int, int) {}

  void write(int query, T* out) const {
    const Floats sum = all(total[query]);
    for (int i = 0; i < dim; i += 32) {
      Floats first = load(&seen[query * dim + i]), second = load(&seen[query * dim + i + 16]);
      if constexpr (!WIDE) in_order(first, second);
      store(out + i, first / sum);
      store(out + i + 16, second / sum);
    }
  }

  // Queries [first, last) meet a chunk of `whole` keys, of which query i sees the first `seen_by(i)`.
  template <class SeenBy>
  void see(int first, int last, const T* k, const T* v, int whole, const SeenBy& seen_by) {
    turn(k, v, whole);
    next = behind = nullptr;
    for (; first < last && seen_by(first) < whole; ++first)
      if (seen_by(first) > 0) tiles(first, first + 1, v, seen_by(first));
    tiles(first, last, v, whole);
  }

  // Queries [first, last) meet the first `length` tokens of a sequence, which begins at `offset` in every block.
  void meet(int first, int last, const T* const* k, const T* const* v, int64_t width, int64_t offset,
            int64_t length) {
    for (int64_t start = 0; start < length; start += width, ++k, ++v)
      for (int64_t at = 0; at < std::min(width, length - start); at += CHUNK) {
        const int count = int(std::min({int64_t(CHUNK), width - at, length - start - at}));
        const T *keys = *k + (offset * width + at) * dim, *values = *v + (offset * width + at) * dim;
        turn(keys, values, count);
        next = keys + width * dim;
        behind = next + int64_t(count) * dim;
        tiles(first, last, values, count);
      }
  }
};

template <class Run>
void with_queries(int wide, const Run& run) {
  if (wide) run((Queries<float>*)nullptr);
#ifdef __AMX_BF16__
  else if (has_tiles()) run((TileQueries*)nullptr);
#endif
  else run((Queries<bf16>*)nullptr);
}

}  // namespace

extern "C" {

// One new token for each row. `parts` are pairs of bounds in `order`: rows of one prompt, by which work is shared out.
// All numbers are float32 if `wide`, else bfloat16.
void attend(int wide, void* out, const void* q, int64_t q_row, const void* k, const void* v, int64_t k_row,
            int64_t v_row, const void* prompt_k, const void* prompt_v, int64_t prompt_width, const void* response_k,
            const void* response_v, int64_t response_width, const int64_t* order, const int64_t* parts,
            int64_t part_count, int64_t most_rows, const int64_t* owners, const int64_t* prompt_lengths,
            const int64_t* held, int64_t kv_heads, int64_t group, int64_t dim, float scale, int threads) {
  with_queries(wide, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    using T = typename Kind::Number;
    const auto *prompt_keys = (const T* const*)prompt_k, *prompt_values = (const T* const*)prompt_v;
    const auto *keys = (T* const*)response_k, *values = (T* const*)response_v;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Kind queries(int(most_rows * kv_heads * group), int(dim), scale);
#pragma omp for schedule(dynamic)
      for (int64_t part = 0; part < part_count; ++part) {
        const int64_t* rows = order + parts[2 * part];
        const int64_t count = parts[2 * part + 1] - parts[2 * part];
        const auto place = [&](int64_t head, int64_t i) { return int((head * count + i) * group); };
        queries.begin();
        // heads change fastest: memory is read in the order in which it lies
        for (int64_t head = 0; head < kv_heads; ++head) {
          for (int64_t i = 0; i < count; ++i)
            std::memcpy(&queries.q[place(head, i) * dim], (const T*)q + rows[i] * q_row + head * group * dim,
                        group * dim * sizeof(T));
          queries.meet(place(head, 0), place(head, count), prompt_keys, prompt_values, prompt_width,
                       owners[rows[0]] * kv_heads + head, prompt_lengths[rows[0]]);
        }
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = rows[i], block = held[row] / response_width, last = held[row] % response_width;
          for (int64_t head = 0; head < kv_heads; ++head) {
            const int64_t offset = row * kv_heads + head, end = (offset * response_width + last) * dim;
            std::memcpy(keys[block] + end, (const T*)k + row * k_row + head * dim, dim * sizeof(T));
            std::memcpy(values[block] + end, (const T*)v + row * v_row + head * dim, dim * sizeof(T));
            queries.meet(place(head, i), place(head, i) + int(group), keys, values, response_width, offset,
                         held[row] + 1);
            for (int64_t j = 0; j < group; ++j)
              queries.write(place(head, i) + int(j), (T*)out + (offset * group + j) * dim);
          }
        }
      }
    }
  });
}

// Causal attention over the sequences of a row, with the bits that `attend` has for each of their tokens. The arguments are
// those of `attend_row` in `rows.cpp`, in float32 if `wide`.
void attend_row_exactly(int wide, void* out, float* log_sums, const void* q, int64_t q_row, int64_t q_head, const void* k,
                        int64_t k_row, int64_t k_head, const void* v, int64_t v_row, int64_t v_head,
                        const int64_t* sequences, const int64_t* source, int64_t count, int64_t kv_heads, int64_t group,
                        int64_t dim, float scale, int threads) {
  with_queries(wide, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    using T = typename Kind::Number;
    const View<T> asked{(const T*)q, q_row, q_head};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Kind queries(int(BLOCK * group), int(dim), scale);
      Table<T> keys, values;
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t sequence = 0; sequence < count; ++sequence)
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
          const Sequence& s = ((const Sequence*)sequences)[sequence];
          keys.resize(s.keys * dim), values.resize(s.keys * dim);
          s.gather(keys.data(), {(const T*)k, k_row, k_head}, source, kv_head, dim);
          s.gather(values.data(), {(const T*)v, v_row, v_head}, source, kv_head, dim);
          for (int64_t begin = 0; begin < s.queries; begin += BLOCK) {
            const int64_t end = std::min(s.queries, begin + BLOCK);
            const int some = int((end - begin) * group);
            const auto token = [&](int query) { return s.first + begin + query / group; };
            const auto head = [&](int query) { return kv_head * group + query % group; };
            queries.begin();
            for (int query = 0; query < some; ++query)
              std::memcpy(&queries.q[query * dim], asked.at(token(query), head(query)), dim * sizeof(T));
            queries.turn(0, some);
            for (int64_t at = 0; at < s.reach(end); at += CHUNK) {
              const int whole = int(std::min(int64_t(CHUNK), s.keys - at));
              queries.see(0, some, &keys[at * dim], &values[at * dim], whole, [&](int64_t query) {
                return int(std::clamp<int64_t>(s.reach(begin + query / group + 1) - at, 0, whole));
              });
            }
            for (int query = 0; query < some; ++query) {
              const int64_t place = token(query) * kv_heads * group + head(query);
              queries.write(query, (T*)out + place * dim);
              log_sums[place] = queries.most[query] + std::log(queries.total[query]);
            }
          }
        }
    }
  });
}
}
