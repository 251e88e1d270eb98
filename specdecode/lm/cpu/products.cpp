// Matrix products in bfloat16 with weights laid out once, on tile registers (AMX) or on dot products of pairs
// (AVX-512 BF16). The reference is torch's linear.
//
// Weights lie in tiles: [out / 16][in / 32][16 pairs of inputs][16 outputs][2], so that each is read once, in
// order, and whole. A row is computed alone, in the same order of sums whatever is beside it.

#include "numbers.h"

#include <algorithm>
#include <atomic>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

constexpr int SIDE = 16;
constexpr int DEPTH = 32;

#ifdef HAS_TILES

// A tile holds 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3: sums of (rows, outputs); 4, 5: inputs; 6, 7: weights.
void shape_tiles(int first_rows, int second_rows) {
  TileShapes shapes;
  const int rows[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, SIDE, SIDE};
  for (int i = 0; i < 8; ++i) {
    shapes.bytes[i] = 64;
    shapes.rows[i] = static_cast<uint8_t>(rows[i] ? rows[i] : 1);
  }
  _tile_loadconfig(&shapes);
}

void put_sums(const float* sums, const bfloat16* bias, bfloat16* y, int rows, int columns, int64_t stride) {
  for (int r = 0; r < rows; ++r) {
    if (bias) {
      for (int c = 0; c < columns; ++c) put(y + r * stride + c, sums[r * SIDE + c] + get(bias + c));
    } else {
      for (int c = 0; c < columns; ++c) put(y + r * stride + c, sums[r * SIDE + c]);
    }
  }
}

// Up to 32 rows of inputs against 32 outputs.
void tile_product(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int first_rows,
                  int second_rows, int64_t in, int64_t out, int64_t column) {
  const int64_t tiles = in / DEPTH, tile = SIDE * DEPTH;
  const bool both = column + SIDE < out;
  const bfloat16* left = weight + column / SIDE * tiles * tile;
  const bfloat16* right = both ? left + tiles * tile : left;
  const int stride = static_cast<int>(in * sizeof(bfloat16));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < tiles; ++k) {
    _tile_loadd(6, left + k * tile, 64);
    _tile_loadd(7, right + k * tile, 64);
    _tile_loadd(4, x + k * DEPTH, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (second_rows) {
      _tile_loadd(5, x + SIDE * in + k * DEPTH, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][SIDE * SIDE];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (second_rows) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  for (int half = 0; half < (both ? 2 : 1); ++half) {
    const int64_t at = column + half * SIDE;
    const int columns = static_cast<int>(out - at < SIDE ? out - at : SIDE);
    const bfloat16* own = bias ? bias + at : nullptr;
    put_sums(sums[half], own, y + at, first_rows, columns, out);
    if (second_rows) put_sums(sums[2 + half], own, y + SIDE * out + at, second_rows, columns, out);
  }
}

void linear_on_tiles(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t rows,
                     int64_t in, int64_t out) {
#pragma omp parallel
  {
    int shaped = -1;
#pragma omp for schedule(static)
    for (int64_t column = 0; column < out; column += 2 * SIDE) {
      for (int64_t row = 0; row < rows; row += 2 * SIDE) {
        const int left = static_cast<int>(rows - row < 2 * SIDE ? rows - row : 2 * SIDE);
        const int first = left < SIDE ? left : SIDE;
        if (left != shaped) shape_tiles(first, left - first), shaped = left;
        tile_product(x + row * in, weight, bias, y + row * out, first, left - first, in, out, column);
      }
    }
    if (shaped >= 0) _tile_release();
  }
}

// Asks the system for tile registers.
bool may_use_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}

#endif

#ifdef HAS_PAIRS

// Rows and groups of 16 outputs whose sums fit into registers together.
constexpr int MOST_ROWS = 6, MOST_GROUPS = 4;

// ROWS rows of inputs against GROUPS groups of 16 outputs from `column` on.
template <int ROWS, int GROUPS>
void pair_product(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t in,
                  int64_t out, int64_t column) {
  const int64_t group = in * SIDE;
  const bfloat16* from = weight + column / SIDE * group;
  __m512 sums[ROWS][GROUPS];
  for (int r = 0; r < ROWS; ++r) {
    for (int g = 0; g < GROUPS; ++g) sums[r][g] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < in; k += 2) {
    __m512bh own[GROUPS];
    for (int g = 0; g < GROUPS; ++g) {
      own[g] = (__m512bh)_mm512_loadu_si512(from + g * group + k * SIDE);
    }
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * in + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int g = 0; g < GROUPS; ++g) sums[r][g] = _mm512_dpbf16_ps(sums[r][g], both, own[g]);
    }
  }
  for (int g = 0; g < GROUPS; ++g) {
    const int64_t at = column + g * SIDE;
    const int columns = static_cast<int>(out - at < SIDE ? out - at : SIDE);
    for (int r = 0; r < ROWS; ++r) {
      alignas(64) float row[SIDE];
      _mm512_store_ps(row, sums[r][g]);
      bfloat16* to = y + r * out + at;
      for (int c = 0; c < columns; ++c) put(to + c, bias ? row[c] + get(bias + at + c) : row[c]);
    }
  }
}

