#include "table/slot_index.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::size_t kAhead = 16;        // entries that are brought into cache
constexpr std::size_t kChunkKeys = 8192;  // fewer are not worth waking threads for

std::size_t checked(std::size_t num_keys_max) {
  if (num_keys_max < std::size_t{1} << 31) return num_keys_max;
  throw Error(ErrorCode::kBadRequest,
              "SlotIndex: expected fewer than 2^31 keys, found " + std::to_string(num_keys_max));
}

}  // namespace

SlotIndex::SlotIndex(std::size_t num_keys_max)
    : num_keys_max_(checked(num_keys_max)), entries_(num_keys_max + num_keys_max / 2 + 1) {}

std::size_t SlotIndex::place_of(std::uint64_t key, std::size_t home) const noexcept {
  const Entry* const all = entries_.data();
  std::size_t i = home;
  while (all[i].slot != 0 && all[i].key != key) i = after(i);
  return i;
}

void SlotIndex::assign(std::span<const std::uint64_t> keys, std::span<const std::int32_t> slots) {
  if (keys.size() != slots.size() || keys.size() > num_keys_max_ - num_keys_) {
    throw Error(ErrorCode::kBadRequest, "SlotIndex.assign: expected a slot per key and at most " +
                                            std::to_string(num_keys_max_ - num_keys_) +
                                            " of them, found " + std::to_string(slots.size()) +
                                            " for " + std::to_string(keys.size()) + " keys");
  }
  if (const auto below = std::ranges::find_if(slots, [](std::int32_t slot) { return slot < 0; });
      below != slots.end()) {
    throw Error(ErrorCode::kBadRequest,
                "SlotIndex.assign: expected slots from 0 on, found " + std::to_string(*below));
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size())
      __builtin_prefetch(entries_.data() + home_of(keys[i + kAhead]), 1);
    Entry& entry = entries_[place_of(keys[i], home_of(keys[i]))];
    if (entry.slot != 0) {
      throw Error(ErrorCode::kBadRequest, "SlotIndex.assign: expected keys without a slot, found " +
                                              std::to_string(keys[i]) + ", which has slot " +
                                              std::to_string(entry.slot - 1));
    }
    entry = {.key = keys[i], .slot = static_cast<std::uint32_t>(slots[i]) + 1};
    ++num_keys_;
  }
}

void SlotIndex::remove(std::span<const std::uint64_t> keys) noexcept {
  for (const std::uint64_t key : keys) {
    const std::size_t i = place_of(key, home_of(key));
    if (entries_[i].slot != 0) remove_at(i);
  }
}

// Fills the gap with the next key whose search passes it, and so on.
void SlotIndex::remove_at(std::size_t i) noexcept {
  Entry* const all = entries_.data();
  const auto distance = [&](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + entries_.size() - from;
  };
  std::size_t gap = i;
  for (std::size_t j = after(i); all[j].slot != 0; j = after(j)) {
    if (distance(home_of(all[j].key), j) < distance(gap, j)) continue;
    all[gap] = all[j];
    gap = j;
  }
  all[gap].slot = 0;
  --num_keys_;
}

void SlotIndex::find(std::span<const std::uint64_t> keys, std::int32_t* out, Pool& pool) const {
  pool.run((keys.size() + kChunkKeys - 1) / kChunkKeys, [&](std::size_t chunk) {
    const std::size_t begin = chunk * kChunkKeys;
    const std::size_t end = std::min(keys.size(), begin + kChunkKeys);
    std::array<std::size_t, kAhead> homes;  // of the keys that come
    const auto fetch = [&](std::size_t i) {
      homes[i % kAhead] = home_of(keys[i]);
      __builtin_prefetch(entries_.data() + homes[i % kAhead]);
    };
    for (std::size_t i = begin; i < std::min(end, begin + kAhead); ++i) fetch(i);
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t place = place_of(keys[i], homes[i % kAhead]);
      if (i + kAhead < end) fetch(i + kAhead);
      out[i] = static_cast<std::int32_t>(entries_[place].slot) - 1;
    }
  });
}

}  // namespace trireme
