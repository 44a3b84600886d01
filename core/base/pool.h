// A pool of threads that runs one function for many task numbers. The calling thread works too.
//
// Threads: any number of callers may run jobs at the same time; they share the pool's threads.
// Tasks must not call run() themselves. The pool owns its threads and joins them in the destructor,
// which must not race a run().
//
// Processes: a forked child has none of the threads, and their locks may stay held for ever. In a
// child, run() uses the calling thread alone and the destructor does nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace trireme {

class Pool {
 public:
  // Requires: threads >= 1, the caller of run() included. Errors: kBadRequest, naming the value;
  // kResourceExhausted: the system refuses threads.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const noexcept { return threads_; }

  // Calls function(i) once for every i in [0, num_tasks) and returns when all have returned.
  // The first exception that a task throws is thrown here, after the other tasks have ended.
  template <class Function>
  void run(std::size_t num_tasks, Function&& function) {
    if (num_tasks <= 1 || threads_ == 1 || is_forked()) {
      for (std::size_t i = 0; i < num_tasks; ++i) function(i);
      return;
    }
    run_job(num_tasks, &function, [](void* f, std::size_t i) {
      (*static_cast<std::remove_reference_t<Function>*>(f))(i);
    });
  }

 private:
  struct Job;
  struct Workers;
  using Call = void (*)(void*, std::size_t);
  bool is_forked() const noexcept;
  void run_job(std::size_t num_tasks, void* function, Call call);

  int threads_;
  int process_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace trireme
