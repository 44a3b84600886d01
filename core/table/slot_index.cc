#include "table/slot_index.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::size_t kAhead = 16;        // entries that are brought into cache
constexpr std::size_t kChunkKeys = 8192;  // fewer are not worth waking threads for
constexpr std::size_t kChunksMax = 256;   // each of 16 buckets, of whose keys few are at its ends

std::size_t checked(std::size_t num_slots) {
  if (num_slots < std::size_t{1} << 31) return num_slots;
  throw Error(ErrorCode::kBadRequest,
              "SlotIndex: expected fewer than 2^31 slots, found " + std::to_string(num_slots));
}

}  // namespace

SlotIndex::SlotIndex(std::span<std::uint64_t> keys, Pool& pool)
    : keys_(keys), size_(2 * checked(keys.size()) + 1), entries_(size_) {
  const std::size_t num_chunks = std::clamp<std::size_t>(size_ / kChunkKeys, 1, kChunksMax);
  pool.run(num_chunks, [&](std::size_t c) {
    const std::size_t begin = size_ * c / num_chunks, end = size_ * (c + 1) / num_chunks;
    std::fill(entries_.data() + begin, entries_.data() + end, Entry{0});
  });
}

std::size_t SlotIndex::place_of(std::uint64_t key, std::size_t home) const noexcept {
  std::size_t i = home;
  for (std::size_t n = 0; n < kReach; ++n, i = after(i)) {
    if (entries_[i] == 0 || key_of(entries_[i]) == key) return i;
  }
  return kNowhere;
}

SlotIndex::Entry SlotIndex::entry_of(std::uint64_t key, std::size_t home) const noexcept {
  const std::size_t place = place_of(key, home);
  const Entry entry = place != kNowhere ? entries_[place] : 0;
  if (entry != 0 || far_.empty()) return entry;
  const auto far = far_.find(key);  // there may be room within reach since then
  return far != far_.end() ? far->second : 0;
}

void SlotIndex::assign(std::span<const std::uint64_t> keys, std::span<const std::int32_t> slots,
                       Pool& pool) {
  check_room(keys.size());
  const auto wrong = std::ranges::find_if(slots, [&](std::int32_t slot) {
    return static_cast<std::uint32_t>(slot) >= keys_.size();  // slots below 0 are large ones
  });
  if (keys.size() != slots.size() || wrong != slots.end()) {
    throw Error(ErrorCode::kBadRequest,
                "SlotIndex.assign: expected for each of " + std::to_string(keys.size()) +
                    " keys a slot in [0, " + std::to_string(keys_.size()) + "), found " +
                    (wrong != slots.end() ? "slot " + std::to_string(*wrong)
                                          : std::to_string(slots.size()) + " slots"));
  }
  const auto take = [&](std::size_t i) {
    const auto slot = static_cast<std::uint32_t>(slots[i]);
    keys_[slot] = keys[i];
    return slot;
  };
  assign_all(keys, take, pool);
}

void SlotIndex::assign(std::span<const std::uint64_t> keys, Pool& pool) {
  check_room(keys.size());
  if (keys.data() != keys_.data()) std::ranges::copy(keys, keys_.begin());
  assign_all(keys, [](std::size_t i) { return static_cast<std::uint32_t>(i); }, pool);
}

void SlotIndex::check_room(std::size_t num_keys) const {
  if (num_keys <= keys_.size() - num_keys_) return;
  throw Error(ErrorCode::kBadRequest,
              "SlotIndex.assign: expected at most " + std::to_string(keys_.size() - num_keys_) +
                  " keys, as many slots are free, found " + std::to_string(num_keys));
}

