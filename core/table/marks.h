// The last sequence applied per stream and bucket. With it every push is applied exactly once.
//
// A push is identified by (stream, sequence); a stream's sequences start at 1 and increase. Mark 0:
// nothing applied yet. Threads: of() and streams() may be called by any thread; the marks
// themselves are guarded by the stripes' locks.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/hash.h"

namespace trireme {

struct PushId {
  std::int64_t stream;
  std::int64_t sequence;
};

class Marks {
 public:
  using Array = std::array<std::uint64_t, kNumBuckets>;

  explicit Marks(int num_streams_max);

  // The marks of a stream; created at its first use, and never moved.
  // Errors: kBadRequest if the stream is not in [0, num_streams_max).
  Array& of(std::int64_t stream);
  // The same, but null for a stream that is not used yet.
  const Array* find(std::int64_t stream) const;

  // Every stream seen so far.
  std::vector<std::pair<std::int64_t, Array*>> streams() const;

  std::size_t bytes() const;

 private:
  void check(std::int64_t stream) const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Array>> arrays_;  // guarded by mutex_
};

// A push, or the pushes merged into one gradient, with the marks that it advances.
class Advance {
 public:
  // Errors: kBadRequest without ids, for an unknown stream, or a sequence < 1.
  Advance(std::span<const PushId> ids, Marks& marks);

  // Bit i: bucket first_bucket + i has one of the ids already. Requires: the stripe's lock.
  std::uint64_t applied(std::uint32_t first_bucket) const noexcept;
  // Raises the marks of the stripe's buckets but those whose bits are set in `passed_over`.
  // Requires: the stripe's lock.
  void raise(std::uint32_t first_bucket, std::uint64_t passed_over = 0) const noexcept;

 private:
  std::vector<std::pair<Marks::Array*, std::uint64_t>> ids_;
};

}  // namespace trireme
