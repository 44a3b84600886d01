// Which slot of a block the row of each key has.
//
// An open table with linear search; a key's home follows the order of buckets, so that keys in that
// order are near each other. Removing moves keys back, so there are no tombstones.
//
// Invariants: a third of the entries, at least, is free, so every search ends. Threads: any number
// may find; assign and remove run alone. Memory: 24 bytes per key of the largest number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "base/pages.h"
#include "base/pool.h"

namespace trireme {

class SlotIndex {
 public:
  static constexpr std::int32_t kAbsent = -1;

  // Errors: kBadRequest for 2^31 keys or more; kResourceExhausted.
  explicit SlotIndex(std::size_t num_keys_max);

  std::size_t num_keys() const noexcept { return num_keys_; }

  // Many keys in the order of their buckets are divided among the threads.
  // Errors: kBadRequest: more keys than there is room for, or a slot below 0, nothing changed; a
  // key that has a slot already, some of the others have theirs.   keys, slots: (n).
  void assign(std::span<const std::uint64_t> keys, std::span<const std::int32_t> slots, Pool& pool);
  // Forgets keys; those without a slot are ignored.
  void remove(std::span<const std::uint64_t> keys) noexcept;
  // out: (n): the slot of each key, kAbsent if it has none.
  void find(std::span<const std::uint64_t> keys, std::int32_t* out, Pool& pool) const;

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t slot = 0;  // slot + 1; 0: the entry is free
  };

  std::size_t home_of(std::uint64_t key) const noexcept { return (mix64(key) >> 32) * size_ >> 32; }
  std::size_t after(std::size_t i) const noexcept { return i + 1 < size_ ? i + 1 : 0; }
  // The entry of the key, or a free one.
  std::size_t place_of(std::uint64_t key, std::size_t home) const noexcept;
  void remove_at(std::size_t i) noexcept;
  // Gives a key its slot. Errors: kBadRequest: it has one.
  void assign_one(std::uint64_t key, std::int32_t slot);
  // Gives a key its slot if a free entry for it is among those from `home` to `end`. Returns false:
  // none is, or the key has a slot.
  bool assign_within(std::uint64_t key, std::int32_t slot, std::size_t home,
                     std::size_t end) noexcept;

  std::size_t num_keys_max_;
  std::size_t num_keys_ = 0;
  std::size_t size_;  // of the entries
  Pages memory_;
  Entry* entries_;
};

}  // namespace trireme
