// Admission: which keys without a row get one when a push contains them.
//
//   count_filter  the push with which a key has occurred n times; counted exactly (PendingCounts)
//   or
//                 in bounded memory (CountSketch), where a key may come early, never late
//   probability   a draw for each push: push_bits(seed, 2, key, stream, sequence) >> 11 < p * 2^53
//   score_filter  a push whose own score of the key is at least the threshold
//
// Counts belong to the key's bucket, and are saved, moved and dropped with it. The count of a key
// is dropped when it gets its row. A sketch cannot drop single keys, so there a key that has lost
// its row is admitted again at once. forget_before() drops old counts.
//
// Threads: the state of a bucket is guarded by its stripe's lock; the rest is constant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/array.h"
#include "table/count_sketch.h"
#include "table/marks.h"
#include "table/pending_counts.h"

namespace trireme {

// The header of the pending state of a bucket in files and messages, little-endian.
struct PendingHeader {
  static constexpr std::uint8_t kVersion = 1;
  enum Kind : std::uint8_t { kCounts = 1, kSketch = 2 };

  std::uint8_t version;
  std::uint8_t kind;
  std::uint8_t depth;  // of a sketch, like the next two fields; else 0
  std::uint8_t cell_bytes;
  std::uint32_t width;
  std::uint64_t total;      // pending keys, or occurrences that the sketch counted
  std::uint32_t n;          // of the filter
  std::uint32_t halved_at;  // of a sketch, see CountSketch
};
static_assert(sizeof(PendingHeader) == 24);

struct AdmissionConfig {
  std::string name;                // "": every key; else as above
  std::uint32_t n = 1;             // count_filter
  std::uint64_t sketch_bytes = 0;  // count_filter: of the whole table; 0: exact counts
  double p = 1.0;                  // probability
  double threshold = 0.0;          // score_filter
};

// The data of a push about one key.
struct Occurrence {
  std::uint64_t key;
  std::uint32_t count;  // occurrences of the key in the batch
  double score;         // of the push's show and click
  std::uint32_t time;   // data time of the push, seconds
};

class Admission {
 public:
  // The pending state of one bucket.
  struct Pending {
    PendingCounts counts;
    CountSketch sketch;
  };

  // Errors: kBadRequest, naming the value.
  Admission(const AdmissionConfig& config, std::uint64_t seed);

  bool admits_all() const noexcept { return kind_ == Kind::kAll; }
  bool reads_score() const noexcept { return kind_ == Kind::kScoreFilter; }

  // Ensures that admit() cannot fail for these keys of one stripe. Errors: std::bad_alloc, nothing
  // changed.
  void prepare(std::span<const std::uint64_t> keys);
  // Whether a key without a row gets one now. Counts it. Requires: prepare() with the key.
  bool admit(const Occurrence& occurrence, const PushId& id) noexcept;
  // Drops the count of a key, which got a row in any way.
  void settle(std::uint64_t key) noexcept;
  // Forgets keys that have not occurred since `oldest` (data time); pushes without a time do not
  // age. A sketch halves its counts instead, unless it was halved since then. now: the data time.
  // Errors: std::bad_alloc.
  void forget_before(std::uint32_t bucket, std::uint32_t oldest, std::uint32_t now);

  // The pending state of a bucket as bytes: a PendingHeader, then PendingKeys in the order of the
  // keys, or the cells of the sketch. The bytes do not depend on the order of pushes; no bytes if
  // nothing is pending.
  Array<std::uint8_t> save(std::uint32_t bucket) const;
  // The inverse of save(). Errors: kBadRequest for bytes that this filter does not write.
  Pending parse(std::uint32_t bucket, std::span<const std::uint8_t> bytes) const;
  void replace(std::uint32_t bucket, Pending&& pending) noexcept;

  std::size_t bytes(std::uint32_t bucket) const noexcept;  // of memory

 private:
  enum class Kind { kAll, kCountFilter, kProbability, kScoreFilter };

  static Kind checked_kind(const AdmissionConfig& config);
  bool is_sketch() const noexcept { return shape_.width > 0; }
  Pending parse_counts(std::uint32_t bucket, const PendingHeader& header,
                       std::span<const std::uint8_t> content) const;
  Pending parse_sketch(std::uint32_t bucket, const PendingHeader& header,
                       std::span<const std::uint8_t> content) const;

  const Kind kind_;
  const std::uint64_t seed_;
  const std::uint32_t n_;
  const double draws_below_;  // of 2^53
  const double threshold_;
  SketchShape shape_{};           // width 0: exact counts
  std::vector<Pending> pending_;  // by bucket, if anything is counted
};

}  // namespace trireme
