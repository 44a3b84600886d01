#include "base/pool.h"

#include <atomic>
#include <exception>
#include <string>

#include "base/error.h"

namespace trireme {

struct Pool::Job {
  std::size_t num_tasks;
  void* function;
  Call call;
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  std::exception_ptr error;  // guarded by mutex

  // Runs tasks until none is left; returns when this thread finds nothing more to start.
  void help() {
    for (;;) {
      const std::size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks) return;
      try {
        call(function, i);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tasks) {
        std::lock_guard lock(mutex);  // without it the waiter could miss the notification
        finished.notify_all();
      }
    }
  }
};

Pool::Pool(int threads) {
  if (threads < 1) {
    throw Error(ErrorCode::kBadRequest,
                "Pool: expected threads >= 1, found " + std::to_string(threads));
  }
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_job(std::size_t num_tasks, void* function, Call call) {
  auto job = std::make_shared<Job>();
  job->num_tasks = num_tasks;
  job->function = function;
  job->call = call;
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(job);
  }
  wake_.notify_all();
  job->help();
  std::unique_lock lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done.load(std::memory_order_acquire) == num_tasks; });
  if (job->error) std::rethrow_exception(job->error);
}

void Pool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    if (job->next.load(std::memory_order_relaxed) >= job->num_tasks) {
      jobs_.pop_front();  // nothing left to start; its caller waits for the tasks that still run
      continue;
    }
    lock.unlock();
    job->help();
    lock.lock();
  }
}

}  // namespace trireme
