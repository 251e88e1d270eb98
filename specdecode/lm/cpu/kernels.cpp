// What a step on a CPU spends its time in besides matrix products, for float32 and bfloat16.
//
// Every function is the kernel of a reference in torch, which the tests compare it with. Sums are float32; rows
// and sequences are computed alone, so that nothing depends on what else is in the batch. NaN goes in and comes
// out. Built by specdecode/lm/cpu/build.py without headers of torch: tensors come as pointers and sizes.

#include "numbers.h"

namespace {

// Fewer numbers than this are not worth a second thread.
constexpr int64_t PARALLEL_NUMBERS = 16384;
// Queries whose sums fit into the first-level cache together.
constexpr int TILE = 12;
constexpr int MAX_DIM = 256;
constexpr int MAX_BLOCK = 64;

template <typename T>
void rms_norm(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float epsilon) {
#pragma omp parallel for if (rows > 1 && rows * size > PARALLEL_NUMBERS)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * size;
    T* out = y + row * size;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += get(in + i) * get(in + i);
    const float scale = 1.0f / std::sqrt(sum / size + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) put(out + i, get(weight + i) * rounded<T>(get(in + i) * scale));
  }
}

// The sum of x and what a layer adds to it, in place of x, and its norm.
template <typename T>
void add_rms_norm(T* x, const T* added, const T* weight, T* y, int64_t rows, int64_t size, float epsilon) {
#pragma omp parallel for if (rows > 1 && rows * size > PARALLEL_NUMBERS)
  for (int64_t row = 0; row < rows; ++row) {
    T* in = x + row * size;
    const T* more = added + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) put(in + i, get(in + i) + get(more + i));
    rms_norm(in, weight, y + row * size, 1, size, epsilon);
  }
}

template <typename T>
void silu_product(const T* gate_up, T* y, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 1 && rows * size > PARALLEL_NUMBERS)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * size;
    const T* up = gate + size;
    T* out = y + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float g = get(gate + i);
      put(out + i, rounded<T>(g / (1.0f + exponential(-g))) * get(up + i));
    }
  }
}

template <typename T>
void rotate(const T* in, const T* cosine, const T* sine, T* out, int dim, int rotated) {
  const int half = rotated / 2;
#pragma omp simd
  for (int i = 0; i < half; ++i) {
    const float first = get(in + i), second = get(in + half + i);
    put(out + i, first * get(cosine + i) - second * get(sine + i));
    put(out + half + i, second * get(cosine + half + i) + first * get(sine + half + i));
  }
  for (int i = rotated; i < dim; ++i) out[i] = in[i];
}

template <typename T>
void rotate_and_store(const T* qkv, const T* cosine, const T* sine, const int64_t* slots, T* query, T* keys,
                      T* values, int64_t tokens, int heads, int kv_heads, int dim, int rotated) {
  const int64_t width = static_cast<int64_t>(heads + 2 * kv_heads) * dim;
#pragma omp parallel for if (tokens > 1 && tokens * width > PARALLEL_NUMBERS)
  for (int64_t t = 0; t < tokens; ++t) {
    const T* in = qkv + t * width;
    const T *c = cosine + t * rotated, *s = sine + t * rotated;
    for (int h = 0; h < heads; ++h) rotate(in + h * dim, c, s, query + (t * heads + h) * dim, dim, rotated);
    in += static_cast<int64_t>(heads) * dim;
    T* key = keys + slots[t] * kv_heads * dim;
    for (int h = 0; h < kv_heads; ++h) rotate(in + h * dim, c, s, key + h * dim, dim, rotated);
    in += static_cast<int64_t>(kv_heads) * dim;
    std::memcpy(values + slots[t] * kv_heads * dim, in, sizeof(T) * kv_heads * dim);
  }
}

struct Span {
  int32_t first, start, count, table;
};

struct Shape {
  int heads, kv_heads, dim, block_size;
  float scale, softcap;
  int window;
};

