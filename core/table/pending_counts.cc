#include "table/pending_counts.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "base/hash.h"

namespace trireme {
namespace {

// Seven of eight slots may be in use.
constexpr std::size_t slots_for(std::size_t num_keys) noexcept { return num_keys * 8 / 7 + 1; }

constexpr std::size_t kPassed = 64;  // slots; twice as many as a search passes on average, at most

}  // namespace

// Computed from a product of the bits of the hash that do not select the bucket.
std::size_t PendingCounts::home_of(std::uint64_t key) const noexcept {
  return ((mix64(key) << 12) * factor_ >> 32) * slots_.size() >> 32;
}

std::size_t PendingCounts::find(std::uint64_t key) const noexcept {
  std::size_t slot = home_of(key);
  while (slots_[slot].count != 0 && slots_[slot].key != key) slot = next(slot);
  return slot;
}

std::size_t PendingCounts::search(std::uint64_t key) noexcept {
  const std::size_t slot = find(key);
  note_passed(home_of(key), slot);
  if (num_passed_ <= kPassed * slots_.size()) return slot;
  spread();
  return find(key);
}

void PendingCounts::note_passed(std::size_t from, std::size_t to) noexcept {
  const std::size_t passed = to >= from ? to - from : to + slots_.size() - from;
  num_passed_ += passed - std::min(passed, kPassed);
}

void PendingCounts::spread() noexcept {
  num_passed_ = 0;
  const std::unique_ptr<PendingKey[]> old(new (std::nothrow) PendingKey[size_]);
  if (old == nullptr) return;  // searches remain long, and right
  std::ranges::copy_if(slots_, old.get(), [](const PendingKey& key) { return key.count != 0; });
  std::ranges::fill(slots_, PendingKey{});
  factor_ = mix64(factor_) | 1;
  for (const PendingKey& pending : std::span(old.get(), size_)) slots_[find(pending.key)] = pending;
}

void PendingCounts::reserve(std::size_t num_more) {
  const std::size_t needed = slots_for(size_ + num_more);
  if (needed > slots_.size()) rebuild(std::max(needed, slots_.size() + slots_.size() / 4));
}

void PendingCounts::rebuild(std::size_t num_slots) {
  std::vector<PendingKey> old(num_slots);
  old.swap(slots_);
  for (const PendingKey& pending : old) {
    if (pending.count != 0) slots_[find(pending.key)] = pending;
  }
}

std::uint32_t PendingCounts::add(std::uint64_t key, std::uint32_t count,
                                 std::uint32_t time) noexcept {
  if (count == 0) return 0;
  PendingKey& pending = slots_[search(key)];
  if (pending.count == 0) {
    pending = {.key = key, .count = 0, .time = 0};
    ++size_;
  }
  constexpr std::uint32_t kMax = std::numeric_limits<std::uint32_t>::max();
  pending.count += std::min(count, kMax - pending.count);
  pending.time = std::max(pending.time, time);
  return pending.count;
}

// Keys after a freed slot move up to it if their search passes it, so that a search may stop at a
// free slot.
void PendingCounts::forget(std::uint64_t key) noexcept {
  if (size_ == 0) return;
  const std::size_t first = search(key);
  if (slots_[first].count == 0) return;
  --size_;
  std::size_t hole = first, slot = next(first);
  for (; slots_[slot].count != 0; slot = next(slot)) {
    const std::size_t home = home_of(slots_[slot].key);
    const bool stays = hole <= slot ? hole < home && home <= slot : hole < home || home <= slot;
    if (stays) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole].count = 0;
  note_passed(first, slot);
}

void PendingCounts::forget_before(std::uint32_t oldest) {
  std::vector<PendingKey> kept;
  for (const PendingKey& pending : slots_) {
    if (pending.count == 0) continue;
    if (pending.time == 0 || pending.time >= oldest) kept.push_back(pending);
  }
  if (kept.size() < size_) *this = of(kept);
}

std::vector<PendingKey> PendingCounts::sorted() const {
  std::vector<PendingKey> keys;
  keys.reserve(size_);
  for (const PendingKey& pending : slots_) {
    if (pending.count != 0) keys.push_back(pending);
  }
  std::ranges::sort(keys, {}, &PendingKey::key);
  return keys;
}

PendingCounts PendingCounts::of(std::span<const PendingKey> keys) {
  PendingCounts counts;
  if (keys.empty()) return counts;
  counts.reserve(keys.size());
  for (const PendingKey& pending : keys) counts.add(pending.key, pending.count, pending.time);
  return counts;
}

}  // namespace trireme
