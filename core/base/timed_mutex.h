// A mutex that a thread can give up waiting for. In place of std::timed_mutex, whose waits the
// thread sanitizer does not see.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace trireme {

class TimedMutex {
 public:
  bool try_lock() { return try_lock_for(std::chrono::milliseconds{0}); }
  bool try_lock_for(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!is_free_again_.wait_for(lock, timeout, [this] { return !is_locked_; })) return false;
    is_locked_ = true;
    return true;
  }
  void unlock() {
    {
      std::lock_guard lock(mutex_);
      is_locked_ = false;
    }
    is_free_again_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable is_free_again_;
  bool is_locked_ = false;
};

}  // namespace trireme
