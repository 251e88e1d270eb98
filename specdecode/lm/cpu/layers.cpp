// All layers of a known model in one call: what specdecode/lm/cpu/stack.py does layer by layer, by the same
// kernels in the same order, without an interpreter between them. For bfloat16 where `linear` can be had.

#include "numbers.h"

extern "C" {
void rms_norm_bfloat16(const bfloat16*, const bfloat16*, bfloat16*, int64_t, int64_t, float);
void add_rms_norm_bfloat16(bfloat16*, const bfloat16*, const bfloat16*, bfloat16*, int64_t, int64_t, float);
void silu_product_bfloat16(const bfloat16*, bfloat16*, int64_t, int64_t);
void rotate_and_store_bfloat16(const bfloat16*, const bfloat16*, const bfloat16*, const int64_t*, bfloat16*,
                               bfloat16*, bfloat16*, int64_t, int, int, int, int);
void attend_bfloat16(const bfloat16*, const bfloat16*, const bfloat16*, bfloat16*, const int32_t*, int64_t,
                     const int32_t*, int, int, int, int, float, float, int);
void linear_bfloat16(const bfloat16*, const bfloat16*, const bfloat16*, bfloat16*, int64_t, int64_t, int64_t);
}

namespace {

struct Product {
  const bfloat16 *tiles, *bias;
  int64_t in, out;
};

struct Norm {
  const bfloat16* weight;
  double epsilon;
};

// As _Layer in specdecode/lm/cpu/layers.py.
struct Layer {
  Norm before, between;
  Product qkv, output, gate_up, down;
  bfloat16 *keys, *values;
  int64_t heads, kv_heads, dim, window;
  double scale;
};

// As _Step there.
struct Step {
  const bfloat16 *cosine, *sine;
  const int64_t* slots;
  const int32_t *spans, *tables;
  int64_t num_spans, tokens, rotated, block_size;
};

bfloat16* times(const Product& product, const bfloat16* x, bfloat16* y, int64_t rows) {
  linear_bfloat16(x, product.tiles, product.bias, y, rows, product.in, product.out);
  return y;
}

}  // namespace

// x [tokens, size] becomes what the layers make of it, `normed` [tokens, size] its norm by `last`. `wide` and
// `narrow` hold tokens times the widest output of a product each.
extern "C" void layers_bfloat16(const Layer* layers, int64_t count, const Norm* last, const Step* step,
                                bfloat16* x, bfloat16* normed, bfloat16* wide, bfloat16* narrow, int64_t size) {
  const int64_t n = step->tokens;
  rms_norm_bfloat16(x, layers[0].before.weight, normed, n, size, static_cast<float>(layers[0].before.epsilon));
  for (int64_t i = 0; i < count; ++i) {
    const Layer& own = layers[i];
    const int heads = static_cast<int>(own.heads), kv_heads = static_cast<int>(own.kv_heads);
    const int dim = static_cast<int>(own.dim);
    times(own.qkv, normed, wide, n);
    rotate_and_store_bfloat16(wide, step->cosine, step->sine, step->slots, narrow, own.keys, own.values, n, heads,
                              kv_heads, dim, static_cast<int>(step->rotated));
    attend_bfloat16(narrow, own.keys, own.values, wide, step->spans, step->num_spans, step->tables, heads,
                    kv_heads, dim, static_cast<int>(step->block_size), static_cast<float>(own.scale), 0.0f,
                    static_cast<int>(own.window));
    times(own.output, wide, narrow, n);
    const Norm& between = own.between;
    add_rms_norm_bfloat16(x, narrow, between.weight, normed, n, size, static_cast<float>(between.epsilon));
    times(own.gate_up, normed, wide, n);
    silu_product_bfloat16(wide, narrow, n, own.gate_up.out / 2);
    times(own.down, narrow, wide, n);
    const Norm& next = i + 1 < count ? layers[i + 1].before : *last;
    add_rms_norm_bfloat16(x, wide, next.weight, normed, n, size, static_cast<float>(next.epsilon));
  }
}
