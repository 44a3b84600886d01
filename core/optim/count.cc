// Counts: every update adds 1 to each weight, independent of its gradient and rates. For tests that
// every push is applied exactly once.
#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

struct Count {
  explicit Count(const RuleValues& v) noexcept
      : lower(static_cast<float>(v.lower)), upper(static_cast<float>(v.upper)) {}
  TRIREME_INLINE void row(float* w, float*, const float*, int dim) const noexcept {
    for_lanes(dim, [=, this](int j) { w[j] = clip(w[j] + 1.0F, lower, upper); });
  }

  float lower, upper;
};

}  // namespace

Rule make_count(const RuleConfig&) {
  return {
      .state = {.per_weight = 0, .per_row = 0}, .initial_state = 0, .make_step = make_step<Count>};
}

}  // namespace trireme
