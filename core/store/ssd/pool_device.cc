// Threads that call pread and pwrite, for systems that forbid io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <thread>

#include "base/error.h"
#include "store/ssd/folder.h"

namespace trireme::ssd {

namespace {

class PoolQueue;

// A transfer of a queue that waits for a thread.
struct Job {
  PoolQueue* queue;
  std::uint32_t slot;
  Transfer transfer;
  int num_tries = 0;
};

constexpr int kTriesMax = 1000;  // of a transfer that the system puts off

// The threads of a device. Its queues bound the jobs: each has at most as many as its depth.
class Workers {
 public:
  explicit Workers(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    has_jobs_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void add(std::span<const Job> jobs) {
    {
      std::lock_guard lock(mutex_);
      jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
    }
    jobs.size() == 1 ? has_jobs_.notify_one() : has_jobs_.notify_all();
  }

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable has_jobs_;
  std::deque<Job> jobs_;    // guarded by mutex_
  bool is_ending_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

class PoolQueue : public Queue {
 public:
  PoolQueue(std::size_t depth, Workers& workers) : workers_(workers), slots_(depth) {}
  ~PoolQueue() override {
    // Without a deadline: a thread in pread cannot be interrupted and writes into their memory.
    std::unique_lock lock(mutex_);
    has_results_.wait(lock, [&] { return results_.size() == slots_.num_taken(); });
  }

  std::size_t depth() const noexcept override { return slots_.depth(); }
  std::size_t num_in_flight() const noexcept override { return slots_.num_taken(); }

  std::size_t submit(std::span<const Transfer> transfers) override {
    for (const Transfer& transfer : transfers) check_transfer(transfer);
    const std::size_t n = std::min(transfers.size(), depth() - num_in_flight());
    std::vector<Job> jobs;
    for (const Transfer& transfer : transfers.first(n)) {
      jobs.push_back({.queue = this, .slot = slots_.take(transfer), .transfer = transfer});
    }
    if (n > 0) workers_.add(jobs);
    return n;
  }

  std::size_t reap(std::span<Finished> finished, std::size_t num_min,
                   std::chrono::milliseconds timeout) override {
    TRIREME_CHECK(num_min <= num_in_flight() && num_min <= finished.size());
    std::unique_lock lock(mutex_);
    if (!has_results_.wait_for(lock, timeout, [&] { return results_.size() >= num_min; })) {
      throw Error(ErrorCode::kDeadlineExceeded,
                  "Queue.reap: expected " + std::to_string(num_min) + " transfers to end within " +
                      std::to_string(timeout.count()) + " ms, found " +
                      std::to_string(results_.size()));
    }
    std::size_t n = 0;
    for (; n < finished.size() && !results_.empty(); ++n) {
      const auto [slot, result] = results_.front();
      results_.pop_front();
      const bool has_ended = slots_.note(slot, result, finished[n]) == Slots::State::kEnded;
      TRIREME_CHECK(has_ended);
    }
    return n;
  }

  // From the threads: a transfer has ended. result: all its bytes, or what Slots::note takes.
  void end(std::uint32_t slot, std::int64_t result) {
    std::lock_guard lock(mutex_);
    results_.emplace_back(slot, result);
    has_results_.notify_one();  // with the lock: the queue may end as soon as it sees the result
  }

 private:
  Workers& workers_;
  Slots slots_;  // of the caller's thread
  std::mutex mutex_;
  std::condition_variable has_results_;
  std::deque<std::pair<std::uint32_t, std::int64_t>> results_;  // guarded by mutex_
};

// Calls the system until all is transferred, or a call fails or moves half a block.
std::int64_t carry_out(const Transfer& transfer) {
  std::span<std::byte> rest = transfer.bytes;
  off_t offset = static_cast<off_t>(transfer.offset);
  while (!rest.empty()) {
    const ssize_t moved = transfer.kind == Transfer::Kind::kRead
                              ? ::pread(transfer.file, rest.data(), rest.size(), offset)
                              : ::pwrite(transfer.file, rest.data(), rest.size(), offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    const auto num_bytes = static_cast<std::size_t>(moved);
    rest = rest.subspan(num_bytes);
    offset += moved;
    if (num_bytes == 0 || num_bytes % kBlockBytes != 0) break;
  }
  if (rest.empty()) return static_cast<std::int64_t>(transfer.bytes.size());
  return transfer.kind == Transfer::Kind::kRead ? -ENODATA : -ENOSPC;
}

void Workers::work() {
  while (true) {
    std::unique_lock lock(mutex_);
    has_jobs_.wait(lock, [&] { return is_ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = jobs_.front();
    jobs_.pop_front();
    lock.unlock();
    const std::int64_t result = carry_out(job.transfer);
    if (result != -EAGAIN) {
      job.queue->end(job.slot, result);
    } else if (++job.num_tries < kTriesMax) {
      add({&job, 1});  // after those that wait
    } else {
      job.queue->end(job.slot, -EBUSY);
    }
  }
}

class PoolDevice : public Folder {
 public:
  PoolDevice(const std::string& folder, int num_threads) : Folder(folder), workers_(num_threads) {}

  std::unique_ptr<Queue> make_queue(std::size_t depth) override {
    if (depth < 1) {
      throw Error(ErrorCode::kBadRequest, "ssd: expected a depth of at least 1, found 0");
    }
    return std::make_unique<PoolQueue>(depth, workers_);
  }

 private:
  Workers workers_;
};

}  // namespace

std::unique_ptr<Device> pool_device(const std::string& folder, int num_threads) {
  if (num_threads < 1) {
    throw Error(ErrorCode::kBadRequest,
                "ssd: expected at least 1 thread, found " + std::to_string(num_threads));
  }
  return std::make_unique<PoolDevice>(folder, num_threads);
}

}  // namespace trireme::ssd
