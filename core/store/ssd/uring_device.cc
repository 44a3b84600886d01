// io_uring by its system calls: a queue is a ring of its own.
//
// Of the two sides of a ring the kernel moves one end of each: it reads the submissions' tail and
// writes the completions' tail, which are therefore accessed as atomics.
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/error.h"
#include "store/ssd/folder.h"

namespace trireme::ssd {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr std::size_t kDepthMax = 4096;
constexpr std::chrono::seconds kLastWait{3600};

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(ErrorCode::kUnavailable, "ssd: expected " + what + " of io_uring, found " +
                                           std::generic_category().message(error));
}

constexpr unsigned kCoopTaskrun = 1U << 8;  // IORING_SETUP_..., which older headers lack

// As of Linux 5.19 transfers that end need not interrupt the thread that began them, which takes a
// tenth of a read's CPU: it notes them when it enters the kernel next.
int setup(unsigned num_entries, io_uring_params& params) {
  params.flags = kCoopTaskrun;
  const auto make = [&] {
    return static_cast<int>(::syscall(__NR_io_uring_setup, num_entries, &params));
  };
  const int descriptor = make();
  if (descriptor >= 0 || errno != EINVAL) return descriptor;
  params = {};
  return make();
}

// Memory that the kernel shares with this process.
class Shared {
 public:
  Shared(int ring, std::size_t size, off_t offset)
      : size_(size),
        data_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                     offset)) {
    if (data_ == MAP_FAILED) fail("memory", errno);
  }
  ~Shared() { ::munmap(data_, size_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  template <class T>
  T* at(std::uint32_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }

 private:
  const std::size_t size_;
  void* const data_;
};

class Ring {
 public:
  explicit Ring(unsigned num_entries) : descriptor_(setup(num_entries, params_)) {
    if (descriptor_ < 0) fail("a ring", errno);
    constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG;
    if ((params_.features & kNeeded) == kNeeded) return;
    ::close(descriptor_);
    fail("what Linux 5.11 has", ENOSYS);
  }
  ~Ring() { ::close(descriptor_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  const io_uring_params& params() const noexcept { return params_; }
  int descriptor() const noexcept { return descriptor_; }
  std::size_t bytes() const noexcept {
    return std::max(params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                    params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe));
  }

 private:
  io_uring_params params_{};
  const int descriptor_;
};

class UringQueue : public Queue {
 public:
  explicit UringQueue(std::size_t depth)
      : ring_(static_cast<unsigned>(std::bit_ceil(depth))),
        rings_(ring_.descriptor(), ring_.bytes(), IORING_OFF_SQ_RING),
        entries_(ring_.descriptor(), ring_.params().sq_entries * sizeof(io_uring_sqe),
                 IORING_OFF_SQES),
        slots_(depth) {}

  ~UringQueue() override {
    std::vector<Finished> rest(num_in_flight());
    try {
      reap(rest, rest.size(), kLastWait);
    } catch (const Error&) {
      TRIREME_CHECK(!"a device writes into memory that is about to be freed");
    }
  }

  std::size_t depth() const noexcept override { return slots_.depth(); }
  std::size_t num_in_flight() const noexcept override { return slots_.num_taken() + ended_.size(); }

  std::size_t submit(std::span<const Transfer> transfers) override {
    for (const Transfer& transfer : transfers) check_transfer(transfer);
    const std::size_t n = std::min(transfers.size(), depth() - num_in_flight());
    for (const Transfer& transfer : transfers.first(n)) enqueue(slots_.take(transfer));
    if (n > 0) enter(0, nanoseconds{0});
    return n;
  }

  std::size_t reap(std::span<Finished> finished, std::size_t num_min,
                   std::chrono::milliseconds timeout) override {
    TRIREME_CHECK(num_min <= num_in_flight() && num_min <= finished.size());
    const Clock::time_point deadline = Clock::now() + timeout;
    std::size_t n = collect(finished);
    while (n < num_min) {
      const nanoseconds left = deadline - Clock::now();
      if (left <= nanoseconds{0}) {
        // Those that have ended are returned by the next call.
        ended_.insert(ended_.end(), finished.begin(), finished.begin() + n);
        throw Error(ErrorCode::kDeadlineExceeded,
                    "Queue.reap: expected " + std::to_string(num_min) +
                        " transfers to end within " + std::to_string(timeout.count()) +
                        " ms, found " + std::to_string(n));
      }
      enter(static_cast<unsigned>(num_min - n), left);
      n += collect(finished.subspan(n));
    }
    return n;
  }

 private:
  // Puts what is left of a transfer into the ring, which has an entry for each slot.
  void enqueue(std::uint32_t slot) {
    const auto& offsets = ring_.params().sq_off;
    unsigned& tail = *rings_.at<unsigned>(offsets.tail);
    const unsigned index = tail & *rings_.at<unsigned>(offsets.ring_mask);
    const Transfer& rest = slots_.rest(slot);
    io_uring_sqe& entry = *entries_.at<io_uring_sqe>(index * sizeof(io_uring_sqe));
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = rest.kind == Transfer::Kind::kRead ? IORING_OP_READ : IORING_OP_WRITE;
    entry.fd = rest.file;
    entry.off = rest.offset;
    entry.addr = reinterpret_cast<std::uint64_t>(rest.bytes.data());
    entry.len = static_cast<unsigned>(rest.bytes.size());
    entry.user_data = slot;
    rings_.at<unsigned>(offsets.array)[index] = index;
    std::atomic_ref(tail).store(tail + 1, std::memory_order_release);
    ++num_queued_;
  }

  // Hands over what is queued, and waits for this many completions.
  void enter(unsigned num_min, nanoseconds timeout) {
    __kernel_timespec time{.tv_sec = timeout.count() / 1'000'000'000,
                           .tv_nsec = timeout.count() % 1'000'000'000};
    io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<std::uint64_t>(&time);
    const unsigned flags = num_min > 0 ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0U;
    const long taken =
        ::syscall(__NR_io_uring_enter, ring_.descriptor(), num_queued_, num_min, flags,
                  num_min > 0 ? &argument : nullptr, num_min > 0 ? sizeof argument : 0);
    if (taken >= 0) {
      num_queued_ -= static_cast<unsigned>(taken);
    } else if (errno != EINTR && errno != ETIME && errno != EAGAIN && errno != EBUSY) {
      fail("an answer", errno);
    }  // else what is queued is handed over by the next call
  }

  std::size_t collect(std::span<Finished> finished) {
    const std::size_t num_kept = std::min(ended_.size(), finished.size());
    std::copy_n(ended_.begin(), num_kept, finished.begin());
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(num_kept));
    std::size_t n = num_kept;
    const auto& offsets = ring_.params().cq_off;
    unsigned& head = *rings_.at<unsigned>(offsets.head);
    const unsigned mask = *rings_.at<unsigned>(offsets.ring_mask);
    const auto* completions = rings_.at<io_uring_cqe>(offsets.cqes);
    while (
        n < finished.size() &&
        head !=
            std::atomic_ref(*rings_.at<unsigned>(offsets.tail)).load(std::memory_order_acquire)) {
      const io_uring_cqe completion = completions[head & mask];
      std::atomic_ref(head).store(head + 1, std::memory_order_release);
      const auto slot = static_cast<std::uint32_t>(completion.user_data);
      if (slots_.note(slot, completion.res, finished[n]) == Slots::State::kEnded) {
        ++n;
      } else {
        enqueue(slot);
      }
    }
    if (num_queued_ > 0) enter(0, nanoseconds{0});
    return n;
  }

  Ring ring_;
  const Shared rings_, entries_;
  Slots slots_;
  unsigned num_queued_ = 0;      // in the ring, and not handed over yet
  std::vector<Finished> ended_;  // reaped from the ring by a call that then failed
};

class UringDevice : public Folder {
 public:
  explicit UringDevice(const std::string& folder) : Folder(folder) { Ring is_there(1); }

  std::unique_ptr<Queue> make_queue(std::size_t depth) override {
    if (depth < 1 || depth > kDepthMax) {
      throw Error(ErrorCode::kBadRequest, "ssd: expected a depth in [1, " +
                                              std::to_string(kDepthMax) + "], found " +
                                              std::to_string(depth));
    }
    return std::make_unique<UringQueue>(depth);
  }
};

}  // namespace

std::unique_ptr<Device> uring_device(const std::string& folder) {
  return std::make_unique<UringDevice>(folder);
}

}  // namespace trireme::ssd
