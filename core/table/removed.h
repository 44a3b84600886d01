// The keys removed from each bucket, with the version of the table at that time. A delta export
// lists them beside the rows that changed.
//
// Bounded: a bucket remembers as many keys as it has rows, or kKeptMin; then it forgets the older
// half. A query that needs forgotten keys is an error, never an incomplete answer. Threads: the
// data of a bucket is guarded by its stripe's lock, which the table holds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/array.h"
#include "base/bytes.h"
#include "base/hash.h"

namespace trireme {

class RemovedKeys {
 public:
  static constexpr std::size_t kKeptMin = 64;

  // Makes room, so that adding `num_keys` keys to a bucket cannot fail. Errors: std::bad_alloc.
  void prepare(std::uint32_t bucket, std::size_t num_keys);
  // Requires: prepare(); the version is not below earlier ones. `num_rows`: rows of the bucket.
  void add(std::uint32_t bucket, std::uint64_t key, std::uint32_t version,
           std::size_t num_rows) noexcept;
  // Gives back the room that no key takes, if it is much. No more keys can be added then.
  void trim(std::uint32_t bucket) noexcept;

  // Distinct keys in ascending order: those removed with a version > since.
  // Errors: kBadRequest if some of them were forgotten.
  Array<std::uint64_t> since(std::uint32_t bucket, std::uint32_t since) const;

  // Forgets the keys that were removed with a version <= `version`, and gives back their room.
  void forget(std::uint32_t bucket, std::uint32_t version) noexcept;
  struct Removals {
    std::vector<std::uint64_t> keys;
    std::vector<std::uint32_t> versions;  // ascending
  };
  // Those with a version > since, for parse().
  void save(std::uint32_t bucket, std::uint32_t since, ByteWriter& bytes) const;
  // Errors: kCorruption: it is not what save() has written.
  static Removals parse(std::uint32_t bucket, ByteReader& bytes);
  // Replaces the content. Keys removed with a version <= since are forgotten.
  void restore(std::uint32_t bucket, Removals&& removals, std::uint32_t since) noexcept;
  // The lowest version that since() answers for.
  std::uint32_t known_since(std::uint32_t bucket) const noexcept {
    return buckets_[bucket].forgotten;
  }

  std::size_t bytes(std::uint32_t bucket) const noexcept;

 private:
  struct Bucket : Removals {
    std::uint32_t forgotten = 0;  // keys removed with a version up to this one are forgotten
  };

  static void drop(Bucket& bucket, std::uint32_t version) noexcept;

  std::array<Bucket, kNumBuckets> buckets_;
};

}  // namespace trireme
