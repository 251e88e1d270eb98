// One row of logits to p, and the noise of one row: what target and draft have in common.
//
// Compiled without reordering or fusing of operations: the noise must be the same bits as everywhere else.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

constexpr float NAN_FLOAT = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t PIECE = 64;

struct Entry {
  float value;
  int32_t id;
};

// By value, the lowest id first among equals.
inline bool leads(const Entry& a, const Entry& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// All entries of a row that are at least `cut`, in order of their ids.
template <typename T>
void gather(const T* x, int64_t size, float cut, std::vector<Entry>& entries) {
  entries.clear();
  for (int64_t base = 0; base < size; base += PIECE) {
    const int64_t end = std::min(base + PIECE, size);
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = base; i < end; ++i) any |= get(x + i) >= cut;
    if (!any) continue;
    for (int64_t i = base; i < end; ++i) {
      if (get(x + i) >= cut) entries.push_back({get(x + i), static_cast<int32_t>(i)});
    }
  }
}

// The leading k of `entries`, in order.
void keep_leading(std::vector<Entry>& entries, int64_t k) {
  if (k < static_cast<int64_t>(entries.size())) {
    std::nth_element(entries.begin(), entries.begin() + k, entries.end(), leads);
    entries.resize(k);
  }
  std::sort(entries.begin(), entries.end(), leads);
}

struct Truncation {
  int64_t top_k;  // 0: off
  double top_p;   // infinite: off
  float min_p;    // 0: off
};

// How far below the highest logit, in units of the temperature, to look for the survivors: as little as is
// enough, as what is found has to be sorted.
constexpr float REACHES[] = {2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 10.0f, 12.0f, 16.0f, INFINITY};

// The leading entries among which all survivors of top-k or top-p are, in order. `e` has the exponentials.
template <typename T>
void find_leading(const T* x, const float* e, int64_t size, float highest, float temperature, double total,
                  const Truncation& cut, std::vector<Entry>& entries) {
  float lowest = -INFINITY;
  for (const float reach : REACHES) {
    lowest = std::isinf(reach) ? -INFINITY : highest - reach * temperature;
    double mass = 0.0;
    int64_t count = 0;
#pragma omp simd reduction(+ : mass, count)
    for (int64_t i = 0; i < size; ++i) {
      const bool within = get(x + i) >= lowest;
      mass += within ? e[i] : 0.0f;
      count += within;
    }
    if (cut.top_k > 0 ? count >= cut.top_k : mass >= cut.top_p * total) break;
  }
  gather(x, size, lowest, entries);
  keep_leading(entries, cut.top_k > 0 ? cut.top_k : static_cast<int64_t>(entries.size()));
}

// Top-p and min-p on leading entries: how many survive. A token survives top-p iff the mass before it is below
// top_p, so the first always does.
int64_t count_survivors(const std::vector<Entry>& entries, const float* e, double total, const Truncation& cut) {
  double before = 0.0;
  int64_t count = 0;
  for (const Entry& entry : entries) {
    const double mass = e[entry.id] / total;
    if (count > 0 && (before >= cut.top_p || e[entry.id] < cut.min_p * e[entries[0].id])) break;
    before += mass;
    ++count;
  }
  return count;
}

template <typename T>
void row_probabilities(const T* x, int64_t size, float temperature, const Truncation& cut, float* p,
                       std::vector<Entry>& entries) {
  float highest = -INFINITY;
  int broken = 0;
#pragma omp simd reduction(max : highest) reduction(| : broken)
  for (int64_t i = 0; i < size; ++i) {
    const float value = get(x + i);
    highest = value > highest ? value : highest;
    broken |= value != value;
  }
  if (broken || !is_finite(&highest)) {
    std::fill(p, p + size, NAN_FLOAT);
    return;
  }
  if (temperature == 0.0f) {
    std::fill(p, p + size, 0.0f);
    int64_t best = 0;
    while (get(x + best) != highest) ++best;
    p[best] = 1.0f;
    return;
  }
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = (get(x + i) - highest) / temperature;
    const float e = scaled < -87.0f ? 0.0f : exponential(scaled);
    p[i] = e;
    total += e;
  }
  const bool has_top_k = cut.top_k > 0 && cut.top_k < size;
  if (has_top_k || !std::isinf(cut.top_p)) {
    const Truncation own{has_top_k ? cut.top_k : 0, cut.top_p, cut.min_p};
    find_leading(x, p, size, highest, temperature, total, own, entries);
    double mass = total;
    if (has_top_k) {
      mass = 0.0;
      for (const Entry& entry : entries) mass += p[entry.id];
    }
    entries.resize(count_survivors(entries, p, mass, own));
    double kept = 0.0;
    for (Entry& entry : entries) {
      entry.value = p[entry.id];
      kept += entry.value;
    }
    std::fill(p, p + size, 0.0f);
    for (const Entry& entry : entries) p[entry.id] = static_cast<float>(entry.value / kept);
    return;
  }
  if (cut.min_p > 0.0f) {
    total = 0.0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) {
      p[i] = p[i] < cut.min_p ? 0.0f : p[i];  // the highest one's exponential is 1
      total += p[i];
    }
  }
  const float scale = static_cast<float>(1.0 / total);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) p[i] *= scale;
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * MIX_1;
  z = (z ^ (z >> 27)) * MIX_2;
  return z ^ (z >> 31);
}

// The state of a row's noise: seed, choice index and position of its token.
inline uint64_t row_key(const int64_t* origin) {
  uint64_t key = mixed(static_cast<uint64_t>(origin[0]) + GOLDEN);
  key = mixed(key + (static_cast<uint64_t>(origin[1]) + 1) * GOLDEN);
  return mixed(key + (static_cast<uint64_t>(origin[2]) + 1) * GOLDEN);
}

inline double uniform(uint64_t key, uint64_t token) {
  const uint64_t z = mixed((token + 1) * GOLDEN + key);
  return (static_cast<double>(static_cast<int64_t>(z >> 12)) + 0.5) * 0x1p-52;
}

// As portable_log in specdecode/noise.py, operation by operation.
double portable_log(double u) {
  int exponent;
  double mantissa = std::frexp(u, &exponent);
  const bool low = mantissa < 0.7071067811865476;
  if (low) mantissa *= 2;
  const double k = static_cast<double>(exponent) - (low ? 1.0 : 0.0);
  const double s = (mantissa - 1) / (mantissa + 1);
  const double z = s * s;
  double series = 2.0 / 23;
  for (int n = 10; n >= 0; --n) series = series * z + 2.0 / (2 * n + 1);
  return k * 6.93147180369123816490e-01 + (s * series + k * 1.90821492927058770002e-10);
}

}  // namespace
