// A table: rows of weights and state by 64-bit key, in memory.
//
// Rows belong to 4096 buckets (bucket_of), which are read, replaced and dropped one by one. The
// buckets form 64 ranges, the stripes, with a lock each. An update takes each stripe's lock once,
// for the call's keys of that stripe; a lookup takes keys as they come, some thousands at a time.
// Both run in parallel on the caller's pool, and cost least if the keys come in bucket order.
//
// Invariants: applying an update to a stripe's rows and raising the marks of its buckets is one
// critical section, and happens whole or not at all. A lookup changes nothing. Initial weights
// depend on seed and key alone. Threads: any number may call anything at any time. A call sees and
// leaves each bucket at one moment, not all buckets at the same one; a lookup may see a bucket at
// several. Memory: a row takes 8 bytes for its key beside weights and state, and about 7 in the
// index.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/array.h"
#include "base/isa.h"
#include "base/pool.h"
#include "optim/initializer.h"
#include "optim/rule.h"
#include "store/arena.h"
#include "store/index.h"
#include "table/groups.h"
#include "table/marks.h"
#include "table/stripe.h"

namespace trireme {

struct TableConfig {
  std::vector<int> dims;  // weights of a row, per row class; one class for now
  RuleConfig rule;
  std::string initializer = "uniform";
  float init_a = 0.0F;
  float init_b = 0.0F;
  std::uint64_t seed = 0;
  std::string absent = "initial";  // what a lookup answers for an absent key, or "zeros"
  int num_streams_max = 1024;
  std::string simd = "auto";  // see choose_isa
};

// The content of one bucket at one moment.
struct BucketContent {
  Array<std::uint64_t> keys;                                  // (n)
  Array<std::uint8_t> classes;                                // (n): row class of each, 0 for now
  Array<std::uint8_t> rows;                                   // (n, row_bytes): weights, then state
  std::vector<std::pair<std::int64_t, std::uint64_t>> marks;  // (stream, sequence), sequence > 0
};

class Table {
 public:
  // Errors: kBadRequest, naming the value; kResourceExhausted.
  explicit Table(const TableConfig& config);

  int dim() const noexcept { return dim_; }
  int state_floats() const noexcept { return rule_.state_floats(dim_); }
  std::size_t row_bytes() const noexcept { return row_floats() * sizeof(float); }
  Isa isa() const noexcept { return isa_; }
  std::size_t num_rows() const;
  std::size_t bytes() const;  // memory taken from the system

  // Writes the weights of each key; an absent one gets its initial weights, or zeros. Changes
  // nothing. keys: (N), duplicates allowed.  out: (N, dim).  Returns how many were absent.
  std::size_t lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool) const;

  // Applies one step of the rule to each key, making absent rows, and raises the marks of every
  // bucket to `ids`. Keys of buckets that have all ids already are left out: the push was applied
  // before. A key that occurs more than once has the rule applied that often, in order. keys: (K).
  // grads: (K, dim).  Returns the number of keys applied. Errors: kBadRequest, nothing changed;
  // kResourceExhausted, some stripes applied and marked: repeating the call with the same ids
  // finishes it.
  std::size_t update(std::span<const std::uint64_t> keys, const float* grads,
                     std::span<const PushId> ids, const RuleValues& values, Pool& pool);
  // An update without keys.
  void advance(std::span<const PushId> ids);

  // The last sequence of a stream that each bucket has; 0: none.   out, marks: (kNumBuckets).
  // Errors: kBadRequest for a stream outside [0, num_streams_max).
  void marks(std::int64_t stream, std::span<std::uint64_t> out) const;
  void set_marks(std::int64_t stream, std::span<const std::uint64_t> marks);

  // Errors of all four: kBadRequest for a bucket outside [0, kNumBuckets).
  BucketContent snapshot(std::uint32_t bucket) const;
  // Replaces rows and marks of a bucket; marks of streams that are not given become 0. Nothing
  // changes on an error: kBadRequest (a key of another bucket, twice the same key, lengths that do
  // not match, an unknown class, stream or sequence); kResourceExhausted.
  struct BucketView {
    std::span<const std::uint64_t> keys;
    std::span<const std::uint8_t> classes;
    std::span<const std::uint8_t> rows;
    std::span<const std::pair<std::int64_t, std::uint64_t>> marks;
  };
  void restore(std::uint32_t bucket, const BucketView& content);
  // Forgets rows and marks of a bucket.
  void clear_bucket(std::uint32_t bucket);

  // Removes rows; returns how many were there.   keys: (N).
  std::size_t erase(std::span<const std::uint64_t> keys, Pool& pool);
  // out: (N): whether each key has a row.
  void contains(std::span<const std::uint64_t> keys, bool* out, Pool& pool) const;
  // out: (N): where the weights of each key are, null if absent; good until the row is erased. For
  // benchmarks.
  void addresses(std::span<const std::uint64_t> keys, const float** out, Pool& pool) const;

 private:
  class SharedLocks;

  std::size_t row_floats() const noexcept {
    return static_cast<std::size_t>(dim_ + state_floats());
  }
  StripeMutex& mutex_of(std::uint32_t bucket) const noexcept {
    return stripes_[bucket / kBucketsPerStripe];
  }
  template <class Function>
  void for_stripes(std::span<const std::uint64_t> keys, Pool& pool, const Function& function) const;
  template <class Visit, class Settle>
  void find_all(std::span<const std::uint64_t> keys, std::size_t row_bytes, Pool& pool,
                const Visit& visit, const Settle& settle) const;

  std::size_t update_stripe(std::uint32_t stripe, const Group& group, const float* grads,
                            const Advance& advance, const RuleValues& values);
  void apply_group(const Group& group, const float* grads, const RuleValues& values);
  void insert_rows(std::span<const std::uint64_t> keys, std::span<const Arena::Ref> rows,
                   std::vector<Arena::Ref>& scratch) noexcept;
  void write_absent(std::uint64_t key, float* weights) const noexcept;
  void initialize(std::byte* row, std::uint64_t key) const noexcept;
  void check_content(std::uint32_t bucket, const BucketView& content) const;
  void replace(std::uint32_t bucket, const BucketView& content);

  const int dim_;
  const Isa isa_;
  const Rule rule_;
  const Initializer initializer_;
  const bool absent_is_zero_;
  Arena arena_;
  Index index_;  // with the rows it refers to: guarded by their stripes' locks
  Marks marks_;  // the marks of a bucket: guarded by its stripe's lock
  mutable std::array<StripeMutex, kNumStripes> stripes_;
};

}  // namespace trireme
