// Update rules: how a gradient changes a row.
//
// A rule is lazy: only rows with a gradient change. It says how many floats of state a row carries
// and how state starts, and applies one step to many rows; it knows nothing of keys, tables or
// locks. CONTRIBUTING.md says how to add a rule.
//
// Threads: a Rule is a constant; the caller owns the rows it passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "base/hash.h"
#include "base/isa.h"
#include "store/arenas.h"
#include "store/group.h"
#include "store/index.h"
#include "store/statistics.h"

namespace trireme {

// The numbers of one step. They travel with every push, so that schedulers drive them.
struct RuleValues {
  double lr = 0.0;
  double weight_decay = 0.0;  // added to the gradient: g += weight_decay * w
  double eps = 1e-10;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double l1 = 0.0;  // of FTRL, like l2
  double l2 = 0.0;
  double lower = -std::numeric_limits<double>::infinity();  // weights are clipped to [lower, upper]
  double upper = std::numeric_limits<double>::infinity();
  std::int64_t step = 1;  // number of this step, from 1: Adam's global bias correction

  // Errors: kBadRequest, naming the value that is out of its range.
  void check() const;
};

// The gradients of a call's keys from position `first` on: rows of the dim of one class.
struct GradientPart {
  std::size_t first;
  const float* rows;
  int row_class;
  int dim;

  const float* of(std::size_t position) const noexcept {
    return rows + (position - first) * static_cast<std::size_t>(dim);
  }
};

// Keys of one stripe and their gradients. The stripe's lock is held.
struct Updates {
  const Arenas& arenas;
  Index& index;
  std::span<const RowLayout> layouts;  // of the row classes
  Group group;
  std::span<const GradientPart> parts;  // in the order of positions
  StatisticsPush statistics;
  // What stochastic rounding draws from, and room for two rows of the widest class: where there is
  // more than one class, or another dtype than float32.
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
  std::uint64_t draw_of(std::uint64_t key) const noexcept {
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

// What is fixed when a table is made.
struct RuleConfig {
  std::string name;
  bool shared = false;  // one accumulator, or pair of moments, for the row, not one per weight
  std::string bias_correction =
      "global";  // "global": by RuleValues::step; "row": by the row's own count
  float initial_accumulator = 0.0F;
  bool nesterov = false;  // momentum: step ahead of the buffer
};

// Apply one step to each key that has a row, in order, and what the push says of statistics; mark
// the rows' lines. They write the numbers of the other keys to `absent`, which has room for all,
// and return how many they are.
struct Kernels {
  // For tables of one row class of float32 weights.
  std::size_t (*plain)(const Updates&, const RuleValues&, Isa, std::uint32_t* absent) noexcept;
  std::size_t (*any)(const Updates&, const RuleValues&, Isa, std::uint32_t* absent,
                     Risen&) noexcept;
};

struct Rule {
  StateShape state;
  float initial_state;  // of every float of state
  Kernels kernels;
};

// Errors: kBadRequest for an unknown name, or an option that the rule does not have.
Rule make_rule(const RuleConfig& config);

// What the rows of a push are: gradients for the rule, differences to add (then clipped to the
// values' bounds), or new weights. Only a rule changes state.
enum class Change { kRule, kAdd, kAssign };

const Kernels& kernels_of(Change change, const Rule& rule);

}  // namespace trireme
