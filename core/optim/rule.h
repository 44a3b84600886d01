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
#include <string>

#include "base/isa.h"
#include "store/arena.h"
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

// Keys of one stripe and their gradients. The stripe's lock is held.
struct Updates {
  const Arena& arena;
  Index& index;
  Group group;
  const float* grads;  // (K, dim), by position of the key in the call
  int dim;
  StatisticsPush statistics;
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

struct Rule {
  // Applies one step to each key that has a row, in order, and what the push says of statistics;
  // marks the rows' lines. Writes the numbers of the other keys to
  // `absent`, which has room for all, and returns how many they are.
  using Update = std::size_t (*)(const Updates&, const RuleValues&, Isa,
                                 std::uint32_t* absent) noexcept;

  int state_per_weight;  // floats of state: state_per_weight * dim + state_per_row
  int state_per_row;
  float initial_state;  // of every float of state
  Update update;

  int state_floats(int dim) const noexcept { return state_per_weight * dim + state_per_row; }
};

// Errors: kBadRequest for an unknown name, or an option that the rule does not have.
Rule make_rule(const RuleConfig& config);

}  // namespace trireme
