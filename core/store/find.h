// Batched search: from many keys to their rows, with dozens of cache misses under way at a time.
//
// A block of keys goes through tight loops without unpredictable branches: hash the keys; compare
// the tags of the home lines, fetched kAhead keys earlier; compare the keys of the candidate rows,
// fetched kAhead keys earlier. This finds nine keys of ten. The others (a key on a further line,
// a tag that matches by chance, an absent key) are collected. A second pass tries the next
// candidate of each. The rest is searched line by line, again many keys together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "base/isa.h"
#include "store/arenas.h"
#include "store/index.h"
#include "store/row.h"

namespace trireme {

inline constexpr std::size_t kFindBlock = 4096;  // keys of one search

// Hashes keys, and returns the stripes they belong to, one bit each.
TRIREME_INLINE std::uint64_t hash_all(std::span<const std::uint64_t> keys,
                                      std::uint64_t* hashes) noexcept {
  std::uint64_t stripes = 0;
  TRIREME_INDEPENDENT
  for (std::size_t i = 0; i < keys.size(); ++i) {
    hashes[i] = mix64(keys[i]);
    stripes |= std::uint64_t{1} << stripe_of_hash(hashes[i]);
  }
  return stripes;
}

// Scratch of one search, some tens of KiB, on the caller's stack. Rows: Arenas, or the
// Arena of a table with one row class.
template <class Rows>
class Finder {
 public:
  // Of a row that is found, the first `row_bytes` bytes are brought into cache.
  Finder(const Rows& arena, const Index& index, std::size_t row_bytes) noexcept
      : arena_(arena), index_(index), row_bytes_(round_up(row_bytes, 8)) {}

  // Begins a search of 1 to kFindBlock keys, which must stay where they are. Returns the stripes
  // they belong to, one bit each: their locks are needed from here on.
  TRIREME_INLINE std::uint64_t begin(std::span<const std::uint64_t> keys) noexcept {
    keys_ = keys;
    return hash_all(keys, hashes_.data());
  }

  // For each key, calls visit(i, line, row, is_found) with a row that is probably the key's, and
  // the row's line, until is_found. If is_found is false, the row may still be read. Then calls
  // settle(i, line, row) for each key that is not found yet, with its row, or null if absent.
  template <class Visit, class Settle>
  TRIREME_INLINE void find(const Visit& visit, const Settle& settle) noexcept {
    std::size_t num_rest = find_most(visit);
    if (num_rest > 0) num_rest = find_more(num_rest, visit);
    if (num_rest > 0) find_rest(num_rest, settle);
  }

 private:
  static constexpr std::size_t kAhead = 64;
  static constexpr std::size_t kRing = 2 * kAhead;

  TRIREME_INLINE void fetch_home(std::size_t i) noexcept {
    const IndexLine* line = index_.home(hashes_[i]);
    lines_[i % kRing] = line;
    __builtin_prefetch(line);
  }

  TRIREME_INLINE void match_tags(std::size_t i) noexcept {
    const IndexLine* line = lines_[i % kRing];
    const std::uint32_t slots = line->match(IndexLine::tag_of(hashes_[i]));
    // By arithmetic, because a branch would be mispredicted for every key on a further line.
    const Arena::Ref is_match = slots != 0;
    std::byte* row = arena_.row(line->refs[IndexLine::first_slot(slots)] & (0 - is_match));
    rows_[i % kRing] = row;
    fetch_row(row);
    __builtin_prefetch(line + (1 - is_match));  // where the search continues
  }

  TRIREME_INLINE void fetch_row(const std::byte* row) const noexcept {
    const std::size_t last = row_bytes_ - 8;  // rows start at multiples of 8
    __builtin_prefetch(row);
    for (std::size_t byte = 64; byte < last; byte += 64) __builtin_prefetch(row + byte);
    __builtin_prefetch(row + last);
  }

  // Returns how many keys were not found, and leaves them in rest_.
  template <class Visit>
  TRIREME_INLINE std::size_t find_most(const Visit& visit) noexcept {
    const std::size_t size = keys_.size();
    for (std::size_t i = 0; i < std::min(kRing, size); ++i) fetch_home(i);
    for (std::size_t i = 0; i < std::min(kAhead, size); ++i) match_tags(i);
    std::size_t num_rest = 0;
    for (std::size_t i = 0; i < size; ++i) {
      std::byte* row = rows_[i % kRing];
      const bool is_found = (key_of_row(row) == keys_[i]) & (row != arena_.null_row());
      visit(i, lines_[i % kRing], row, is_found);
      rest_[num_rest] = static_cast<std::uint16_t>(i);
      num_rest += !is_found;
      if (i + kRing < size) fetch_home(i + kRing);
      if (i + kAhead < size) match_tags(i + kAhead);
    }
    return num_rest;
  }

  // The second most probable row of each key that was not found: on the home line, or on the next.
  template <class Visit>
  TRIREME_INLINE std::size_t find_more(std::size_t num_keys, const Visit& visit) noexcept {
    std::size_t num_rest = 0;
    for (std::size_t begin = 0; begin < num_keys; begin += kRing) {
      const std::size_t size = std::min(kRing, num_keys - begin);
      for (std::size_t r = 0; r < size; ++r) {
        const Index::Match match = index_.second_match(hashes_[rest_[begin + r]]);
        lines_[r] = match.line;
        rows_[r] = arena_.row(match.ref);
        fetch_row(rows_[r]);
      }
      for (std::size_t r = 0; r < size; ++r) {
        const std::uint16_t i = rest_[begin + r];
        const bool is_found = (key_of_row(rows_[r]) == keys_[i]) & (rows_[r] != arena_.null_row());
        visit(i, lines_[r], rows_[r], is_found);
        rest_[num_rest] = i;
        num_rest += !is_found;
      }
    }
    return num_rest;
  }

  // Each round searches one line of every key. It fetches the candidate rows together, and the line
  // that comes next for the key.
  template <class Settle>
  TRIREME_INLINE void find_rest(std::size_t num_rest, const Settle& settle) noexcept {
    for (std::uint32_t distance = 0; num_rest > 0; ++distance) {
      for (std::size_t r = 0; r < num_rest; ++r) {
        const std::uint64_t hash = hashes_[rest_[r]];
        const IndexLine* line = index_.line_at(hash, distance);
        __builtin_prefetch(line + 1);
        for (std::uint32_t slots = line->match(IndexLine::tag_of(hash)); slots != 0;
             slots &= slots - 1) {
          fetch_row(arena_.row(line->refs[IndexLine::first_slot(slots)]));
        }
      }
      std::size_t num_further = 0;
      for (std::size_t r = 0; r < num_rest; ++r) {
        const std::uint16_t i = rest_[r];
        const std::uint64_t hash = hashes_[i];
        const IndexLine* line = index_.line_at(hash, distance);
        std::byte* row = line->find(keys_[i], IndexLine::tag_of(hash), arena_);
        if (row == nullptr && index_.goes_on(hash, distance)) {
          rest_[num_further++] = i;
        } else {
          settle(i, line, row);
        }
      }
      num_rest = num_further;
    }
  }

  const Rows& arena_;
  const Index& index_;
  const std::size_t row_bytes_;
  std::span<const std::uint64_t> keys_;
  std::array<std::uint64_t, kFindBlock> hashes_;
  std::array<const IndexLine*, kRing> lines_;
  std::array<std::byte*, kRing> rows_;
  std::array<std::uint16_t, kFindBlock + 1> rest_;
};

}  // namespace trireme
