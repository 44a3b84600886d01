// Batched search: from many keys to their rows, with dozens of cache misses under way at a time.
//
// A block of keys goes through tight loops without unpredictable branches: hash the keys; compare
// the tags of the home lines, fetched kAhead keys earlier; compare the keys of the candidate rows,
// fetched kAhead keys earlier. Most keys are found so. The rest (a key on a further line, a tag
// that fits by chance, an absent key) are collected and searched line by line, again many together.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "base/isa.h"
#include "store/arena.h"
#include "store/index.h"
#include "store/row.h"

namespace trireme {

// Scratch of one search, some tens of KiB: on the stack of whoever searches.
class Finder {
 public:
  static constexpr std::size_t kBlock = 1024;

  // Of a row that is found, the first `row_bytes` bytes are brought into cache.
  Finder(const Arena& arena, const Index& index, std::size_t row_bytes) noexcept
      : arena_(arena), index_(index), row_bytes_(row_bytes) {}

  // Begins a search of 1 to kBlock keys, which must stay where they are. Returns the stripes they
  // belong to, one bit each: their locks are needed from here on.
  TRIREME_INLINE std::uint64_t begin(std::span<const std::uint64_t> keys) noexcept {
    keys_ = keys;
    std::uint64_t stripes = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      hashes_[i] = mix64(keys[i]);
      stripes |= std::uint64_t{1} << stripe_of_hash(hashes_[i]);
    }
    std::fill_n(hashes_.begin() + keys.size(), kAhead, mix64(keys.back()));
    return stripes;
  }

  // For each key, calls guess(i, row) with a row that is probably the key's, and then, where it was
  // not, settle(i, row) with its row, null if absent.
  template <class Guess, class Settle>
  TRIREME_INLINE void find(const Guess& guess, const Settle& settle) noexcept {
    match_tags();
    const std::size_t num_rest = compare_keys(guess);
    if (num_rest > 0) find_rest(num_rest, settle);
  }

 private:
  static constexpr std::size_t kAhead = 64;

  TRIREME_INLINE void fetch_home(std::size_t i) noexcept {
    lines_[i] = index_.home(hashes_[i]);
    __builtin_prefetch(lines_[i]);
  }

  TRIREME_INLINE void match_tags() noexcept {
    const std::size_t n = keys_.size();
    for (std::size_t i = 0; i < kAhead; ++i) fetch_home(i);
    for (std::size_t i = 0; i < n; ++i) {
      fetch_home(i + kAhead);
      const IndexLine* line = lines_[i];
      const std::uint32_t slots = line->match(IndexLine::tag_of(hashes_[i]));
      std::byte* row = arena_.row(line->refs[IndexLine::first_slot(slots)]);
      rows_[i] = slots != 0 ? row : arena_.null_row();
      is_candidate_[i] = slots != 0;
    }
    std::fill_n(rows_.begin() + n, kAhead, arena_.null_row());
  }

  TRIREME_INLINE void fetch_row(const std::byte* row) const noexcept {
    const std::size_t last = row_bytes_ - 8;  // rows begin and end at multiples of 8
    for (std::size_t byte = 0; byte < last; byte += 64) __builtin_prefetch(row + byte);
    __builtin_prefetch(row + last);
  }

  // Returns how many keys were not found, and leaves them in rest_.
  template <class Guess>
  TRIREME_INLINE std::size_t compare_keys(const Guess& guess) noexcept {
    std::size_t num_rest = 0;
    for (std::size_t i = 0; i < kAhead; ++i) fetch_row(rows_[i]);
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      fetch_row(rows_[i + kAhead]);
      guess(i, rows_[i]);
      const bool is_found = (key_of_row(rows_[i]) == keys_[i]) & is_candidate_[i];
      rest_[num_rest] = static_cast<std::uint16_t>(i);
      num_rest += !is_found;
    }
    return num_rest;
  }

  // One line of every key a round: its candidate rows are fetched together, and so is the line that
  // the key would be sought on next.
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
        std::byte* row =
            index_.line_at(hash, distance)->find(keys_[i], IndexLine::tag_of(hash), arena_);
        if (row == nullptr && index_.goes_on(hash, distance)) {
          rest_[num_further++] = i;
        } else {
          settle(i, row);
        }
      }
      num_rest = num_further;
    }
  }

  const Arena& arena_;
  const Index& index_;
  const std::size_t row_bytes_;
  std::span<const std::uint64_t> keys_;
  std::array<std::uint64_t, kBlock + kAhead> hashes_;
  std::array<const IndexLine*, kBlock + kAhead> lines_;
  std::array<std::byte*, kBlock + kAhead> rows_;
  std::array<bool, kBlock> is_candidate_;
  std::array<std::uint16_t, kBlock + 1> rest_;
};

}  // namespace trireme
