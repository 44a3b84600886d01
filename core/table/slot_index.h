// Which slot of a block the row of each key has, and the key of each slot.
//
// An open table of slots with linear search; keys are compared where the slots have them. Homes are
// in the order of hashes, and so of buckets: keys in that order are near each other. Removing moves
// slots back, so there are no tombstones. A key that finds no entry within kReach of its home, as
// only keys do that somebody chose for it, is in a tree: so no search is longer, whatever the keys.
//
// Invariants: half of the entries, at least, is free, so every search ends. Threads: any number
// may find; assign and remove run alone. Memory: 8 bytes per slot, beside its key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

#include "base/array.h"
#include "base/hash.h"
#include "base/pool.h"

namespace trireme {

class SlotIndex {
 public:
  static constexpr std::int32_t kAbsent = -1;

  // keys: (num_slots), of each slot; anything where no key has it. The caller's memory, which
  // outlives the index. Errors: kBadRequest for 2^31 slots or more.
  SlotIndex(std::span<std::uint64_t> keys, Pool& pool);

  std::size_t num_keys() const noexcept { return num_keys_; }

  // Gives keys slots that no key has. Many keys in the order of their buckets are divided among the
  // threads; in the order of their hashes they need no search, if the index has no other keys.
  // keys, slots: (n); without slots, key i gets slot i, and may be there already.
  // Errors: kBadRequest: a slot that there is not, or more keys than free slots, nothing changed; a
  // key that has a slot already, some of the others have theirs.
  void assign(std::span<const std::uint64_t> keys, std::span<const std::int32_t> slots, Pool& pool);
  void assign(std::span<const std::uint64_t> keys, Pool& pool);
  // Forgets keys; those without a slot are ignored.
  void remove(std::span<const std::uint64_t> keys) noexcept;
  // out: (n): the slot of each key, kAbsent if it has none.
  void find(std::span<const std::uint64_t> keys, std::int32_t* out, Pool& pool) const;

 private:
  using Entry = std::uint32_t;  // slot + 1; 0: the entry is free

  void check_room(std::size_t num_keys) const;  // for more; without room no search would end
  // take(i): writes key i to its slot, if it is not there, and returns the slot.
  template <class Take>
  void assign_all(std::span<const std::uint64_t> keys, const Take& take, Pool& pool);
  std::size_t home_of_hash(std::uint64_t hash) const noexcept { return (hash >> 32) * size_ >> 32; }
  std::size_t home_of(std::uint64_t key) const noexcept { return home_of_hash(mix64(key)); }
  std::size_t after(std::size_t i) const noexcept { return i + 1 < size_ ? i + 1 : 0; }
  // How many entries `to` is behind `from`.
  std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return to >= from ? to - from : to + size_ - from;
  }
  std::uint64_t key_of(Entry entry) const noexcept { return keys_[entry - 1]; }
  // The entry of the key, or a free one; kNowhere if there is neither within reach of its home.
  std::size_t place_of(std::uint64_t key, std::size_t home) const noexcept;
  // What the key's entry has, or had if there were one; 0 if it has no slot.
  Entry entry_of(std::uint64_t key, std::size_t home) const noexcept;
  void remove_at(std::size_t i) noexcept;
  // Enters a key that its slot has. Errors: kBadRequest: another slot has it, too.
  void assign_one(std::uint64_t key, std::uint32_t slot);
  // The first free entry from `home` on; `end` if there is none before it, or the key has an entry.
  std::size_t place_before(std::uint64_t key, std::size_t home, std::size_t end) const noexcept;

  // Random keys that fill half of 2^31 entries are all within 107, probably.
  static constexpr std::size_t kReach = 256;
  static constexpr std::size_t kNowhere = ~std::size_t{0};

  std::size_t num_keys_ = 0;
  std::span<std::uint64_t> keys_;
  std::size_t size_;  // of the entries
  Array<Entry> entries_;
  std::map<std::uint64_t, Entry> far_;  // by key
};

}  // namespace trireme
