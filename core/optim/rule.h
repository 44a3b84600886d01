// Update rules: how a gradient changes a row.
//
// A rule is lazy: only rows with a gradient change. It says how many floats of state a row carries
// and how state starts, and applies one step to many rows; it knows nothing of keys, tables or
// locks. To add a rule: one file (see adagrad.cc) and one line in rule.cc.
//
// Threads: a Rule is a constant; the caller owns the rows it passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "base/isa.h"

namespace trireme {

// The numbers of one step. They travel with every push, so that schedulers drive them.
struct RuleValues {
  double lr = 0.0;
  double weight_decay = 0.0;  // added to the gradient: g += weight_decay * w
  double eps = 1e-10;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double lower = -std::numeric_limits<double>::infinity();  // weights are clipped to [lower, upper]
  double upper = std::numeric_limits<double>::infinity();
  std::int64_t step = 1;  // number of this step, from 1: Adam's global bias correction

  // Errors: kBadRequest, naming the value that is out of its range.
  void check() const;
};

// The rows of one call and their gradients.
struct RowBatch {
  std::byte* const* rows;  // (size): each as in row.h
  const float* grads;      // (K, dim)
  const std::uint32_t*
      positions;  // (size): the gradient of rows[i] is grads[positions[i]]; null: first + i
  std::size_t first;
  std::size_t size;
  int dim;
  std::size_t row_bytes;  // of key, weights and state
};

// What is fixed when a table is made.
struct RuleConfig {
  std::string name;
  bool shared = false;  // one accumulator for the row instead of one per weight
  std::string bias_correction =
      "global";  // "global": by RuleValues::step; "row": by the row's own count
  float initial_accumulator = 0.0F;
};

struct Rule {
  using Apply = void (*)(const RowBatch&, const RuleValues&, Isa) noexcept;

  int state_per_weight;  // floats of state: state_per_weight * dim + state_per_row
  int state_per_row;
  float initial_state;  // of every float of state
  Apply apply;

  int state_floats(int dim) const noexcept { return state_per_weight * dim + state_per_row; }
};

// Errors: kBadRequest for an unknown name, or an option that the rule does not have.
Rule make_rule(const RuleConfig& config);

}  // namespace trireme
