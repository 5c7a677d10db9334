// Products on AMX tiles, for processors that have them and systems that allow their registers.

#pragma once

#include "vectors.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int SIDE = 16;  // rows of a tile, and words of one of its rows

inline int64_t whole_tiles(int64_t count) { return (count + SIDE - 1) / SIDE * SIDE; }

// What a product does meanwhile: it is called QUARTERS times for each step of 16 pairs, with the number of the call.
constexpr int QUARTERS = 4;
struct Nothing {
  void operator()(int) const {}
};

// Operands, as tiles of SIDE rows and words, two for each step: of a left one below each other, of a right one side by
// side. Rows of words as they lie, or tiles one after the other.
struct LeftRows {
  const uint32_t* first;
  int64_t row;
  const uint32_t* tile(int step, int half) const { return first + half * SIDE * row + step * SIDE; }
  int64_t bytes() const { return 4 * row; }
};
struct RightRows {
  const uint32_t* first;
  int64_t row;
  const uint32_t* tile(int step, int half) const { return first + step * SIDE * row + half * SIDE; }
  int64_t bytes() const { return 4 * row; }
};
struct TilesInOrder {
  const uint32_t* first;
  const uint32_t* tile(int step, int half) const { return first + (2 * step + half) * SIDE * SIDE; }
  int64_t bytes() const { return 4 * SIDE; }
};

#ifdef __AMX_BF16__

// Linux gives a process tile registers on request, for all of its threads.
inline bool has_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

// Eight tiles of 16 rows for the life of an object. oneDNN remembers what it configured in this thread, so that is
// put back.
class Tiles {
 public:
  Tiles() {
    if (!has_tiles()) return;
    _tile_storeconfig(before_);
    for (int tile = 0; tile < 8; ++tile) {
      own_[16 + 2 * tile] = 64;  // bytes of a row
      own_[48 + tile] = SIDE;
    }
    configure();
  }

  // Rows of tiles 2, 3 and 7: a product takes as long as its left operand has rows. All tiles become 0.
  void set_rows(int rows) {
    if (own_[48 + 7] == rows) return;
    for (int tile : {2, 3, 7}) own_[48 + tile] = uint8_t(rows);
    configure();
  }
  ~Tiles() {
    if (!has_tiles()) return;
    asm volatile("" ::"r"(before_) : "memory");
    if (before_[0])
      _tile_loadconfig(before_);
    else
      _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  void configure() const {
    asm volatile("" ::"r"(own_) : "memory");  // GCC takes the next instruction to read 8 bytes
    _tile_loadconfig(own_);
  }

  alignas(64) uint8_t before_[64];
  alignas(64) uint8_t own_[64] = {1};  // the palette
};

// Compilers do not know that tiles read memory.
inline void written_before() { asm volatile("" ::: "memory"); }

// c = a b, or c += a b, of float32 [16 I, 32] for I in {1, 2}, in whole tiles. `meanwhile` runs between the products: tiles
// are multiplied beside other instructions, and what those fetch at once would keep the next tile waiting.
template <int I, class Left, class Right, class Meanwhile = Nothing>
inline void tile_product(float* c, int64_t c_row, const Left& a, const Right& b, int pairs, bool add,
                         const Meanwhile& meanwhile = {}) {
  const int64_t c_bytes = 4 * c_row;
  float* below = c + SIDE * c_row;
  written_before();
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + SIDE, c_bytes);
    if (I == 2) _tile_loadd(2, below, c_bytes);
    if (I == 2) _tile_loadd(3, below + SIDE, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (I == 2) _tile_zero(2);
    if (I == 2) _tile_zero(3);
  }
  for (int step = 0; step < pairs / SIDE; ++step) {
    _tile_loadd(6, b.tile(step, 0), b.bytes());
    _tile_loadd(4, a.tile(step, 0), a.bytes());
    _tile_dpbf16ps(0, 4, 6);
    meanwhile(QUARTERS * step);
    if (I == 2) {
      _tile_loadd(5, a.tile(step, 1), a.bytes());
      _tile_dpbf16ps(2, 5, 6);
    }
    meanwhile(QUARTERS * step + 1);
    _tile_loadd(7, b.tile(step, 1), b.bytes());
    _tile_dpbf16ps(1, 4, 7);
    meanwhile(QUARTERS * step + 2);
    if (I == 2) _tile_dpbf16ps(3, 5, 7);
    meanwhile(QUARTERS * step + 3);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + SIDE, c_bytes);
  if (I == 2) _tile_stored(2, below, c_bytes);
  if (I == 2) _tile_stored(3, below + SIDE, c_bytes);
}

#else

inline bool has_tiles() { return false; }
class Tiles {
 public:
  Tiles() {}
};
template <int I, class Left, class Right, class Meanwhile = Nothing>
inline void tile_product(float*, int64_t, const Left&, const Right&, int, bool, const Meanwhile& = {}) {}

#endif

}  // namespace