// One tile of a span's queries that share a KV head: softmax over the blocks in turn, rescaled as it goes
// (Milakov and Gimelshein 2018).
template <typename T, int FIXED_DIM>
void attend_tile(const T* query, const T* keys, const T* values, T* output, const Span& span,
                 const int32_t* table, const Shape& shape, int kv_head, int begin, int end) {
  constexpr int STRIDE = FIXED_DIM ? FIXED_DIM : MAX_DIM;
  const int dim = FIXED_DIM ? FIXED_DIM : shape.dim;
  const int repeat = shape.heads / shape.kv_heads, size = shape.block_size;
  alignas(64) float q[TILE][STRIDE], sum[TILE][STRIDE], key[MAX_BLOCK][STRIDE], value[MAX_BLOCK][STRIDE];
  float highest[TILE], mass[TILE];
  for (int i = begin; i < end; ++i) {
    const int64_t token = span.first + i / repeat;
    const T* from = query + (token * shape.heads + kv_head * repeat + i % repeat) * dim;
    for (int d = 0; d < dim; ++d) q[i - begin][d] = get(from + d), sum[i - begin][d] = 0.0f;
    highest[i - begin] = -INFINITY;
    mass[i - begin] = 0.0f;
  }
  const int oldest = span.start + begin / repeat, newest = span.start + (end - 1) / repeat;
  const int from_key = shape.window > 0 && oldest - shape.window + 1 > 0 ? oldest - shape.window + 1 : 0;
  for (int block = from_key / size; block <= newest / size; ++block) {
    const int base = block * size;
    const int count = newest + 1 - base < size ? newest + 1 - base : size;
    const int64_t slot = static_cast<int64_t>(table[block]) * size;
    for (int j = 0; j < count; ++j) {
      const int64_t at = ((slot + j) * shape.kv_heads + kv_head) * dim;
      for (int d = 0; d < dim; ++d) key[j][d] = get(keys + at + d), value[j][d] = get(values + at + d);
    }
    for (int i = begin; i < end; ++i) {
      const int row = i - begin, position = span.start + i / repeat;
      const int high = position + 1 - base < count ? position + 1 - base : count;
      int low = shape.window > 0 ? position - shape.window + 1 - base : 0;
      low = low > 0 ? low : 0;
      if (high <= low) continue;
      float score[MAX_BLOCK];
      float best = highest[row];
      for (int j = low; j < high; ++j) {
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int d = 0; d < dim; ++d) dot += q[row][d] * key[j][d];
        dot *= shape.scale;
        if (shape.softcap > 0.0f) dot = std::tanh(dot / shape.softcap) * shape.softcap;
        score[j] = dot;
        best = dot > best ? dot : best;
      }
      const float shrink = exponential(highest[row] - best);
      if (best != highest[row]) {
        mass[row] *= shrink;
#pragma omp simd
        for (int d = 0; d < dim; ++d) sum[row][d] *= shrink;
        highest[row] = best;
      }
#pragma omp simd
      for (int j = low; j < high; ++j) score[j] = exponential(score[j] - best);
      for (int j = low; j < high; ++j) {
        mass[row] += score[j];
#pragma omp simd
        for (int d = 0; d < dim; ++d) sum[row][d] += score[j] * value[j][d];
      }
    }
  }
  for (int i = begin; i < end; ++i) {
    const int64_t token = span.first + i / repeat;
    T* to = output + (token * shape.heads + kv_head * repeat + i % repeat) * dim;
    const float inverse = 1.0f / mass[i - begin];
    for (int d = 0; d < dim; ++d) put(to + d, sum[i - begin][d] * inverse);
  }
}

template <typename T>
void attend(const T* query, const T* keys, const T* values, T* output, const Span* spans, int64_t num_spans,
            const int32_t* tables, const Shape& shape) {
  const int repeat = shape.heads / shape.kv_heads;
  // Query and key pairs, as many as a second thread is worth.
  int64_t pairs = 0;
  for (int64_t s = 0; s < num_spans; ++s) pairs += spans[s].count * (spans[s].start + spans[s].count);
#pragma omp parallel for collapse(2) schedule(dynamic) if (pairs * shape.heads * shape.dim > 8 * PARALLEL_NUMBERS)
  for (int64_t s = 0; s < num_spans; ++s) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      const Span& span = spans[s];
      const int queries = span.count * repeat;
      for (int begin = 0; begin < queries; begin += TILE) {
        const int end = begin + TILE < queries ? begin + TILE : queries;
        const int32_t* table = tables + span.table;
        switch (shape.dim) {
          case 64:
            attend_tile<T, 64>(query, keys, values, output, span, table, shape, head, begin, end);
            break;
          case 128:
            attend_tile<T, 128>(query, keys, values, output, span, table, shape, head, begin, end);
            break;
          default:
            attend_tile<T, 0>(query, keys, values, output, span, table, shape, head, begin, end);
        }
      }
    }
  }
}

