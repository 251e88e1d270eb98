// From logits to p and from p to tokens, a row at a time, each row in as few passes as it needs.
//
// The references are specdecode/sampling.py, specdecode/noise.py and specdecode/verification.py.

#include "rows.h"

namespace {

template <typename T>
void probabilities(const T* logits, int64_t rows, int64_t stride, int64_t size, const float* temperature,
                   const int64_t* top_k, const double* top_p, const float* min_p, float* p) {
#pragma omp parallel if (rows > 1)
  {
    std::vector<Entry> entries;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < rows; ++row) {
      const Truncation cut{top_k[row], top_p[row], min_p[row]};
      row_probabilities(logits + row * stride, size, temperature[row], cut, p + row * size, entries);
    }
  }
}

// Weights max(scale · p − q, 0) of one row, or p itself where nothing is left of them, in `weights`; their sums
// over pieces and the last that has any.
double residual_weights(const float* p, int64_t size, double scale, const int64_t* ids, const double* q,
                        int64_t support, double* weights) {
  for (int64_t i = 0; i < size; ++i) weights[i] = p[i] * scale;
  for (int64_t i = 0; i < support; ++i) weights[ids[i]] -= q[i];
  for (int64_t i = 0; i < support; ++i) weights[ids[i]] = std::max(weights[ids[i]], 0.0);
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) total += weights[i];
  return total;
}

// The first token whose cumulative weight exceeds u · total, never one of weight 0.
int64_t pick(const double* weights, int64_t size, double u) {
  std::vector<double> sums((size + PIECE - 1) / PIECE);
  double total = 0.0;
  for (size_t piece = 0; piece < sums.size(); ++piece) {
    const int64_t begin = piece * PIECE, end = std::min(begin + PIECE, size);
    double sum = 0.0;
    for (int64_t i = begin; i < end; ++i) sum += weights[i];
    total += sum;
    sums[piece] = total;
  }
  const double threshold = std::min(u * total, std::nextafter(total, 0.0));
  size_t piece = 0;
  while (piece + 1 < sums.size() && !(sums[piece] > threshold)) ++piece;
  const int64_t begin = piece * PIECE, end = std::min(begin + PIECE, size);
  const double base = piece == 0 ? 0.0 : sums[piece - 1];
  double sum = 0.0;
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (!(weights[i] > 0.0)) continue;
    last = i;
    sum += weights[i];
    if (base + sum > threshold) break;
  }
  return last;
}

void sample_residual(const float* p, int64_t size, const int64_t* rows, const double* scale, const int64_t* ids,
                     const double* q, int64_t support, const double* u, int64_t batch, int64_t* tokens) {
#pragma omp parallel if (batch > 1)
  {
    std::vector<double> weights(size);
#pragma omp for
    for (int64_t b = 0; b < batch; ++b) {
      const float* own = p + rows[b] * size;
      const double left =
          residual_weights(own, size, scale[b], ids + b * support, q + b * support, support, weights.data());
      // Rounding may leave nothing of a residual whose true mass is tiny; p is as good there.
      if (left == 0.0) residual_weights(own, size, 1.0, nullptr, nullptr, 0, weights.data());
      tokens[b] = pick(weights.data(), size, u[b]);
    }
  }
}

// argmin −log(u) / p over a row's support, the lowest id of equals. As 1 − u ≤ −log u, few tokens need the log.
int64_t race_winner(const float* p, int64_t size, uint64_t key) {
  double best = std::numeric_limits<double>::infinity(), limit = best;
  int64_t winner = size - 1;
  for (int64_t base = 0; base < size; base += PIECE) {
    const int64_t end = std::min(base + PIECE, size);
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = base; i < end; ++i) any |= p[i] > 0.0f;
    if (!any) continue;
    double u[PIECE];
    any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = base; i < end; ++i) {
      u[i - base] = uniform(key, i);
      any |= p[i] > 0.0f && 1.0 - u[i - base] <= limit * p[i];
    }
    if (!any) continue;
    for (int64_t i = base; i < end; ++i) {
      if (!(p[i] > 0.0f) || 1.0 - u[i - base] > limit * p[i]) continue;
      const double score = -portable_log(u[i - base]) / static_cast<double>(p[i]);
      if (score < best) best = score, limit = score * (1 + 1e-9), winner = i;
    }
  }
  return winner;
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                     \
  extern "C" void probabilities_##SUFFIX(const T* logits, int64_t rows, int64_t stride, int64_t size,         \
                                         const float* temperature, const int64_t* top_k, const double* top_p, \
                                         const float* min_p, float* p) {                                      \
    probabilities(logits, rows, stride, size, temperature, top_k, top_p, min_p, p);                           \
  }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)

extern "C" void residual_tokens(const float* p, int64_t size, const int64_t* rows, const double* scale,
                                const int64_t* ids, const double* q, int64_t support, const double* u,
                                int64_t batch, int64_t* tokens) {
  sample_residual(p, size, rows, scale, ids, q, support, u, batch, tokens);
}

extern "C" void coupled_tokens(const float* p, int64_t rows, int64_t size, const int64_t* keys,
                               int64_t* tokens) {
#pragma omp parallel for if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    tokens[row] = race_winner(p + row * size, size, static_cast<uint64_t>(keys[row]));
  }
}
