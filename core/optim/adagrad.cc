// Adagrad: steps that shrink with the squared gradients seen so far.
//
//   per weight: state += g * g;         w -= lr * g / (sqrt(state) + eps)
//   shared:     state += mean(g * g);   w -= lr * g / (sqrt(state) + eps)     one accumulator for
//   the row
//
// Source: Duchi et al., JMLR 2011, diagonal form, as torch.optim.Adagrad has it; shared: Paddle's
// SparseAdaGradV2SGDRule.
#include <cmath>

#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

struct Adagrad {
  explicit Adagrad(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        weight_decay(static_cast<float>(v.weight_decay)),
        eps(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    for_lanes(dim, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      const float sum = state[j] + d * d;
      state[j] = sum;
      w[j] = clip(w[j] - lr * d / (std::sqrt(sum) + eps), lower, upper);
    });
  }

  float lr, weight_decay, eps, lower, upper;
};

struct SharedAdagrad : Adagrad {
  using Adagrad::Adagrad;

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const float squares = sum_lanes(dim, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      return d * d;
    });
    *state += squares / static_cast<float>(dim);
    const float divisor = std::sqrt(*state) + eps;
    for_lanes(dim, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      w[j] = clip(w[j] - lr * d / divisor, lower, upper);
    });
  }
};

}  // namespace

Rule make_adagrad(const RuleConfig& config) {
  if (config.shared) {
    return {.state = {.per_weight = 0, .per_row = 1},
            .initial_state = config.initial_accumulator,
            .make_step = make_step_of_usual_dims<SharedAdagrad>};
  }
  return {.state = {.per_weight = 1, .per_row = 0},
          .initial_state = config.initial_accumulator,
          .make_step = make_step_of_usual_dims<Adagrad>};
}

}  // namespace trireme
