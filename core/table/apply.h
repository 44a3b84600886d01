// Finds the rows of a group of keys, applies the rule to them, and updates their statistics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "base/isa.h"
#include "optim/rule.h"
#include "store/arenas.h"
#include "store/index.h"
#include "store/layout.h"
#include "store/statistics.h"
#include "table/group.h"

namespace trireme {

// The gradients of a call's keys from position `first` on: rows of the dim of one class.
struct GradientPart {
  std::size_t first;
  const float* rows;
  int row_class;
  int dim;

  const float* at(std::size_t position) const noexcept {
    return rows + (position - first) * static_cast<std::size_t>(dim);
  }
};

// The number of rows that the rule updates at a time.
inline constexpr std::size_t kBatchRows = 4;

// Keys of one stripe and what a push says of them. The stripe's lock is held.
struct GroupUpdate {
  const Arenas& arenas;
  Index& index;
  std::span<const RowLayout> layouts;  // of the row classes
  Isa isa;
  Group group;
  const RuleStep& rule;
  std::span<const GradientPart> parts;  // in the order of positions
  StatisticsPush statistics;
  // For the other tables than those of one class of float32 weights: the seed and numbers that
  // stochastic rounding uses, and room for 2 * kBatchRows rows of weights of the widest class.
  std::uint64_t seed;
  std::int64_t stream;
  std::int64_t sequence;
  float* scratch;

  const GradientPart& part_of(std::size_t position) const noexcept {
    std::size_t i = parts.size() - 1;
    while (parts[i].first > position) --i;
    return parts[i];
  }
  // The random bits of a key's row in this push.
  std::uint64_t random_of(std::uint64_t key) const noexcept {
    constexpr std::uint64_t kRoundingSalt = 3;
    return push_bits(seed, kRoundingSalt, key, stream, sequence);
  }
};

// The rows of the head's class whose score has reached the threshold in an update: numbers of their
// keys in the group. A key that occurs twice may be there twice.
struct Risen {
  int head_class;  // -1: none
  double threshold;
  std::uint32_t* numbers;  // room for all keys of the group
  std::size_t size = 0;
};

// Both functions update the rows of the keys in order and mark their index lines. They write the
// numbers of keys without a row to `absent`, which has room for all keys, and return their number.

// For tables of one row class of float32 weights.
std::size_t apply_plain(const GroupUpdate& update, std::uint32_t* absent) noexcept;
// For every table.
std::size_t apply_any(const GroupUpdate& update, std::uint32_t* absent, Risen& risen) noexcept;

}  // namespace trireme
