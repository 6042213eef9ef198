// A whole decoder step: all layers of all rows in one call, on a pool of threads.
#pragma once

#include <vector>

#include "arena.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace headway {

/// y = x @ w.T on the pool; `rows` of x are in the form that the layer reads.
void run_linear(Pool& pool, const Kernels& kernels, const LinearTask& task, int rows, bool alone);
void run_norm(Pool& pool, const Kernels& kernels, const NormTask& task, int rows, bool alone);

/// Bytes of scratch that a thread needs for any kernel.
size_t scratch_bytes(int group, int head_dim);

/// Bytes from row to row of `width` numbers in the form that a layer of `type` reads: an odd number of cache lines.
size_t row_stride(const Kernels& kernels, Type type, int width);

struct Shape {
  int hidden, inner, heads, kv_heads, head_dim, vocab;
  float eps;
  Type type;
};

struct Layer {
  const float *input_norm, *post_norm;
  Linear qkv, output, gate_up, down;
};

/// What a step computes; see kernels.hpp for Rows.
struct Step {
  int tokens = 0;
  const int64_t* token_ids = nullptr;
  Rows rows;
  int samples = 0;
  const int64_t* sampling = nullptr;  // tokens whose logits are wanted
  float* logits = nullptr;            // [samples, vocab]
};

class Decoder {
 public:
  Decoder(const Shape& shape, const Kernels& kernels, Pool& pool);

  Arena arena;
  std::vector<Layer> layers;
  const void* embedding = nullptr;  // float32 or, of bfloat16 and int8 models, bfloat16 [vocab, hidden]
  const float* norm = nullptr;
  const float* rope = nullptr;
  Linear head;

  /// Layer i's keys and values lie at i * layer_words behind these.
  void bind(uint32_t* keys, uint32_t* values, size_t layer_words, int block_size);
  void step(const Step& step);
  void attend_only(const Step& step);
  const Shape& shape() const { return shape_; }
  int alone_up_to = 0;  // tokens of a step that the caller computes without help

 private:
  struct Piece {
    int row, token, tokens, head;
  };
  void reserve(int tokens);
  void plan(const Step& step);
  void embed(const Step& step);
  void attend(const Layer& layer, const Step& step, const Cache& cache);
  void look(const Step& step, const Cache& cache);
  void feed(const Layer& layer, int tokens);

  Shape shape_;
  const Kernels& kernels_;
  Pool& pool_;
  bool alone_ = false;
  Cache cache_;
  size_t layer_words_ = 0;
  int reserved_ = 0;
  bool wide_;  // layers read float32 rows, or quantise them
  std::vector<char> buffers_;
  float *x_ = nullptr, *qkv_ = nullptr, *x_scale_ = nullptr;
  char *read_ = nullptr, *q_ = nullptr, *attended_ = nullptr, *gated_ = nullptr;
  size_t read_stride_ = 0, attended_stride_ = 0, gated_stride_ = 0;
  std::vector<char*> scratch_;
  std::vector<Piece> ropes_, attentions_;
};

}  // namespace headway
