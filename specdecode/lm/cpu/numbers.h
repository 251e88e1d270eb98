// The two types of numbers that models compute with, and what both kernel files do with them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float get(const float* from) { return *from; }

inline float get(const bfloat16* from) {
  const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void put(float* to, float value) { *to = value; }

inline void put(bfloat16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  to->bits = static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
}

template <typename T>
inline float rounded(float value) {
  T narrow;
  put(&narrow, value);
  return get(&narrow);
}

// e^x to 2 units in the last place; NaN stays NaN, and what is below the smallest normal number becomes it.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::nearbyint(x * 1.44269504088896f);
  float r = x - n * 0.693145751953125f;
  r = r - n * 1.42860682030941e-6f;
  float e = 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return e * scale;
}

inline bool is_finite(const float* x) {
  uint32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return (bits & 0x7F800000) != 0x7F800000;
}

inline bool is_finite(const bfloat16* x) { return (x->bits & 0x7F80) != 0x7F80; }

}  // namespace