// All rows against GROUPS groups of outputs, which stay in the cache.
template <int GROUPS>
void pair_products(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t rows,
                   int64_t in, int64_t out, int64_t column) {
  for (int64_t row = 0; row < rows; row += MOST_ROWS) {
    const bfloat16* from = x + row * in;
    bfloat16* to = y + row * out;
    switch (rows - row) {
      case 1:
        pair_product<1, GROUPS>(from, weight, bias, to, in, out, column);
        break;
      case 2:
        pair_product<2, GROUPS>(from, weight, bias, to, in, out, column);
        break;
      case 3:
        pair_product<3, GROUPS>(from, weight, bias, to, in, out, column);
        break;
      case 4:
        pair_product<4, GROUPS>(from, weight, bias, to, in, out, column);
        break;
      case 5:
        pair_product<5, GROUPS>(from, weight, bias, to, in, out, column);
        break;
      default:
        pair_product<MOST_ROWS, GROUPS>(from, weight, bias, to, in, out, column);
    }
  }
}

// Groups that one thread has to do, from `next` to `end`; others take of them when they have done their own.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

constexpr int MOST_SHARES = 64;

void linear_on_pairs(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y, int64_t rows,
                     int64_t in, int64_t out) {
  const int64_t groups = (out + SIDE - 1) / SIDE;
  // Equal shares: a schedule by fours would leave a thread idle at the end. A thread that lost its core for
  // a while is helped by those that did not.
  Share shares[MOST_SHARES];
  int64_t count = 1;
#if defined(_OPENMP)
  count = std::min<int64_t>(omp_get_max_threads(), MOST_SHARES);
#endif
  for (int64_t i = 0; i < count; ++i) {
    shares[i].next.store(groups * i / count, std::memory_order_relaxed);
    shares[i].end = groups * (i + 1) / count;
  }
#pragma omp parallel
  {
    int64_t own = 0;
#if defined(_OPENMP)
    own = omp_get_thread_num();
#endif
    for (int64_t i = 0; i < count; ++i) {
      Share& share = shares[(own + i) % count];
      for (;;) {
        int64_t group = share.next.fetch_add(MOST_GROUPS, std::memory_order_relaxed);
        if (group >= share.end) break;
        if (group + MOST_GROUPS <= share.end) {
          pair_products<MOST_GROUPS>(x, weight, bias, y, rows, in, out, group * SIDE);
        } else {
          for (; group < share.end; ++group) pair_products<1>(x, weight, bias, y, rows, in, out, group * SIDE);
        }
      }
    }
  }
}

#endif

}  // namespace

// Whether `linear` can be had in this process.
extern "C" int has_linear() {
#ifdef HAS_TILES
  if (may_use_tiles()) return 1;
#endif
#ifdef HAS_PAIRS
  return 1;
#else
  return 0;
#endif
}

extern "C" void linear_bfloat16(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y,
                                int64_t rows, int64_t in, int64_t out) {
#ifdef HAS_TILES
  if (may_use_tiles()) return linear_on_tiles(x, weight, bias, y, rows, in, out);
#endif
#ifdef HAS_PAIRS
  linear_on_pairs(x, weight, bias, y, rows, in, out);
#endif
}
