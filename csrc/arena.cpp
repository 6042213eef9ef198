#include "arena.hpp"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headway {
namespace {
constexpr size_t LARGE_PAGE = size_t(2) << 20, REGION = size_t(32) << 20;
constexpr size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
}  // namespace

Arena::~Arena() {
  for (auto& region : regions_) std::free(region.start);
}

void* Arena::take(size_t bytes) {
  bytes = up(bytes, 64);
  if (regions_.empty() || used_ + bytes > regions_.back().size) {
    const size_t size = bytes > REGION ? up(bytes, LARGE_PAGE) : REGION;
    void* start = std::aligned_alloc(LARGE_PAGE, size);
    if (!start) throw std::bad_alloc();
#if defined(__linux__)
    madvise(start, size, MADV_HUGEPAGE);
#endif
    regions_.push_back({start, size});
    used_ = 0;
  }
  void* p = static_cast<char*>(regions_.back().start) + used_;
  used_ += bytes;
  taken_ += bytes;
  return p;
}

}  // namespace headway
