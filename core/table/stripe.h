// The lock of a stripe: many readers or one writer, and no writer waits for ever.
//
// std::shared_mutex lets readers in as long as there is one, so lookups that overlap would keep
// updates out. Here readers that come while a writer waits queue after it.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace trireme {

// Threads: any. The names of its functions are those that std::unique_lock and std::shared_lock
// want. A thread may hold several shared, taken in the order of the stripes; or one alone.
class alignas(64) StripeMutex {
 public:
  StripeMutex() = default;
#if defined(__SANITIZE_THREAD__)
  // The standard's mutexes end without a word to TSan, which would hold the locks of a table that
  // was for those of the next at its address.
  ~StripeMutex() {
    __tsan_mutex_destroy(mutex_.native_handle(), 0);
    __tsan_mutex_destroy(queue_.native_handle(), 0);
  }
#endif
  void lock() {
    std::lock_guard queue(queue_);
    is_awaited_.store(true, std::memory_order_relaxed);
    mutex_.lock();
    is_awaited_.store(false, std::memory_order_relaxed);
  }
  void unlock() { mutex_.unlock(); }

  void lock_shared() {
    if (is_awaited_.load(std::memory_order_relaxed)) std::lock_guard wait(queue_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
  std::atomic<bool> is_awaited_{false};
  std::mutex queue_;
};

}  // namespace trireme
