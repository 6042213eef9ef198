// What is done to each row by itself: normalisation, rotary embedding, the forms that layers read.

/// e^x within 2 ulp: 2^n times a polynomial on |r| <= ln 2 / 2; 0 below -87.
inline F f_exp(F x) {
  const F low = f_set(-87.0f);
  F y = f_min(f_max(x, low), f_set(88.0f));
  F n = f_round(f_mul(y, f_set(1.44269504f)));
  F r = f_fma(n, f_set(-0.693359375f), y);
  r = f_fma(n, f_set(2.12194440e-4f), r);
  F p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  p = f_fma(f_mul(p, r), r, f_add(r, f_set(1.0f)));
  return f_less(x, low, f_set(0.0f), f_mul(p, f_pow2(n)));
}

inline float first_lane(F x) {
  float lanes[16];
  f_store(lanes, x);
  return lanes[0];
}
/// Sixteen numbers of a row, zeros beyond its end.
inline F tail(const float* p, int left) {
  if (left >= 16) return f_load(p);
  float part[16] = {};
  __builtin_memcpy(part, p, 4 * left);
  return f_load(part);
}

inline F normed(const NormTask& t, const float* x, F scale, int i) {
  F y = tail(x + i, t.width - i);
  return t.weight ? f_mul(f_mul(y, scale), tail(t.weight + i, t.width - i)) : y;
}

/// Rows are padded with zeros to a multiple of 16 numbers; strides leave room for that.
void norm(const NormTask& t, int row, int rows) {
  for (int r = row; r < row + rows; ++r) {
    const float* x = t.x + (t.rows ? t.rows[r] : r) * t.x_stride;
    char* out = static_cast<char*>(t.out) + r * t.out_stride;
    F scale = f_set(1.0f);
    if (t.weight) {
      F sum = f_set(0.0f);
      for (int i = 0; i < t.width; i += 16) {
        F y = tail(x + i, t.width - i);
        sum = f_fma(y, y, sum);
      }
      scale = f_set(1.0f / __builtin_sqrtf(f_hsum(sum) / static_cast<float>(t.width) + t.eps));
    }
    if (t.type == Type::i8) {  // what is not a number makes the row's scale none
      F most = f_set(0.0f);
      for (int i = 0; i < t.width; i += 16) most = f_max(most, f_abs(normed(t, x, scale, i)));
      const float largest = f_hmax(most);
      const F inverse = f_set(largest > 0 ? 127.0f / largest : 0.0f);
      for (int i = 0; i < t.width; i += 16)
        f_to_u8(reinterpret_cast<uint8_t*>(out) + i, f_mul(normed(t, x, scale, i), inverse));
      t.out_scale[r] = largest / 127.0f + 0.0f * first_lane(scale);
    } else if (t.type == Type::bf16 && BF16_DOT) {
      for (int i = 0; i < t.width; i += 16) f_to_bf16(reinterpret_cast<uint16_t*>(out) + i, normed(t, x, scale, i));
    } else {
      for (int i = 0; i < t.width; i += 16) f_store(reinterpret_cast<float*>(out) + i, normed(t, x, scale, i));
    }
  }
}

/// x [head_dim] rotated by the angles in `table` and scaled: dimension i is paired with i + head_dim / 2.
inline void rotate(const float* x, const float* table, int head_dim, float scale, float* out) {
  const int half = head_dim / 2;
  const float *cos = table, *sin = table + half;
  int i = 0;
  const F s = f_set(scale);
  for (; i + 16 <= half; i += 16) {
    F a = f_load(x + i), b = f_load(x + half + i), c = f_load(cos + i), d = f_load(sin + i);
    f_store(out + i, f_mul(s, f_sub(f_mul(a, c), f_mul(b, d))));
    f_store(out + half + i, f_mul(s, f_add(f_mul(b, c), f_mul(a, d))));
  }
  for (; i < half; ++i) {
    float a = x[i], b = x[half + i];
    out[i] = scale * (a * cos[i] - b * sin[i]);
    out[half + i] = scale * (b * cos[i] + a * sin[i]);
  }
}

inline size_t block_words(const Cache& c) {
  return static_cast<size_t>(c.kv_heads) * c.head_dim * c.block_size / (c.bf16 ? 2 : 1);
}

