#define NAME avx512
#define VEC "vec_avx512.hpp"
#include "kernels.inl"

namespace headway {
const Kernels* kernels_avx512() {
  static const Kernels table{"avx512", avx512::BF16_DOT, avx512::panels_at_once, avx512::linear, avx512::norm, avx512::rope, avx512::attention,
                             avx512::products, avx512::read, avx512::argmax};
  return &table;
}
}  // namespace headway
