#define NAME avx2
#define VEC "vec_avx2.hpp"
#include "kernels.inl"

namespace headway {
const Kernels* kernels_avx2() {
  static const Kernels table{"avx2", avx2::BF16_DOT, avx2::panels_at_once, avx2::linear, avx2::norm, avx2::rope, avx2::attention,
                             avx2::products, avx2::read, avx2::argmax};
  return &table;
}
}  // namespace headway
