// Update rules: how a gradient changes a row.
//
// A rule is lazy: only rows with a gradient change. It defines how many floats of state a row has
// and their initial value, and applies one step to many rows. It does not depend on keys, tables or
// locks. CONTRIBUTING.md describes how to add a rule.
//
// Threads: a Rule is immutable; the caller owns the rows it passes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "base/isa.h"
#include "store/layout.h"

namespace trireme {

// The numbers of one step. Every push carries them, so schedulers can change them.
struct RuleValues {
  double lr = 0.0;
  double weight_decay = 0.0;   // added to the gradient: g += weight_decay * w
  double eps = 1e-10;          // Adam, Adagrad: added to the divisor
  double beta1 = 0.9;          // Adam
  double beta2 = 0.999;        // Adam
  double momentum = 0.0;       // Momentum
  double dampening = 0.0;      // Momentum
  double beta = 1.0;           // FTRL
  double l1 = 0.0;             // FTRL
  double l2 = 0.0;             // FTRL
  double initial_g2sum = 3.0;  // FleetAdagrad
  double lower = -std::numeric_limits<double>::infinity();  // weights are clipped to [lower, upper]
  double upper = std::numeric_limits<double>::infinity();
  std::int64_t step = 1;  // number of this step, from 1: Adam's global bias correction

  // Errors: kBadRequest, naming the value that is out of its range.
  void check() const;
};

// A row, and the gradient to apply to it.
struct RowUpdate {
  float* weights;         // (dim)
  float* state;           // as many floats as the rule's StateShape has for this dim
  const float* gradient;  // (dim)
};

// One step of a rule: the rule with the values of the step, compiled for an instruction set.
class RuleStep {
 public:
  virtual ~RuleStep() = default;
  // Updates rows of one dim, in order; a row may occur more than once.
  virtual void apply(std::span<const RowUpdate> rows, int dim) const noexcept = 0;
};

// What is fixed when a table is created.
struct RuleConfig {
  std::string name;
  bool shared = false;  // one accumulator, or pair of moments, for the row, not one per weight
  std::string bias_correction =
      "global";  // "global": by RuleValues::step; "row": by the row's own count
  float initial_accumulator = 0.0F;
  bool nesterov = false;  // momentum: step ahead of the buffer
};

// dim: of all rows that the step will update; 0 if they may differ.
using StepMaker = std::unique_ptr<RuleStep> (*)(const RuleValues&, Isa, int dim);

struct Rule {
  StateShape state;
  float initial_state;  // of every float of state
  StepMaker make_step;
};

// Errors: kBadRequest for an unknown name, or an option that the rule does not have.
Rule make_rule(const RuleConfig& config);

// What the rows of a push contain: gradients for the rule, differences to add (then clipped to the
// bounds in RuleValues), or new weights. Only a rule changes state.
enum class Change { kRule, kAdd, kAssign };

StepMaker step_maker_of(Change change, const Rule& rule);

}  // namespace trireme
