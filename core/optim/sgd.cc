// Stochastic gradient descent: w -= lr * g. Without state.
// Source: torch.optim.SGD without momentum.
#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

struct Sgd {
  explicit Sgd(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        weight_decay(static_cast<float>(v.weight_decay)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  TRIREME_INLINE void row(float* w, float*, const float* g, int dim) const noexcept {
    for_lanes(dim, [=, this](int j) {
      w[j] = clip(w[j] - lr * (g[j] + weight_decay * w[j]), lower, upper);
    });
  }

  float lr, weight_decay, lower, upper;
};

}  // namespace

Rule make_sgd(const RuleConfig&) {
  return {.state = {.per_weight = 0, .per_row = 0},
          .initial_state = 0,
          .make_step = make_step_of_usual_dims<Sgd>};
}

}  // namespace trireme
