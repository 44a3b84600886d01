// Runs a rule over many rows, compiled once per instruction set.
//
// A rule gives `struct R { explicit R(const RuleValues&); void row(float* w, float* state, const
// float* g, int dim) const noexcept; }` in plain C++. Loops and sums go through base/lanes.h.
#pragma once

#include <memory>
#include <span>
#include <type_traits>

#include "base/dims.h"
#include "base/isa.h"
#include "base/lanes.h"
#include "optim/rule.h"

namespace trireme {

// A NaN stays a NaN, as with torch.clamp.
TRIREME_INLINE float clip(float w, float lower, float upper) noexcept {
  w = w < lower ? lower : w;
  return w > upper ? upper : w;
}

// Dim: int, or a std::integral_constant where all rows have that dim.
template <class R, class Dim>
class KernelStep final : public RuleStep {
 public:
  KernelStep(const RuleValues& values, Isa isa) noexcept : rule_(values), isa_(isa) {}

  void apply(std::span<const RowUpdate> rows, int dim) const noexcept override {
    with_isa(isa_, [=, this]() TRIREME_INLINE_LAMBDA {
      const R rule = rule_;  // a copy that the compiler can keep in registers
      for (const RowUpdate& row : rows) {
        if constexpr (std::is_same_v<Dim, int>) {
          rule.row(row.weights, row.state, row.gradient, dim);
        } else {
          rule.row(row.weights, row.state, row.gradient, Dim());
        }
      }
    });
  }

 private:
  const R rule_;
  const Isa isa_;
};

template <class R>
std::unique_ptr<RuleStep> make_step(const RuleValues& values, Isa isa, int) {
  return std::make_unique<KernelStep<R, int>>(values, isa);
}

// For the rules that most tables have: compiled for the usual dims as well.
template <class R>
std::unique_ptr<RuleStep> make_step_of_usual_dims(const RuleValues& values, Isa isa, int dim) {
  std::unique_ptr<RuleStep> step;
  with_dim(dim, [&](auto known) {
    step = std::make_unique<KernelStep<R, decltype(known)>>(values, isa);
  });
  return step;
}

}  // namespace trireme
