// How fast a core multiplies what is in registers already: what products are measured against.
template <class D> double products_of(long turns) {
  constexpr int SUMS = MAX_UNITS == 2 ? 20 : 8;  // enough to hide the latency of each
  alignas(64) uint32_t words[16] = {};
  typename D::Acc acc[1][SUMS];
  alignas(64) typename D::Store start[SUMS * 16] = {};
  asm volatile("" : "+m"(start));  // equal sums would be computed once
#pragma GCC unroll 20
  for (int u = 0; u < SUMS; ++u) acc[0][u] = acc_load(start + 16 * u);
  W w = w_load(words), x = w;
  for (long i = 0; i < turns; ++i) {
    asm volatile("" : "+m"(words));
#pragma GCC unroll 20
    for (int u = 0; u < SUMS; ++u) acc[0][u] = D::dot(acc[0][u], x, w);
  }
  alignas(64) typename D::Store sums[16];
#pragma GCC unroll 20
  for (int u = 0; u < SUMS; ++u) {
    acc_store(sums, acc[0][u]);
    asm volatile("" ::"r"(sums) : "memory");
  }
  return static_cast<double>(turns) * SUMS * 16 * D::numbers;
}

double products(Type type, long turns) {
  switch (type) {
    case Type::f32: return products_of<DotF32>(turns);
    case Type::bf16: return products_of<DotB>(turns);
    default: return products_of<DotI8>(turns);
  }
}

/// Reads `bytes`, a multiple of 256, as fast as it can.
int read(const void* from, size_t bytes) {
  const auto* words = static_cast<const uint32_t*>(from);
  I sums[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
  for (size_t i = 0; i < bytes / 4; i += 64) {
    __builtin_prefetch(words + i + 1024);
    __builtin_prefetch(words + i + 1040);
    __builtin_prefetch(words + i + 1056);
    __builtin_prefetch(words + i + 1072);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] = i_sub(sums[j], w_load(words + i + 16 * j));
  }
  int32_t lanes[16];
  i_store(lanes, i_sub(i_sub(sums[0], sums[1]), i_sub(sums[2], sums[3])));
  return lanes[0];
}
