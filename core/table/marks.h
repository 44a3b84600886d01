// The last sequence applied per stream and bucket. With it every push is applied exactly once.
//
// A push is identified by (stream, sequence); a stream's sequences start at 1 and increase. Mark 0:
// nothing applied yet. Threads: of() and streams() may be called by any thread; the marks
// themselves are guarded by the stripes' locks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "store/index.h"

namespace trireme {

struct PushId {
  std::int64_t stream;
  std::int64_t sequence;
};

// The marks of one stream. The buckets of a stripe nearly always have the same mark, which is held
// once: a push raises 64 marks, not 4,096. They differ after a load of buckets that were saved at
// different moments, until the next push. Threads: guarded by the stripes' locks.
class StreamMarks {
 public:
  std::uint64_t operator[](std::uint32_t bucket) const noexcept;
  // Bit i: bucket i of the stripe has this sequence.
  std::uint64_t reached(std::uint32_t stripe, std::uint64_t sequence) const noexcept;

  // The marks of a stripe. Errors: std::bad_alloc.
  void assign(std::uint32_t stripe, std::span<const std::uint64_t, kBucketsPerStripe> marks);
  // Lets the marks of a stripe differ. Errors: std::bad_alloc.
  void part(std::uint32_t stripe);
  // Requires: part().
  void set(std::uint32_t bucket, std::uint64_t mark) noexcept;
  // Raises the marks of the stripe's buckets but those whose bits are set in `passed_over`.
  // Requires: part(), if there are any.
  void raise(std::uint32_t stripe, std::uint64_t sequence, std::uint64_t passed_over) noexcept;

  // From any thread.
  std::size_t bytes() const noexcept;

 private:
  using Parted = std::array<std::uint64_t, kBucketsPerStripe>;

  // Holds the marks of a stripe once, if they are equal.
  void join(std::uint32_t stripe) noexcept;

  std::array<std::uint64_t, kNumStripes> equal_{};             // of all buckets of a stripe
  std::array<std::unique_ptr<Parted>, kNumStripes> parted_{};  // where they differ
  std::atomic<std::size_t> num_parted_ = 0;
};

class Marks {
 public:
  explicit Marks(int num_streams_max);

  // The marks of a stream; created at its first use, and never moved.
  // Errors: kBadRequest if the stream is not in [0, num_streams_max).
  StreamMarks& of(std::int64_t stream);
  // The same, but null for a stream that is not used yet.
  const StreamMarks* find(std::int64_t stream) const;

  // Every stream seen so far, by number.
  std::vector<std::pair<std::int64_t, StreamMarks*>> streams() const;

  std::size_t bytes() const;

 private:
  using Stream = std::pair<std::int64_t, std::unique_ptr<StreamMarks>>;

  void check(std::int64_t stream) const;

  const std::int64_t num_streams_max_;
  mutable std::mutex mutex_;
  std::vector<Stream> streams_;  // those seen so far, by number; guarded by mutex_
};

// A push, or the pushes merged into one gradient, with the marks that it advances.
class Advance {
 public:
  // Errors: kBadRequest without ids, for an unknown stream, or a sequence < 1.
  Advance(std::span<const PushId> ids, Marks& marks);

  // Bit i: bucket i of the stripe has one of the ids already. Requires: the stripe's lock.
  std::uint64_t applied(std::uint32_t stripe) const noexcept;
  // Lets the stripe's marks differ, for a raise() that passes over some buckets.
  // Requires: the stripe's lock. Errors: std::bad_alloc.
  void part(std::uint32_t stripe) const;
  // Raises the marks of the stripe's buckets but those whose bits are set in `passed_over`.
  // Requires: the stripe's lock; part(), if there are any.
  void raise(std::uint32_t stripe, std::uint64_t passed_over = 0) const noexcept;

 private:
  std::vector<std::pair<StreamMarks*, std::uint64_t>> ids_;
};

}  // namespace trireme
