// Memory that is given back all at once, in large pages where the system has them.
#pragma once

#include <cstddef>
#include <vector>

namespace headway {

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// `bytes` of memory at a multiple of 64.
  void* take(size_t bytes);
  size_t taken() const { return taken_; }

 private:
  struct Region {
    void* start;
    size_t size;
  };
  std::vector<Region> regions_;
  size_t used_ = 0, taken_ = 0;
};

}  // namespace headway
