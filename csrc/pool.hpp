// Threads of our own. The caller works with them. Each has a share of a phase's pieces, those that follow each other, and
// takes from the others' when it is through: a helper that the system has put aside holds nobody up. Helpers spin for a
// moment after a phase, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace headway {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  /// The first piece of a thread's share.
  int share(int pieces, int thread) const { return static_cast<int>(int64_t(pieces) * thread / threads()); }

  /// work(piece, thread) for each piece in [0, pieces), in any order. Not to be called from two threads at once.
  template <class Work> void run(int pieces, Work&& work, bool alone = false) {
    if (alone || pieces <= 1 || helpers_.empty()) {
      for (int i = 0; i < pieces; ++i) work(i, 0);
      return;
    }
    phase([](void* context, int piece, int thread) { (*static_cast<std::remove_reference_t<Work>*>(context))(piece, thread); },
          &work, pieces);
  }

 private:
  using Call = void (*)(void*, int, int);
  void phase(Call call, void* context, int pieces);
  bool take(int share, int thread);
  void work(int thread);
  bool left(int share) const;
  void help(int thread);

  // The phase's number (24 bits), the end of a share (20) and the next piece to take (20), in one word: whoever takes a
  // piece knows that the phase is still the one whose work he has read.
  struct alignas(64) Share {
    std::atomic<uint64_t> state{0};
  };
  std::unique_ptr<Share[]> shares_;
  uint64_t number_ = 0;
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace headway