inline void store_key_value(const Cache& c, size_t block, int head, int offset, const float* key, const float* value) {
  const int dim = c.head_dim, size = c.block_size;
  const size_t words = block_words(c) / c.kv_heads, at = block * block_words(c) + head * words;
  if (!c.bf16) {
    float* keys = reinterpret_cast<float*>(c.keys + at);
    float* values = reinterpret_cast<float*>(c.values + at) + static_cast<size_t>(offset) * dim;
    for (int d = 0; d < dim; ++d) keys[d * size + offset] = key[d], values[d] = value[d];
    return;
  }
  uint16_t k[256], v[256];
  for (int d = 0; d < dim; d += 16) f_to_bf16(k + d, f_load(key + d)), f_to_bf16(v + d, f_load(value + d));
  uint32_t* keys = c.keys + at + offset;
  uint16_t* values = reinterpret_cast<uint16_t*>(c.values + at) + static_cast<size_t>(offset / 2) * dim * 2 + offset % 2;
  for (int d = 0; d < dim; d += 2) keys[d / 2 * size] = k[d] | static_cast<uint32_t>(k[d + 1]) << 16;
  for (int d = 0; d < dim; ++d) values[2 * d] = v[d];
}

/// Zeros behind a sequence's last token in a block that it has just begun: what nobody wrote weighs nothing, and 0 times
/// NaN is NaN.
inline void clear_rest(const Cache& c, size_t block, int head, int offset) {
  const int dim = c.head_dim, size = c.block_size, pack = c.bf16 ? 2 : 1;
  const size_t words = block_words(c) / c.kv_heads, at = block * block_words(c) + head * words;
  for (int d = 0; d < dim / pack; ++d) memset(c.keys + at + d * size + offset + 1, 0, 4 * (size - offset - 1));
  int next = offset + 1;
  if (next % pack) {  // the second half of the words that hold this token
    auto* values = reinterpret_cast<uint16_t*>(c.values + at + static_cast<size_t>(offset / 2) * dim) + 1;
    for (int d = 0; d < dim; ++d) values[2 * d] = 0;
    ++next;
  }
  memset(c.values + at + static_cast<size_t>(next / pack) * dim, 0, 4 * static_cast<size_t>(size - next) / pack * dim);
}

/// Tokens [token, token + tokens) of a row: queries rotated, scaled and put by KV head; keys rotated and, with the values,
/// stored in the pool.
void rope(const RopeTask& t, const Cache& c, const Rows& rows, int row, int token, int tokens) {
  const int dim = c.head_dim, group = c.heads / c.kv_heads;
  const int64_t* blocks = rows.tables + row * rows.table_stride;
  float turned[256];
  for (int i = token; i < token + tokens; ++i) {
    const int64_t position = rows.starts[row] + i, where = rows.first[row] + i;
    const float* qkv = t.qkv + where * t.qkv_stride;
    const float* angles = t.table + position * dim;
    for (int h = 0; h < c.heads; ++h) {
      rotate(qkv + h * dim, angles, dim, t.scale, turned);
      const size_t at = ((static_cast<size_t>(h / group) * t.tokens + where) * group + h % group) * dim;
      if (c.bf16 && BF16_DOT)
        for (int d = 0; d < dim; d += 16) f_to_bf16(static_cast<uint16_t*>(t.q) + at + d, f_load(turned + d));
      else
        for (int d = 0; d < dim; d += 16) f_store(static_cast<float*>(t.q) + at + d, f_load(turned + d));
    }
    const size_t block = static_cast<size_t>(blocks[position / c.block_size]);
    const int offset = static_cast<int>(position % c.block_size);
    const bool last = i + 1 == rows.counts[row], begun = position - offset >= rows.starts[row];
    for (int h = 0; h < c.kv_heads; ++h) {
      rotate(qkv + (c.heads + h) * dim, angles, dim, 1.0f, turned);
      store_key_value(c, block, h, offset, turned, qkv + (c.heads + c.kv_heads + h) * dim);
      if (last && begun) clear_rest(c, block, h, offset);
    }
  }
}

/// The largest of a row and where it first stands; NaN where there is a NaN.
void argmax(const float* x, int width, float* best, int64_t* index) {
  F most = f_set(-__builtin_inff()), nans = f_set(0.0f);
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    F y = f_load(x + i);
    most = f_max(most, y);
    nans = f_fma(y, f_set(0.0f), nans);
  }
  float largest = f_hmax(most), wrong = f_hsum(nans);
  for (; i < width; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    wrong += x[i] * 0.0f;
  }
  *index = 0;
  *best = largest;
  if (wrong != wrong) {  // NaN, or infinity times 0
    for (i = 0; i < width; ++i)
      if (x[i] != x[i]) *best = x[i];
    if (*best != *best) return;
  }
  for (i = 0; i < width; ++i)
    if (x[i] == largest) {
      *index = i;
      return;
    }
}
