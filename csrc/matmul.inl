// The one inner loop of all matrix products: R rows times U units of 16 columns, an accumulator for each.

struct DotF32 {  // float32 weights, float32 rows
  using Acc = F;
  using Store = float;
  static constexpr int x_words = 1;  // of a row, for each word of the weight
  static constexpr int rows = MAX_ROWS;  // at once
  static constexpr int numbers = 1;  // that `dot` multiplies in each lane
  static inline Acc dot(Acc acc, W x, W w) { return f_fma(w_float(x), w_float(w), acc); }
  template <int R, int U> static inline void step(Acc (&acc)[R][U], const uint32_t* (&x)[(R + 2) / 3], size_t ldx,
                                                   const W (&w)[U]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F xv = w_float(w_all(x[r / 3] + (r % 3) * ldx));
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][u] = f_fma(xv, w_float(w[u]), acc[r][u]);
    }
  }
};

struct DotBf16 {  // bfloat16 weights, bfloat16 rows
  using Acc = F;
  using Store = float;
  static constexpr int x_words = 1;
  static constexpr int rows = MAX_ROWS;
  static constexpr int numbers = 2;
  static inline Acc dot(Acc acc, W x, W w) { return dot_bf16(acc, x, w); }
  template <int R, int U> static inline void step(Acc (&acc)[R][U], const uint32_t* (&x)[(R + 2) / 3], size_t ldx,
                                                   const W (&w)[U]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      W xv = w_all(x[r / 3] + (r % 3) * ldx);
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][u] = dot_bf16(acc[r][u], xv, w[u]);
    }
  }
};

struct DotWide {  // bfloat16 weights, float32 rows
  using Acc = F;
  using Store = float;
  static constexpr int x_words = 2;
  static constexpr int rows = MAX_ROWS < 12 ? MAX_ROWS : 12;  // two more registers hold the halves of the weights
  static constexpr int numbers = 1;
  static inline Acc dot(Acc acc, W x, W w) { return f_fma(w_float(x), w_float(w), acc); }
  template <int R, int U> static inline void step(Acc (&acc)[R][U], const uint32_t* (&x)[(R + 2) / 3], size_t ldx,
                                                   const W (&w)[U]) {
    F even[U], odd[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) even[u] = w_low(w[u]), odd[u] = w_high(w[u]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F xv = w_float(w_all(x[r / 3] + (r % 3) * ldx));
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][u] = f_fma(xv, even[u], acc[r][u]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F xv = w_float(w_all(x[r / 3] + (r % 3) * ldx + 1));
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][u] = f_fma(xv, odd[u], acc[r][u]);
    }
  }
};

struct DotI8 {  // signed weights, unsigned rows
  using Acc = I;
  using Store = int32_t;
  static constexpr int x_words = 1;
  static constexpr int rows = MAX_ROWS;
  static constexpr int numbers = 4;
  static inline Acc dot(Acc acc, W x, W w) { return dot_i8(acc, x, w); }
  template <int R, int U> static inline void step(Acc (&acc)[R][U], const uint32_t* (&x)[(R + 2) / 3], size_t ldx,
                                                   const W (&w)[U]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      W xv = w_all(x[r / 3] + (r % 3) * ldx);
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) acc[r][u] = dot_i8(acc[r][u], xv, w[u]);
    }
  }
};

inline F acc_load(const float* p) { return f_load(p); }
inline I acc_load(const int32_t* p) { return i_load(p); }
inline void acc_store(float* p, F x) { f_store(p, x); }
inline void acc_store(int32_t* p, I x) { i_store(p, x); }
template <class A> inline A acc_zero();
template <> inline F acc_zero<F>() { return f_set(0.0f); }
template <> inline I acc_zero<I>() { return i_zero(); }

/// One product: `segments` pieces of the weight, each `words` long, that rows walk through one after the other.
struct Product {
  const uint32_t* x;               // rows ldx words apart
  size_t ldx;
  const uint32_t* const* weights;  // of each segment, its rows ldw words apart
  size_t ldw;
  size_t panel_stride;             // words from one pair of units to the next
  int segments, words;
  void* sums;                      // rows ldc numbers apart; units 16 apart, pairs of units `pair` apart
  size_t ldc, pair;
  bool more;                       // add to what sums hold
  const char* ahead = nullptr;     // what to fetch into the cache meanwhile: two lines, then those `ahead_step` bytes on
  size_t ahead_step = 0;
  ptrdiff_t second = 0;            // few rows fetch two more lines so far away
};

