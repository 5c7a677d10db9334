// A row of sequences, as attention reads it.

#pragma once

#include "vectors.h"

namespace {

// Numbers [tokens, heads, dim] with the last axis contiguous.
template <class T>
struct View {
  const T* data;
  int64_t row, head;
  const T* at(int64_t token, int64_t which) const { return data + token * row + which * head; }
};

// A sequence as the caller's table has it: its queries are those of the last keys.
struct Sequence {
  int64_t first, queries, offset, keys;  // its first query in the row; where its keys stand in `source`

  // keys that the queries before `end` see
  int64_t reach(int64_t end) const { return std::min(keys, keys - queries + end); }

  // A head's keys or values, one after the other.
  template <class T>
  void gather(T* to, const View<T>& x, const int64_t* source, int64_t head, int64_t dim) const {
    for (int64_t i = 0; i < keys; ++i) std::memcpy(to + i * dim, x.at(source[offset + i], head), dim * sizeof(T));
  }
};

}  // namespace
