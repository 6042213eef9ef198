// Sixteen float32 lanes in four vectors of four, which compilers lower to whatever the machine has. Included inside a
// namespace of its own. Products are rounded before they are added: no machine is asked for a fused operation.
typedef float V __attribute__((vector_size(16)));
typedef int32_t N __attribute__((vector_size(16)));
struct F { V v[4]; };
struct I { N v[4]; };
using W = I;
constexpr int MAX_UNITS = 1, MAX_ROWS = 2, FEW_PANELS = 1;

template <class OP> inline F each(OP op) { return {{op(0), op(1), op(2), op(3)}}; }
template <class OP> inline I each_int(OP op) { return {{op(0), op(1), op(2), op(3)}}; }
inline V choose(N mask, V yes, V no) { return (V)(((N)yes & mask) | ((N)no & ~mask)); }
template <class T> inline T loaded(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

inline F f_set(float x) { V v = {x, x, x, x}; return {{v, v, v, v}}; }
inline F f_load(const float* p) { return each([&](int i) { return loaded<V>(p + 4 * i); }); }
inline void f_store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
inline F f_add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F f_sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F f_mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F f_div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline F f_fma(F a, F b, F c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F f_max(F a, F b) { return each([&](int i) { return choose(a.v[i] > b.v[i], a.v[i], b.v[i]); }); }
inline F f_min(F a, F b) { return each([&](int i) { return choose(a.v[i] < b.v[i], a.v[i], b.v[i]); }); }
inline F f_abs(F a) { return each([&](int i) { return (V)((N)a.v[i] & 0x7fffffff); }); }
inline F f_round(F a) {  // of less than 2^22
  V magic = {12582912.f, 12582912.f, 12582912.f, 12582912.f};
  return each([&](int i) { return (a.v[i] + magic) - magic; });
}
inline I to_int(F a) { return each_int([&](int i) { return __builtin_convertvector(a.v[i], N); }); }
inline F f_pow2(F n) {
  I k = to_int(n);
  return each([&](int i) { return (V)((k.v[i] + 127) << 23); });
}
inline F f_less(F a, F b, F yes, F no) { return each([&](int i) { return choose(a.v[i] < b.v[i], yes.v[i], no.v[i]); }); }
inline F f_first(int n, F yes, F no) {
  N lanes = {0, 1, 2, 3};
  return each([&](int i) { return choose(lanes + 4 * i < n, yes.v[i], no.v[i]); });
}
inline float f_hsum(F a) {
  V s = (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
inline float f_hmax(F a) {
  float best = a.v[0][0];
  for (int i = 0; i < 16; ++i) best = a.v[i / 4][i % 4] > best ? a.v[i / 4][i % 4] : best;
  return best;
}
inline F f_from_int(I a) { return each([&](int i) { return __builtin_convertvector(a.v[i], V); }); }
inline I i_load(const int32_t* p) { return each_int([&](int i) { return loaded<N>(p + 4 * i); }); }
inline void i_store(int32_t* p, I x) { __builtin_memcpy(p, &x, sizeof x); }
inline I i_sub(I a, I b) { return each_int([&](int i) { return a.v[i] - b.v[i]; }); }
inline I i_zero() { return {}; }
inline W w_load(const uint32_t* p) { return i_load(reinterpret_cast<const int32_t*>(p)); }
inline W w_all(const uint32_t* p) {
  int32_t x = static_cast<int32_t>(*p);
  N v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline F w_float(W a) { return each([&](int i) { return (V)a.v[i]; }); }
inline F w_low(W a) { return each([&](int i) { return (V)(a.v[i] << 16); }); }
inline F w_high(W a) { return each([&](int i) { return (V)(a.v[i] & static_cast<int32_t>(0xffff0000u)); }); }
inline void f_to_bf16(uint16_t* p, F x) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits = loaded<uint32_t>(reinterpret_cast<const float*>(&x) + i);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    p[i] = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
inline void f_to_u8(uint8_t* p, F x) {
  I n = to_int(f_round(x));
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(n.v[i / 4][i % 4] + 128);
}
inline F dot_bf16(F acc, W x, W w) { return f_fma(w_high(x), w_high(w), f_fma(w_low(x), w_low(w), acc)); }
inline I dot_i8(I acc, W x, W w) {
  return each_int([&](int i) {
    N sum = acc.v[i];
    for (int bit = 0; bit < 32; bit += 8) sum += ((x.v[i] >> bit) & 255) * ((w.v[i] << (24 - bit)) >> 24);
    return sum;
  });
}
