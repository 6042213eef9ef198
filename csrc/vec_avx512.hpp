// Sixteen float32 lanes in one AVX512 register. Included inside a namespace of its own for each instruction set.
using F = __m512;
using I = __m512i;
using W = __m512i;
constexpr int MAX_UNITS = 2, MAX_ROWS = 14, FEW_PANELS = 4;

inline F f_set(float x) { return _mm512_set1_ps(x); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_abs(F a) { return _mm512_abs_ps(a); }
inline F f_round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F f_pow2(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
inline F f_less(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline F f_first(int n, F yes, F no) {
  return n >= 16 ? yes : n <= 0 ? no : _mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), no, yes);
}
inline float f_hsum(F a) { return _mm512_reduce_add_ps(a); }
inline float f_hmax(F a) { return _mm512_reduce_max_ps(a); }
inline F f_from_int(I a) { return _mm512_cvtepi32_ps(a); }
inline I i_load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void i_store(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I i_zero() { return _mm512_setzero_si512(); }
inline W w_load(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline W w_all(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
inline F w_float(W a) { return _mm512_castsi512_ps(a); }
inline F w_low(W a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline F w_high(W a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
inline void f_to_bf16(uint16_t* p, F x) {  // to nearest even; NaN stays NaN
#ifdef HEADWAY_BF16
  __m256bh rounded = _mm512_cvtneps_pbh(x);
  memcpy(p, &rounded, 32);
#else
  I bits = _mm512_castps_si512(x);
  I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  I sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  I top = _mm512_mask_blend_epi32(nan, _mm512_srli_epi32(sum, 16), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(top));
#endif
}
inline void f_to_u8(uint8_t* p, F x) {  // 128 + the nearest integer
  I n = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(n));
}
inline F dot_bf16(F acc, W x, W w) {
#ifdef HEADWAY_BF16
  return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w);
#else
  return f_fma(w_high(x), w_high(w), f_fma(w_low(x), w_low(w), acc));
#endif
}
inline I dot_i8(I acc, W x, W w) {  // four unsigned bytes of x with four signed ones of w
#ifdef HEADWAY_VNNI
  // By hand: gcc 12 copies the accumulators of the intrinsic to and fro.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
  return acc;
#else
  I low = _mm512_set1_epi32(0x00ff00ff);
  I even = _mm512_madd_epi16(_mm512_and_si512(x, low), _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8));
  I odd = _mm512_madd_epi16(_mm512_and_si512(_mm512_srli_epi16(x, 8), low), _mm512_srai_epi16(w, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}
