#include "pool.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {
namespace {

constexpr uint64_t PIECE = (1u << 20) - 1;
constexpr int SPINS = 64;                                      // looks between two looks at the clock
constexpr auto AWAKE = std::chrono::microseconds(200);         // how long a helper spins before it sleeps
constexpr auto PATIENCE = std::chrono::microseconds(20);       // how long anybody spins before he lets others run

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) : shares_(new Share[threads > 0 ? threads : 1]) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
}

Pool::~Pool() {
  stop_ = true;
  ++wake_;
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

bool Pool::left(int share) const {
  const uint64_t state = shares_[share].state.load(std::memory_order_seq_cst);
  return (state & PIECE) < (state >> 20 & PIECE);
}

bool Pool::take(int share, int thread) {
  auto& word = shares_[share].state;
  uint64_t state = word.load(std::memory_order_acquire);
  while ((state & PIECE) < (state >> 20 & PIECE)) {
    const Call call = call_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    if (word.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      call(context, static_cast<int>(state & PIECE), thread);
      done_.fetch_add(1, std::memory_order_acq_rel);
      return true;
    }
  }
  return false;
}

void Pool::work(int thread) {
  const int count = threads();
  for (int i = 0; i < count; ++i)
    while (take((thread + i) % count, thread)) {}
}

void Pool::phase(Call call, void* context, int pieces) {
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ++number_;
  for (int i = 0; i < threads(); ++i) {
    const auto begin = static_cast<uint64_t>(share(pieces, i)), end = static_cast<uint64_t>(share(pieces, i + 1));
    shares_[i].state.store(number_ << 40 | end << 20 | begin, std::memory_order_seq_cst);
  }
  if (asleep_.load(std::memory_order_seq_cst)) {
    ++wake_;
    wake_.notify_all();
  }
  work(0);
  auto give_way = std::chrono::steady_clock::time_point::max();
  for (int i = 0; done_.load(std::memory_order_acquire) != pieces; ++i) {
    breathe();
    if (i == SPINS) give_way = std::chrono::steady_clock::now() + PATIENCE;
    if (i > SPINS && i % SPINS == 0 && std::chrono::steady_clock::now() > give_way) std::this_thread::yield();
  }
}

void Pool::help(int thread) {
  while (!stop_.load(std::memory_order_relaxed)) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; !left(thread); ++i) {
      breathe();
      if (i % SPINS) continue;
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > AWAKE) break;
      if (waited > PATIENCE) std::this_thread::yield();
    }
    if (left(thread)) {
      work(thread);
      continue;
    }
    const uint32_t seen = wake_.load();
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    if (!left(thread) && !stop_) wake_.wait(seen);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace headway
