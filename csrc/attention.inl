// Causal attention over the paged pool: tokens of one row and one KV head, its query heads side by side. Decoding rows are
// those with one token. Softmax runs online over tiles of TILE tokens at absolute positions, so a query's sums hang
// neither on the chunk that it came in nor on its neighbours.

struct Pass {
  float* scores;   // [rows][TILE]
  float* weights;  // [rows][TILE], as float32 or bfloat16
  float* out;      // [rows][head_dim]
  float* most;     // [rows]
  float* sum;      // [rows]
};

inline Pass carve(void* scratch, int rows, int dim) {
  float* p = static_cast<float*>(scratch);
  Pass pass;
  pass.scores = p, p += rows * TILE;
  pass.weights = p, p += rows * TILE;
  pass.out = p, p += rows * dim;
  pass.most = p, p += (rows + 15) / 16 * 16;
  pass.sum = p;
  return pass;
}

/// Row r of a tile: scores to weights, its old sums scaled to the new maximum. `seen` tokens of the tile are its to see.
inline void soften(const Pass& p, int r, int seen, int dim, bool bf16) {
  float* s = p.scores + r * TILE;
  const F never = f_set(-__builtin_inff());
  F v[4];
  for (int i = 0; i < 4; ++i) v[i] = f_load(s + 16 * i);
  if (seen < TILE)
    for (int i = 0; i < 4; ++i) v[i] = f_first(seen - 16 * i, v[i], never);
  float most = f_hmax(f_max(f_max(v[0], v[1]), f_max(v[2], v[3])));
  most = most > p.most[r] ? most : p.most[r];
  const F shift = f_set(most);
  for (int i = 0; i < 4; ++i) v[i] = f_exp(f_sub(v[i], shift));  // of what is not seen: 0
  const float old = most == p.most[r] ? 1.0f : first_lane(f_exp(f_sub(f_set(p.most[r]), shift)));
  p.most[r] = most;
  p.sum[r] = p.sum[r] * old + f_hsum(f_add(f_add(v[0], v[1]), f_add(v[2], v[3])));
  if (bf16)
    for (int i = 0; i < 4; ++i) f_to_bf16(reinterpret_cast<uint16_t*>(p.weights) + r * TILE + 16 * i, v[i]);
  else
    for (int i = 0; i < 4; ++i) f_store(p.weights + r * TILE + 16 * i, v[i]);
  if (old != 1.0f)
    for (int d = 0; d < dim; d += 16) f_store(p.out + r * dim + d, f_mul(f_load(p.out + r * dim + d), f_set(old)));
}

template <class D>
void attend(const AttentionTask& t, const Cache& c, const Rows& rows, int row, int token, int tokens, int head, void* scratch) {
  const int dim = c.head_dim, size = c.block_size, group = c.heads / c.kv_heads, count = tokens * group;
  const int pack = c.bf16 ? 2 : 1;                      // numbers in a word
  const bool bf16 = c.bf16 && D::x_words == 1;          // queries and weights are bfloat16
  const int x_bytes = bf16 ? 2 : 4;
  const Pass pass = carve(scratch, count, dim);
  for (int i = 0; i < count * dim; ++i) pass.out[i] = 0.0f;
  for (int r = 0; r < count; ++r) pass.most[r] = -__builtin_inff(), pass.sum[r] = 0.0f;
  const int64_t first = rows.starts[row] + token, last = first + tokens - 1;
  const int64_t* blocks = rows.tables + row * rows.table_stride;
  const size_t head_words = block_words(c) / c.kv_heads;
  const char* q = static_cast<const char*>(t.q) +
                  (static_cast<size_t>(head) * t.tokens + rows.first[row] + token) * group * dim * x_bytes;
  const int at_once = size < TILE ? size : TILE;        // tokens of a block that a tile takes
  for (int64_t begin = 0; begin <= last; begin += TILE) {
    const uint32_t* values[MAX_SEGMENTS];
    int segments = 0;
    for (int64_t at = begin; at < begin + TILE && at <= last; at += at_once, ++segments) {
      const size_t base = static_cast<size_t>(blocks[at / size]) * block_words(c) + head * head_words;
      const size_t inside = static_cast<size_t>(at % size);
      const uint32_t* keys = c.keys + base + inside;
      values[segments] = c.values + base + inside / pack * dim;
      Product p{reinterpret_cast<const uint32_t*>(q), static_cast<size_t>(dim) * x_bytes / 4, nullptr, static_cast<size_t>(size),
                0, 1, dim / pack, pass.scores + (at - begin), TILE, 0, false};
      // Meanwhile these tokens' values come, and the next ones' keys.
      const int64_t next = at + at_once <= last ? at + at_once : at;
      const auto* coming = c.keys + static_cast<size_t>(blocks[next / size]) * block_words(c) + head * head_words + next % size;
      p.ahead = reinterpret_cast<const char*>(coming);
      p.second = reinterpret_cast<const char*>(values[segments]) - p.ahead;
      p.ahead_step = size * 4 < 128 ? 64 : 128;
      multiply_columns<D>(p, count, at_once / 16, &keys);
    }
    for (int r = 0; r < count; ++r) {
      const int64_t seen = first + r / group - begin + 1;
      soften(pass, r, seen < TILE ? static_cast<int>(seen) : TILE, dim, bf16);
    }
    Product p{reinterpret_cast<const uint32_t*>(pass.weights), static_cast<size_t>(TILE) * x_bytes / 4, nullptr,
              static_cast<size_t>(dim), 0, segments, at_once / pack, pass.out, static_cast<size_t>(dim), 0, true};
    multiply_columns<D>(p, count, dim / 16, values);
  }
  for (int r = 0; r < count; ++r) {
    const size_t at = (rows.first[row] + token + r / group) * t.out_stride + (static_cast<size_t>(head) * group + r % group) * dim;
    const F inverse = f_set(1.0f / pass.sum[r]);
    for (int d = 0; d < dim; d += 16) {
      F y = f_mul(f_load(pass.out + r * dim + d), inverse);
      if (t.out_bf16) f_to_bf16(static_cast<uint16_t*>(t.out) + at + d, y);
      else f_store(static_cast<float*>(t.out) + at + d, y);
    }
  }
}

void attention(const AttentionTask& t, const Cache& c, const Rows& rows, int row, int token, int tokens, int head, void* scratch) {
  if (c.bf16) attend<DotB>(t, c, rows, row, token, tokens, head, scratch);
  else attend<DotF32>(t, c, rows, row, token, tokens, head, scratch);
}
