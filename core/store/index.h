// The index of one stripe: for each of its 64 buckets, a hash table from key to row reference.
//
// A table is an array of 64-byte lines, one cache line per probe. A line holds 12 slots: an 8-bit
// tag (0: free) and a 32-bit reference. A key's home line follows from bits of its hash that
// neither bucket nor tag use; a key that finds its home line full goes to the next one, and every
// line that it passed counts it, so that a search knows where to stop and erasing leaves no
// tombstones (as in Facebook's F14; here the next line is the neighbour).
//
// The 64 tables stand one after the other in one mapping and grow by a tenth, moving those behind
// them: at most a few per cent of the memory is ever unused, which doubling, or a heap full of
// holes, would not give.
//
// Invariants: a bucket's lines are at most kLoadPercent full, so every search ends; the reference
// of a key occurs once. Threads: none; the stripe's lock guards it. Keys are read from the rows:
// the first 8 bytes of each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/hash.h"
#include "base/pages.h"
#include "store/arena.h"
#include "store/row.h"

namespace trireme {

inline constexpr int kNumStripes = 64;
inline constexpr int kBucketsPerStripe = kNumBuckets / kNumStripes;

constexpr std::uint32_t stripe_of_hash(std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(hash >> 58);
}
constexpr std::uint32_t bucket_in_stripe(std::uint64_t hash) noexcept {
  return bucket_of_hash(hash) % kBucketsPerStripe;
}

struct alignas(64) IndexLine {
  static constexpr std::uint32_t kSlots = 12;

  std::uint8_t tags[kSlots];
  std::uint8_t passed;  // keys that found this line full and stand further on; 255 sticks
  std::uint8_t unused[3];
  std::uint32_t refs[kSlots];

  // Bit i is set where tags[i] == tag.
  std::uint32_t match(std::uint8_t tag) const noexcept;
};
static_assert(sizeof(IndexLine) == 64);

class StripeIndex {
 public:
  // Calls visit(i, row) once for each keys[i]; row is null if the key is absent. Keys that are not
  // on their home line come after the others. The first `row_bytes` bytes of a row are in cache by
  // then. Cost: about one cache miss for the line and those of the row, many of them under way at a
  // time.
  template <class Visit>
  void find(std::span<const std::uint64_t> keys, const Arena& arena, std::size_t row_bytes,
            Visit&& visit) const;

  std::byte* find(std::uint64_t key, const Arena& arena) const noexcept;

  // Makes room for `num_rows` rows in a bucket. Nothing changes on an error: kResourceExhausted,
  // std::bad_alloc.
  void reserve(std::uint32_t bucket, std::size_t num_rows, const Arena& arena);

  // Requires: the key is absent, and there is room.
  void insert(std::uint64_t hash, Arena::Ref ref) noexcept;
  // Returns whether the key was there; `ref` is then its row, which the caller frees.
  bool erase(std::uint64_t key, const Arena& arena, Arena::Ref& ref) noexcept;

  // Appends the references of a bucket, in the order of the lines.
  void refs_of(std::uint32_t bucket, std::vector<Arena::Ref>& refs) const;
  // Forgets a bucket's rows, which the caller frees; its lines stay for `reserve`d rows to come.
  void clear(std::uint32_t bucket) noexcept;
  // Gives the lines of an empty bucket back.
  void release(std::uint32_t bucket) noexcept;

  std::size_t num_rows(std::uint32_t bucket) const noexcept { return buckets_[bucket].num_rows; }
  std::size_t num_rows() const noexcept;
  std::size_t bytes() const noexcept { return memory_.size(); }

 private:
  static constexpr std::uint64_t kLoadPercent = 90;
  // Searches under way at each of the two stages (fetch the line, fetch the row).
  static constexpr std::size_t kAhead = 16;

  struct Bucket {
    std::uint32_t first_line = 0;
    std::uint32_t num_lines = 0;
    std::uint32_t num_rows = 0;
  };

  static std::uint8_t tag_of(std::uint64_t hash) noexcept {
    const auto tag = static_cast<std::uint8_t>(hash);
    return tag | (tag == 0);
  }
  static std::uint64_t lines_for(std::uint64_t num_rows) noexcept {
    constexpr std::uint64_t kPerHundredLines = IndexLine::kSlots * kLoadPercent;
    return (num_rows * 100 + kPerHundredLines - 1) / kPerHundredLines;
  }
  IndexLine* lines() const noexcept { return reinterpret_cast<IndexLine*>(memory_.data()); }
  // The line that is `distance` after the key's home line. A bucket without lines has an empty one.
  const IndexLine* line_at(std::uint64_t hash, std::uint32_t distance) const noexcept;
  void resize(std::uint32_t bucket, std::uint32_t num_lines, const Arena& arena);
  void make_room(std::uint32_t bucket, std::uint32_t num_lines) noexcept;

  template <class KeyAt, class Visit, class Further>
  void find_at(std::size_t n, std::uint32_t distance, const Arena& arena, std::size_t row_bytes,
               const KeyAt& key_at, const Visit& visit, const Further& further) const;

  Pages memory_;
  std::uint32_t num_lines_ = 0;  // in use, of all buckets
  std::array<Bucket, kBucketsPerStripe> buckets_{};
};

}  // namespace trireme

#include "store/index_find.h"
