// Exact counts of occurrences of keys without a row: an open-addressing hash table with linear
// probing, for the keys of one bucket.
//
// Keys that somebody chose would all have one home, or neighbouring ones: where searches take too
// long, homes are computed in another way from then on.
//
// Memory: 16 bytes per key, at most 23 with the room for growth; reserve() may leave room for one
// more push. Threads: none; the stripe's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace trireme {

struct PendingKey {
  std::uint64_t key;
  std::uint32_t count;  // 0: a free slot
  std::uint32_t time;   // data time of the last occurrence, seconds
};
static_assert(sizeof(PendingKey) == 16);

class PendingCounts {
 public:
  // Makes room for `num_more` keys. Errors: std::bad_alloc, nothing changed.
  void reserve(std::size_t num_more);

  // Counts occurrences of a key, and returns its count, at most 2^32 - 1. Requires: room for it.
  std::uint32_t add(std::uint64_t key, std::uint32_t count, std::uint32_t time) noexcept;
  void forget(std::uint64_t key) noexcept;
  // Forgets keys whose last occurrence was before `oldest`, unless its push had no time. Errors:
  // std::bad_alloc, nothing changed.
  void forget_before(std::uint32_t oldest);

  std::vector<PendingKey> sorted() const;  // by key: independent of the order of pushes
  // Replaces the content by these keys, which are distinct and have counts > 0. Errors:
  // std::bad_alloc.
  static PendingCounts of(std::span<const PendingKey> keys);

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return slots_.capacity() * sizeof(PendingKey); }

 private:
  std::size_t home_of(std::uint64_t key) const noexcept;
  std::size_t next(std::size_t slot) const noexcept {
    return slot + 1 < slots_.size() ? slot + 1 : 0;
  }
  // The slot of a key, or the free one where it would be inserted. Requires: a free slot.
  std::size_t find(std::uint64_t key) const noexcept;
  // The same; may move keys to other slots.
  std::size_t search(std::uint64_t key) noexcept;
  // Counts slots that were looked at from one to another.
  void note_passed(std::size_t from, std::size_t to) noexcept;
  void spread() noexcept;
  void rebuild(std::size_t num_slots);

  std::vector<PendingKey> slots_;
  std::size_t size_ = 0;
  std::uint64_t factor_ = 1;    // odd; see home_of
  std::size_t num_passed_ = 0;  // slots, with this factor, beyond kPassed of each search
};

}  // namespace trireme
