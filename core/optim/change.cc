// A push may change weights without the table's rule: add to them, or replace them. The state of a
// row does not change; a new row starts with the rule's initial state.
#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

struct Add {
  explicit Add(const RuleValues& v) noexcept
      : lower(static_cast<float>(v.lower)), upper(static_cast<float>(v.upper)) {}
  TRIREME_INLINE void row(float* w, float*, const float* d, int dim) const noexcept {
    for_lanes(dim, [=, this](int j) { w[j] = clip(w[j] + d[j], lower, upper); });
  }

  float lower, upper;
};

struct Assign {
  explicit Assign(const RuleValues&) noexcept {}
  TRIREME_INLINE void row(float* w, float*, const float* value, int dim) const noexcept {
    for_lanes(dim, [=](int j) { w[j] = value[j]; });
  }
};

}  // namespace

StepMaker step_maker_of(Change change, const Rule& rule) {
  switch (change) {
    case Change::kAdd:
      return make_step<Add>;
    case Change::kAssign:
      return make_step<Assign>;
    case Change::kRule:
      break;
  }
  return rule.make_step;
}

}  // namespace trireme
