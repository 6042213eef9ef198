// Linear layers: panels of 32 columns times blocks of rows, then what is to become of the sums.

constexpr int K_BLOCK = 160;      // words of a panel that stay in the nearest cache while all rows pass
constexpr size_t AHEAD = 4096;    // bytes that are fetched before they are needed where rows pass once

inline int panels_at_once(int rows) { return rows <= 2 ? FEW_PANELS : rows <= 4 && FEW_PANELS > 2 ? 2 : 1; }

/// Where rows pass several times, the next panel (if `next`) is fetched meanwhile, evenly spread.
template <class D> void sum_panel(const LinearTask& t, int row, int rows, int panel, bool next, typename D::Store* sums) {
  const Linear& layer = *t.layer;
  const auto* x = reinterpret_cast<const uint32_t*>(static_cast<const char*>(t.x) + row * t.x_stride);
  const uint32_t* words = layer.words + static_cast<size_t>(panel) * layer.k_words * PANEL;
  const int passes = (rows + D::rows - 1) / D::rows, units = MAX_UNITS < 2 ? 2 : 1;
  const int blocks = passes == 1 ? 1 : (layer.k_words + K_BLOCK - 1) / K_BLOCK;
  constexpr size_t LINE = PANEL * 4;
  Product p{x, t.x_stride / 4, nullptr, PANEL, 0, 1, 0, sums, PANEL, PANEL, false};
  if (passes == 1) p.ahead = reinterpret_cast<const char*>(words) + AHEAD, p.ahead_step = LINE / units;
  else if (next) p.ahead = reinterpret_cast<const char*>(words + static_cast<size_t>(layer.k_words) * PANEL), p.ahead_step = LINE / passes / units;
  for (int b = 0, k = 0; b < blocks; ++b) {
    const int count = layer.k_words / blocks + (b < layer.k_words % blocks);
    const uint32_t* from = words + static_cast<size_t>(k) * PANEL;
    p.x = x + k * D::x_words, p.words = count, p.more = b > 0;
    multiply_columns<D>(p, rows, 2, &from);
    p.ahead += p.ahead_step * passes * units * count;
    k += count;
  }
}

/// Few rows: several panels side by side, so that enough sums are under way to hide the latency of each.
template <class D, int U> void sum_few(const LinearTask& t, int row, int rows, int panel, typename D::Store* sums) {
  const Linear& layer = *t.layer;
  const size_t stride = static_cast<size_t>(layer.k_words) * PANEL;
  const uint32_t* from = layer.words + panel * stride;
  const auto* x = reinterpret_cast<const uint32_t*>(static_cast<const char*>(t.x) + row * t.x_stride);
  Product p{x, t.x_stride / 4, &from, PANEL, stride, 1, layer.k_words, sums, PANEL, static_cast<size_t>(rows) * PANEL, false};
  switch (rows) {
    case 1: multiply<D, 1, U>(p); break;
    case 2: multiply<D, 2, U>(p); break;
    case 3: multiply<D, 3, U>(p); break;
    default: multiply<D, 4, U>(p);
  }
}

inline F scaled(const LinearTask&, int, size_t, const float* sums) { return f_load(sums); }
inline F scaled(const LinearTask& t, int row, size_t column, const int32_t* sums) {
  F whole = f_from_int(i_sub(i_load(sums), i_load(t.layer->sums + column)));
  return f_mul(f_mul(whole, f_set(t.x_scale[row])), f_load(t.layer->scale + column));
}
inline F f_exp(F x);
inline F silu(F x) { return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_set(0.0f), x)))); }

inline void put(const LinearTask& t, int row, int column, int left, F y) {
  if (t.out_bf16) {
    auto* out = static_cast<uint16_t*>(t.out) + row * t.out_stride + column;
    uint16_t part[16];
    f_to_bf16(left >= 16 ? out : part, y);
    if (left < 16) __builtin_memcpy(out, part, 2 * left);
    return;
  }
  float* out = static_cast<float*>(t.out) + row * t.out_stride + column;
  float part[16];
  if (left < 16) __builtin_memcpy(part, out, 4 * left);
  float* where = left >= 16 ? out : part;
  f_store(where, t.then == Then::add ? f_add(f_load(where), y) : y);
  if (left < 16) __builtin_memcpy(out, part, 4 * left);
}

template <class S> void finish_panel(const LinearTask& t, int row, int rows, int panel, const S* sums) {
  const Linear& layer = *t.layer;
  const size_t column = static_cast<size_t>(panel) * PANEL;
  const F zero = f_set(0.0f);
  const F bias0 = layer.bias ? f_load(layer.bias + column) : zero, bias1 = layer.bias ? f_load(layer.bias + column + 16) : zero;
  for (int r = 0; r < rows; ++r) {
    F y0 = scaled(t, row + r, column, sums + r * PANEL), y1 = scaled(t, row + r, column + 16, sums + r * PANEL + 16);
    if (layer.bias) y0 = f_add(y0, bias0), y1 = f_add(y1, bias1);
    if (layer.gated) {
      put(t, row + r, panel * 16, layer.n - panel * 16, f_mul(silu(y0), y1));
    } else {
      put(t, row + r, panel * PANEL, layer.n - panel * PANEL, y0);
      const int left = layer.n - panel * PANEL - 16;
      if (left > 0) put(t, row + r, panel * PANEL + 16, left, y1);
    }
  }
}

template <class D> void linear_of(const LinearTask& t, int row, int rows, int panel, int panels, int until, void* scratch) {
  auto* sums = static_cast<typename D::Store*>(scratch);
  const int few = panels_at_once(rows);
  for (int end = panel + panels; panel < end;) {
    const int now = few > 1 && panel + few <= end ? few : few > 2 && panel + 2 <= end ? 2 : 1;
    if (now == 1) sum_panel<D>(t, row, rows, panel, panel + 1 < until, sums);
    else if (now == 2) sum_few<D, 4>(t, row, rows, panel, sums);
    else sum_few<D, 2 * FEW_PANELS>(t, row, rows, panel, sums);
    for (int i = 0; i < now; ++i) finish_panel(t, row, rows, panel + i, sums + static_cast<size_t>(i) * rows * PANEL);
    panel += now;
  }
}

void linear(const LinearTask& t, int row, int rows, int panel, int panels, int until, void* scratch) {
  switch (t.layer->type) {
    case Type::f32: return linear_of<DotF32>(t, row, rows, panel, panels, until, scratch);
    case Type::bf16: return linear_of<DotB>(t, row, rows, panel, panels, until, scratch);
    case Type::i8: return linear_of<DotI8>(t, row, rows, panel, panels, until, scratch);
  }
}
