#include "base/pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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

  // Runs tasks until none is left to start.
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

struct Pool::Workers {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<Job>> jobs;  // guarded by mutex; at most one per running caller
  bool stopping = false;                  // guarded by mutex
  std::vector<std::thread> threads;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || !jobs.empty(); });
      if (stopping) return;
      const std::shared_ptr<Job> job = jobs.front();
      if (job->next.load(std::memory_order_relaxed) >= job->num_tasks) {
        jobs.pop_front();  // all tasks are started; the caller waits for those that still run
        continue;
      }
      lock.unlock();
      job->help();
      lock.lock();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (auto& thread : threads) thread.join();
  }
};

Pool::Pool(int threads)
    : threads_(threads), process_(getpid()), workers_(std::make_unique<Workers>()) {
  if (threads < 1) {
    throw Error(ErrorCode::kBadRequest,
                "Pool: expected threads >= 1, found " + std::to_string(threads));
  }
  workers_->threads.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) {
    try {
      workers_->threads.emplace_back([workers = workers_.get()] { workers->work(); });
    } catch (const std::system_error& error) {
      workers_->stop();
      throw Error(ErrorCode::kResourceExhausted,
                  "Pool: expected " + std::to_string(threads) + " threads, found that the system" +
                      " refuses number " + std::to_string(i) + ": " + error.code().message() +
                      ": use fewer, or allow the process more (ulimit -u, pids.max of its cgroup)");
    }
  }
}

Pool::~Pool() {
  if (is_forked()) {
    (void)workers_.release();
    return;
  }
  workers_->stop();
}

bool Pool::is_forked() const noexcept { return getpid() != process_; }

void Pool::run_job(std::size_t num_tasks, void* function, Call call) {
  auto job = std::make_shared<Job>();
  job->num_tasks = num_tasks;
  job->function = function;
  job->call = call;
  {
    std::lock_guard lock(workers_->mutex);
    workers_->jobs.push_back(job);
  }
  workers_->wake.notify_all();
  job->help();
  std::unique_lock lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done.load(std::memory_order_acquire) == num_tasks; });
  // Not shared with the job, whose last holder may be a thread of the pool: who catches the error
  // is who ends it.
  const std::exception_ptr error = std::exchange(job->error, nullptr);
  lock.unlock();
  if (error) std::rethrow_exception(error);
}

}  // namespace trireme
