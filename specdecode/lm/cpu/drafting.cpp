// One drafted token a row: p of a row of logits, its leading tokens as q, and a token of those, by a number u or,
// with the origin of a row's noise (seed, choice index, position), by a race.
//
// The references are draft_service/drawing.py, specdecode/sampling.py and specdecode/noise.py.

#include "rows.h"

namespace {

// The leading tokens of p that have mass, k at most, in order.
void keep_support(const float* p, int64_t size, int64_t k, std::vector<Entry>& entries) {
  float highest = 0.0f;
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < size; ++i) highest = p[i] > highest ? p[i] : highest;
  for (const float share : {1e-2f, 1e-4f, 1e-8f, 0.0f}) {
    const float cut = std::max(share * highest, std::numeric_limits<float>::denorm_min());
    gather(p, size, cut, entries);
    if (static_cast<int64_t>(entries.size()) >= k) break;
  }
  keep_leading(entries, k);
}

// The first of q whose cumulative mass exceeds u of the whole.
int64_t sampled(const float* q, int64_t count, double u) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += q[i];
  const double threshold = std::min(u * total, std::nextafter(total, 0.0));
  double sum = 0.0;
  int64_t index = 0;
  while (index + 1 < count && !((sum += q[index]) > threshold)) ++index;
  return index;
}

// argmin −log(u) / q, the lowest id of equals.
int64_t race_winner(const int32_t* ids, const float* q, int64_t count, uint64_t key) {
  double best = std::numeric_limits<double>::infinity();
  int64_t winner = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double score = -portable_log(uniform(key, ids[i])) / static_cast<double>(q[i]);
    if (score < best || (score == best && ids[i] < ids[winner])) best = score, winner = i;
  }
  return winner;
}

template <typename T>
void draft_tokens(const T* logits, int64_t rows, int64_t stride, int64_t size, const int64_t* column_ids,
                  const float* temperature, const int64_t* top_k, const double* top_p, const float* min_p,
                  int64_t k, const double* u, const int64_t* origins, int64_t* tokens, int32_t* ids, float* q,
                  int64_t* counts) {
#pragma omp parallel if (rows > 1)
  {
    std::vector<Entry> entries;
    std::vector<float> p(size);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < rows; ++row) {
      const Truncation cut{top_k[row], top_p[row], min_p[row]};
      row_probabilities(logits + row * stride, size, temperature[row], cut, p.data(), entries);
      entries.clear();
      if (p[0] == p[0]) keep_support(p.data(), size, k, entries);
      const int64_t count = counts[row] = static_cast<int64_t>(entries.size());
      if (count == 0) continue;
      double mass = 0.0;
      for (const Entry& entry : entries) mass += entry.value;
      int32_t* own_ids = ids + row * k;
      float* own_q = q + row * k;
      for (int64_t i = 0; i < count; ++i) {
        own_ids[i] = column_ids ? static_cast<int32_t>(column_ids[entries[i].id]) : entries[i].id;
        own_q[i] = static_cast<float>(entries[i].value / mass);
      }
      const int64_t index = origins ? race_winner(own_ids, own_q, count, row_key(origins + 3 * row))
                                 : sampled(own_q, count, u[row]);
      tokens[row] = own_ids[index];
    }
  }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                     \
  extern "C" void draft_tokens_##SUFFIX(const T* logits, int64_t rows, int64_t stride, int64_t size,          \
                                        const int64_t* column_ids, const float* temperature,                  \
                                        const int64_t* top_k, const double* top_p, const float* min_p,        \
                                        int64_t k, const double* u, const int64_t* origins, int64_t* tokens,  \
                                        int32_t* ids, float* q, int64_t* counts) {                            \
    draft_tokens(logits, rows, stride, size, column_ids, temperature, top_k, top_p, min_p, k, u, origins,        \
                 tokens, ids, q, counts);                                                                     \
  }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
