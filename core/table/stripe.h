// The lock of a stripe: many readers or one writer, and writers do not starve.
//
// std::shared_mutex admits readers as long as one holds it, so overlapping lookups would block
// updates. Here readers that arrive while a writer waits queue behind it.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace trireme {

// Threads: any. The function names are those that std::unique_lock and std::shared_lock require. A
// thread may hold several shared locks, taken in the order of the stripes; or one exclusive lock.
class alignas(64) StripeMutex {
 public:
  StripeMutex() = default;
#if defined(__SANITIZE_THREAD__)
  // The destructors of standard mutexes do not notify TSan. It would take the locks of a destroyed
  // table for those of a new one at the same address.
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