constexpr size_t STREAM_AHEAD = 512;  // words
constexpr int FEW_ROWS = 8;

template <class D, int R, int U> void multiply(const Product& p) {
  typename D::Acc acc[R][U];
  auto* sums = static_cast<typename D::Store*>(p.sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u)
      acc[r][u] = p.more ? acc_load(sums + r * p.ldc + u / 2 * p.pair + u % 2 * 16) : acc_zero<typename D::Acc>();
  const size_t ldx = p.ldx, ldw = p.ldw, ahead_step = p.ahead_step;
  const ptrdiff_t second = p.second;
  const char* ahead = p.ahead ? p.ahead : reinterpret_cast<const char*>(p.x);
  const uint32_t* x[(R + 2) / 3];  // every third row: the others are an index away
#pragma GCC unroll 16
  for (int i = 0; i < (R + 2) / 3; ++i) x[i] = p.x + 3 * i * ldx;
  for (int s = 0; s < p.segments; ++s) {
    const uint32_t* w[(U + 1) / 2];
#pragma GCC unroll 8
    for (int i = 0; i < (U + 1) / 2; ++i) w[i] = p.weights[s] + i * p.panel_stride;
    for (int k = p.words; k > 0; --k) {
      W wv[U];
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) wv[u] = w_load(w[u / 2] + u % 2 * 16);
      if constexpr (U > 2) {  // few rows: each panel is a stream of its own
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) __builtin_prefetch(w[u / 2] + u % 2 * 16 + STREAM_AHEAD);
      } else {
        __builtin_prefetch(ahead);
        __builtin_prefetch(ahead + 64);
        if constexpr (R <= FEW_ROWS) {
          __builtin_prefetch(ahead + second);
          __builtin_prefetch(ahead + second + 64);
        }
        ahead += ahead_step;
      }
      D::template step<R, U>(acc, x, ldx, wv);
#pragma GCC unroll 8
      for (int i = 0; i < (U + 1) / 2; ++i) w[i] += ldw;
#pragma GCC unroll 16
      for (int i = 0; i < (R + 2) / 3; ++i) x[i] += D::x_words;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) acc_store(sums + r * p.ldc + u / 2 * p.pair + u % 2 * 16, acc[r][u]);
}

using Multiply = void (*)(const Product&);

template <class D, int U, int... R> inline Multiply pick(int rows, std::integer_sequence<int, R...>) {
  static constexpr Multiply table[] = {multiply<D, R + 1, U>...};
  return table[rows - 1];
}
/// The product of `rows` (1 to D::rows) times `units`.
template <class D, int U> inline Multiply product(int rows) {
  return pick<D, U>(rows, std::make_integer_sequence<int, D::rows>{});
}

/// All rows of x, in nearly equal tiles of at most D::rows.
template <class D, int U> inline void multiply_rows(Product p, int rows) {
  const int tiles = (rows + D::rows - 1) / D::rows;
  for (int t = 0; t < tiles; ++t) {
    const int count = rows / tiles + (t < rows % tiles);
    product<D, U>(count)(p);
    p.ahead += p.ahead_step * p.words;
    p.x += count * p.ldx;
    p.sums = static_cast<typename D::Store*>(p.sums) + count * p.ldc;
  }
}

/// All rows times `units` of 16 columns that lie side by side.
template <class D> inline void multiply_columns(Product p, int rows, int units, const uint32_t* const* weights) {
  const uint32_t* shifted[MAX_SEGMENTS];
  auto* sums = static_cast<typename D::Store*>(p.sums);
  for (int u = 0; u < units;) {
    const int now = MAX_UNITS == 2 && u + 1 < units ? 2 : 1;
    for (int s = 0; s < p.segments; ++s) shifted[s] = weights[s] + 16 * u;
    p.weights = shifted;
    p.sums = sums + 16 * u;
    if (now == 2) multiply_rows<D, MAX_UNITS>(p, rows);
    else multiply_rows<D, 1>(p, rows);
    p.ahead += p.ahead_step * p.words * ((rows + D::rows - 1) / D::rows);
    u += now;
  }
}
