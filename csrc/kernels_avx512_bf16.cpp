#define HEADWAY_BF16
#define HEADWAY_VNNI
#define NAME avx512_bf16
#define VEC "vec_avx512.hpp"
#include "kernels.inl"

namespace headway {
const Kernels* kernels_avx512_bf16() {
  static const Kernels table{"avx512_bf16", avx512_bf16::BF16_DOT, avx512_bf16::panels_at_once, avx512_bf16::linear, avx512_bf16::norm, avx512_bf16::rope, avx512_bf16::attention,
                             avx512_bf16::products, avx512_bf16::read, avx512_bf16::argmax};
  return &table;
}
}  // namespace headway
