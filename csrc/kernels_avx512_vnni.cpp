#define HEADWAY_VNNI
#define NAME avx512_vnni
#define VEC "vec_avx512.hpp"
#include "kernels.inl"

namespace headway {
const Kernels* kernels_avx512_vnni() {
  static const Kernels table{"avx512_vnni", avx512_vnni::BF16_DOT, avx512_vnni::panels_at_once, avx512_vnni::linear, avx512_vnni::norm, avx512_vnni::rope, avx512_vnni::attention,
                             avx512_vnni::products, avx512_vnni::read, avx512_vnni::argmax};
  return &table;
}
}  // namespace headway