template <class Take>
void SlotIndex::assign_all(std::span<const std::uint64_t> keys, const Take& take, Pool& pool) {
  // A chunk of keys has the entries from the home of its first key to that of the next chunk's. A
  // key with a home elsewhere, or whose search would leave them, is left to one thread.
  const std::size_t num_chunks = std::clamp<std::size_t>(keys.size() / kChunkKeys, 1, kChunksMax);
  const auto first_of = [&](std::size_t chunk) { return keys.size() * chunk / num_chunks; };
  std::vector<std::size_t> borders(num_chunks + 1, 0);
  for (std::size_t c = 1; c < num_chunks; ++c) borders[c] = home_of(keys[first_of(c)]);
  borders[num_chunks] = size_;
  // Keys in another order, or some that may be in the tree.
  if (!std::ranges::is_sorted(borders) || !far_.empty()) {
    for (std::size_t i = 0; i < keys.size(); ++i) assign_one(keys[i], take(i));
    return;
  }
  std::vector<std::vector<std::size_t>> left(num_chunks);
  std::atomic<std::size_t> num_assigned{0};
  const bool is_empty = num_keys_ == 0;
  pool.run(num_chunks, [&](std::size_t c) {
    // An ascending hash goes behind all before it: the entries from its home to there are full.
    const std::size_t begin = first_of(c), end = first_of(c + 1), stop = borders[c + 1];
    std::size_t after_last = borders[c];
    std::uint64_t largest = is_empty ? 0 : ~std::uint64_t{0};  // of the hashes so far
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t key = keys[i], hash = mix64(key);
      const std::size_t home = home_of_hash(hash);
      std::size_t place = std::max(home, after_last);
      if (hash > largest && home >= borders[c]) {
        largest = hash;
      } else {
        place = home < borders[c] ? stop : place_before(key, home, stop);
      }
      if (place >= stop || place - home >= kReach) {
        left[c].push_back(i);
        continue;
      }
      entries_[place] = take(i) + 1;
      after_last = std::max(after_last, place + 1);
    }
    num_assigned += end - begin - left[c].size();
  });
  num_keys_ += num_assigned;
  for (const std::vector<std::size_t>& of_chunk : left) {
    for (const std::size_t i : of_chunk) assign_one(keys[i], take(i));
  }
}

std::size_t SlotIndex::place_before(std::uint64_t key, std::size_t home,
                                    std::size_t end) const noexcept {
  const std::size_t stop = std::min(end, home + kReach);
  for (std::size_t i = home; i < stop && (entries_[i] == 0 || key_of(entries_[i]) != key); ++i) {
    if (entries_[i] == 0) return i;
  }
  return end;
}

void SlotIndex::assign_one(std::uint64_t key, std::uint32_t slot) {
  const std::size_t home = home_of(key);
  if (const Entry entry = entry_of(key, home); entry != 0) {
    throw Error(ErrorCode::kBadRequest, "SlotIndex.assign: expected keys without a slot, found " +
                                            std::to_string(key) + ", which has slot " +
                                            std::to_string(entry - 1));
  }
  const std::size_t place = place_of(key, home);
  (place != kNowhere ? entries_[place] : far_[key]) = slot + 1;
  ++num_keys_;
}

void SlotIndex::remove(std::span<const std::uint64_t> keys) noexcept {
  for (const std::uint64_t key : keys) {
    const std::size_t i = place_of(key, home_of(key));
    if (i != kNowhere && entries_[i] != 0) {
      remove_at(i);
      --num_keys_;
    } else {
      num_keys_ -= far_.erase(key);
    }
  }
}

// Fills the gap with the next key whose search passes it, and so on.
void SlotIndex::remove_at(std::size_t i) noexcept {
  std::size_t gap = i;
  for (std::size_t j = after(i); entries_[j] != 0 && distance(gap, j) < kReach; j = after(j)) {
    if (distance(home_of(key_of(entries_[j])), j) < distance(gap, j)) continue;
    entries_[gap] = entries_[j];
    gap = j;
  }
  entries_[gap] = 0;
}

void SlotIndex::find(std::span<const std::uint64_t> keys, std::int32_t* out, Pool& pool) const {
  pool.run((keys.size() + kChunkKeys - 1) / kChunkKeys, [&](std::size_t chunk) {
    const std::size_t begin = chunk * kChunkKeys;
    const std::size_t end = std::min(keys.size(), begin + kChunkKeys);
    std::array<std::size_t, 2 * kAhead> homes;  // of the keys that come
    const auto fetch = [&](std::size_t i) {
      homes[i % homes.size()] = home_of(keys[i]);
      __builtin_prefetch(entries_.data() + homes[i % homes.size()]);
    };
    const auto fetch_key = [&](std::size_t i) {
      const Entry entry = entries_[homes[i % homes.size()]];
      __builtin_prefetch(keys_.data() + entry - (entry != 0));
    };
    for (std::size_t i = begin; i < std::min(end, begin + 2 * kAhead); ++i) fetch(i);
    for (std::size_t i = begin; i < std::min(end, begin + kAhead); ++i) fetch_key(i);
    for (std::size_t i = begin; i < end; ++i) {
      out[i] = static_cast<std::int32_t>(entry_of(keys[i], homes[i % homes.size()])) - 1;
      if (i + 2 * kAhead < end) fetch(i + 2 * kAhead);
      if (i + kAhead < end) fetch_key(i + kAhead);
    }
  });
}

}  // namespace trireme
