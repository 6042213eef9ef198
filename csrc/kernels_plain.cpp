#define NAME plain
#define VEC "vec_plain.hpp"
#include "kernels.inl"

namespace headway {
const Kernels* kernels_plain() {
  static const Kernels table{"plain", plain::BF16_DOT, plain::panels_at_once, plain::linear, plain::norm, plain::rope, plain::attention,
                             plain::products, plain::read, plain::argmax};
  return &table;
}
}  // namespace headway
