// A pool of threads that runs one function over many task numbers; the caller works too.
//
// Threads: any number of callers may run jobs at the same time; they share the pool's threads.
// Tasks must not call run() themselves. The pool owns its threads and joins them in the destructor,
// which must not race a run().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trireme {

class Pool {
 public:
  // Requires: threads >= 1, the caller of run() included. Errors: kBadRequest, naming the value.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls function(i) once for every i in [0, num_tasks) and returns when all have returned.
  // The first exception that a task throws is thrown here, after the other tasks have ended.
  template <class Function>
  void run(std::size_t num_tasks, Function&& function) {
    if (num_tasks <= 1 || workers_.empty()) {
      for (std::size_t i = 0; i < num_tasks; ++i) function(i);
      return;
    }
    run_job(num_tasks, &function, [](void* f, std::size_t i) {
      (*static_cast<std::remove_reference_t<Function>*>(f))(i);
    });
  }

 private:
  struct Job;
  using Call = void (*)(void*, std::size_t);
  void run_job(std::size_t num_tasks, void* function, Call call);
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>>
      jobs_;               // guarded by mutex_; at most one entry per running caller
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace trireme
