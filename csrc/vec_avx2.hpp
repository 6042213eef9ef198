// Sixteen float32 lanes in two AVX registers. Included inside a namespace of its own.
struct F { __m256 a, b; };
struct I { __m256i a, b; };
using W = I;
constexpr int MAX_UNITS = 1, MAX_ROWS = 5, FEW_PANELS = 2;

inline F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_abs(F x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F f_round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F f_pow2(F n) { return {pow2(n.a), pow2(n.b)}; }
inline F f_less(F x, F y, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline F f_first(int n, F yes, F no) {
  F lanes = {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
  return f_less(lanes, f_set(static_cast<float>(n)), yes, no);
}
inline float f_hsum(F x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float f_hmax(F x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline F f_from_int(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I i_load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void i_store(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a), _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline I i_sub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline W w_load(const uint32_t* p) { return i_load(reinterpret_cast<const int32_t*>(p)); }
inline W w_all(const uint32_t* p) {
  __m256i all = _mm256_set1_epi32(static_cast<int>(*p));
  return {all, all};
}
inline F w_float(W x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F w_low(W x) { return w_float({_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)}); }
inline F w_high(W x) {
  __m256i top = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return w_float({_mm256_and_si256(x.a, top), _mm256_and_si256(x.b, top)});
}
inline __m256i rounded(__m256 x) {  // bfloat16 in the low half of each lane
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i top = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(top, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
}
inline void f_to_bf16(uint16_t* p, F x) {
  __m256i both = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline void f_to_u8(uint8_t* p, F x) {
  __m256i offset = _mm256_set1_epi32(128);
  __m256i both = _mm256_packs_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x.a), offset),
                                    _mm256_add_epi32(_mm256_cvtps_epi32(x.b), offset));
  both = _mm256_permute4x64_epi64(both, 0xd8);
  __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline F dot_bf16(F acc, W x, W w) { return f_fma(w_high(x), w_high(w), f_fma(w_low(x), w_low(w), acc)); }
inline __m256i dot_i8(__m256i acc, __m256i x, __m256i w) {
  __m256i low = _mm256_set1_epi32(0x00ff00ff);
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, low), _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(x, 8), low), _mm256_srai_epi16(w, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline I dot_i8(I acc, W x, W w) { return {dot_i8(acc.a, x.a, w.a), dot_i8(acc.b, x.b, w.b)}; }
