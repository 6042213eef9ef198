// What the kernels compute, as plain data. Each instruction set compiles the same templates (kernels.inl) into one table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headway {

enum class Type : int { f32 = 0, bf16 = 1, i8 = 2 };  // how weights are stored

constexpr int PANEL = 32;      // output columns of a packed weight that lie together
constexpr int ROW_BLOCK = 256; // rows whose sums one piece of work holds
constexpr int TILE = 64;       // context tokens that one step of the softmax takes, at absolute positions

/// A linear layer's weight in panels: words [panels][k_words][PANEL], a word being one float32, two bfloat16 or four
/// int8 that follow each other along the input. A gated layer interleaves 16 columns of gate with the same 16 of up.
struct Linear {
  Type type = Type::f32;
  bool gated = false;
  int n = 0;         // outputs as the caller counts them (a gated layer's: half of its weight's rows)
  int k = 0;         // inputs
  int k_words = 0;   // words of the weight along the input
  int panels = 0;
  const uint32_t* words = nullptr;
  const float* bias = nullptr;      // [panels * PANEL] or null
  const float* scale = nullptr;     // int8: of each output channel, [panels * PANEL]
  const int32_t* sums = nullptr;    // int8: 128 times the sum of each channel's weights
};

enum class Then : int { store, add, silu_mul };  // what becomes of a linear layer's sums

/// y = x @ w.T (+ bias), then stored, added to what `out` holds, or silu(gate) * up.
struct LinearTask {
  const Linear* layer = nullptr;
  const void* x = nullptr;          // rows in the form that Kernels::x_bytes and prepare() define
  size_t x_stride = 0;              // bytes
  const float* x_scale = nullptr;   // int8: of each row
  Then then = Then::store;
  void* out = nullptr;
  size_t out_stride = 0;            // in elements
  bool out_bf16 = false;            // out is bfloat16, the form that the next layer reads
};

struct NormTask {
  const float* x = nullptr;         // [rows, width]
  size_t x_stride = 0;
  const int64_t* rows = nullptr;    // which rows to read, or null for all in order
  const float* weight = nullptr;    // or null: no norm, only the form the next layer reads
  float eps = 0;
  int width = 0;
  Type type = Type::f32;            // of the layer that reads the result
  void* out = nullptr;
  size_t out_stride = 0;            // bytes
  float* out_scale = nullptr;       // int8
};

/// Paged keys and values of one layer. Blocks lie [block][kv_head]: keys in words [head_dim words][block_size], values in
/// words [block_size words][head_dim], a word being one float32 or two bfloat16 along the axis that sums run over.
struct Cache {
  uint32_t* keys = nullptr;
  uint32_t* values = nullptr;
  bool bf16 = false;
  int block_size = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int heads = 0;
};

/// The rows of a step: row i computes positions [starts[i], starts[i] + counts[i]) of the sequence in the blocks
/// tables[i * table_stride ...]; its tokens begin at first[i].
struct Rows {
  int count = 0;
  const int64_t* starts = nullptr;
  const int64_t* counts = nullptr;
  const int64_t* first = nullptr;
  const int64_t* tables = nullptr;
  size_t table_stride = 0;
};

struct RopeTask {
  const float* qkv = nullptr;       // [tokens, (heads + 2 kv_heads) * head_dim]
  size_t qkv_stride = 0;
  const float* table = nullptr;     // [positions, 2, head_dim / 2]: cosines, sines
  float scale = 1;                  // of the queries
  void* q = nullptr;                // [kv_heads][tokens][group][head_dim], float32 or bfloat16
  int tokens = 0;
};

struct AttentionTask {
  const void* q = nullptr;          // as RopeTask leaves it
  int tokens = 0;
  void* out = nullptr;              // [tokens, heads * head_dim], float32 or bfloat16
  size_t out_stride = 0;            // in elements
  bool out_bf16 = false;
};

/// The kernels of one instruction set. Every output element has one accumulator that walks its inputs in order, whatever
/// the number of rows, the cut into pieces or the threads.
struct Kernels {
  const char* name;
  bool bf16_dot;        // bfloat16 layers read bfloat16 rows (else float32 ones)
  int (*panels_at_once)(int rows);
  /// Panels [panel, panel + panels); the same thread will come for those up to `until` next.
  void (*linear)(const LinearTask&, int row, int rows, int panel, int panels, int until, void* scratch);
  void (*norm)(const NormTask&, int row, int rows);
  void (*rope)(const RopeTask&, const Cache&, const Rows&, int row, int token, int tokens);
  void (*attention)(const AttentionTask&, const Cache&, const Rows&, int row, int token, int tokens, int kv_head,
                    void* scratch);
  double (*products)(Type type, long turns);  // multiplications that many turns on registers have made: the limit of a core
  int (*read)(const void* from, size_t bytes);      // a multiple of 256, as fast as memory gives them
  void (*argmax)(const float* logits, int width, float* best, int64_t* index);
};

size_t attention_scratch(int group, int head_dim);
inline int query_tile(int group) { return group >= 48 ? 1 : 48 / group; }  // tokens of a row that share a pass

const Kernels* kernels_avx512_bf16();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_plain();

}  // namespace headway