template <typename T>
void best_tokens(const T* logits, int64_t rows, int64_t stride, int64_t size, int64_t* best, uint8_t* finite) {
#pragma omp parallel for if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = logits + row * stride;
    float highest = -INFINITY;
    int broken = 0;
#pragma omp simd reduction(max : highest) reduction(| : broken)
    for (int64_t i = 0; i < size; ++i) {
      const float value = get(in + i);
      highest = value > highest ? value : highest;
      broken |= !is_finite(in + i);
    }
    int64_t index = 0;
    while (index + 1 < size && get(in + index) != highest) ++index;
    best[row] = index;
    finite[row] = !broken;
  }
}

// Columns of a reduced head to where their ids belong, and minus infinity everywhere else.
template <typename T>
void spread(const T* logits, const int64_t* ids, T* y, int64_t rows, int64_t count, int64_t size) {
  T nothing;
  put(&nothing, -INFINITY);
#pragma omp parallel for if (rows > 1 && rows * size > PARALLEL_NUMBERS)
  for (int64_t row = 0; row < rows; ++row) {
    T* out = y + row * size;
    for (int64_t i = 0; i < size; ++i) out[i] = nothing;
    for (int64_t i = 0; i < count; ++i) out[ids[i]] = logits[row * count + i];
  }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                     \
  extern "C" void rms_norm_##SUFFIX(const T* x, const T* weight, T* y, int64_t rows, int64_t size,            \
                                    float epsilon) {                                                          \
    rms_norm(x, weight, y, rows, size, epsilon);                                                              \
  }                                                                                                           \
  extern "C" void add_rms_norm_##SUFFIX(T* x, const T* added, const T* weight, T* y, int64_t rows,            \
                                        int64_t size, float epsilon) {                                        \
    add_rms_norm(x, added, weight, y, rows, size, epsilon);                                                   \
  }                                                                                                           \
  extern "C" void silu_product_##SUFFIX(const T* gate_up, T* y, int64_t rows, int64_t size) {                 \
    silu_product(gate_up, y, rows, size);                                                                     \
  }                                                                                                           \
  extern "C" void rotate_and_store_##SUFFIX(const T* qkv, const T* cosine, const T* sine,                     \
                                            const int64_t* slots, T* query, T* keys, T* values,               \
                                            int64_t tokens, int heads, int kv_heads, int dim, int rotated) {  \
    rotate_and_store(qkv, cosine, sine, slots, query, keys, values, tokens, heads, kv_heads, dim, rotated);   \
  }                                                                                                           \
  extern "C" void attend_##SUFFIX(const T* query, const T* keys, const T* values, T* output,                  \
                                  const int32_t* spans, int64_t num_spans, const int32_t* tables, int heads,  \
                                  int kv_heads, int dim, int block_size, float scale, float softcap,          \
                                  int window) {                                                               \
    const Shape shape{heads, kv_heads, dim, block_size, scale, softcap, window};                              \
    attend(query, keys, values, output, reinterpret_cast<const Span*>(spans), num_spans, tables, shape);      \
  }                                                                                                           \
  extern "C" void best_tokens_##SUFFIX(const T* logits, int64_t rows, int64_t stride, int64_t size,           \
                                       int64_t* best, uint8_t* finite) {                                      \
    best_tokens(logits, rows, stride, size, best, finite);                                                    \
  }                                                                                                           \
  extern "C" void spread_##SUFFIX(const T* logits, const int64_t* ids, T* y, int64_t rows, int64_t count,     \
                                  int64_t size) {                                                             \
    spread(logits, ids, y, rows, count, size);                                                                \
  }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
