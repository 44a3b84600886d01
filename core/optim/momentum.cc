// Stochastic gradient descent with momentum, lazy: buffers of rows without a gradient stay.
//
//   b = g in a row's first update, then b = momentum * b + (1 - dampening) * g
//   w -= lr * b;   nesterov (no dampening):   w -= lr * (g + momentum * b)
//
// Source: torch.optim.SGD.
#include "optim/counter.h"
#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

// state: (dim + 1,): the buffer, then the count of updates.
template <bool kNesterov>
struct Momentum {
  explicit Momentum(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        weight_decay(static_cast<float>(v.weight_decay)),
        momentum(static_cast<float>(v.momentum)),
        share(kNesterov ? 1.0F : static_cast<float>(1.0 - v.dampening)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  TRIREME_INLINE void row(float* w, float* buffer, const float* g, int dim) const noexcept {
    const float taken = next_count(buffer + dim) == 1 ? 1.0F : share;  // the buffer starts at 0
    for_lanes(dim, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      const float sum = momentum * buffer[j] + taken * d;
      buffer[j] = sum;
      w[j] = clip(w[j] - lr * (kNesterov ? d + momentum * sum : sum), lower, upper);
    });
  }

  float lr, weight_decay, momentum, share, lower, upper;
};

}  // namespace

Rule make_momentum(const RuleConfig& config) {
  return {.state = {.per_weight = 1, .per_row = 1, .counts = 1},
          .initial_state = 0,
          .make_step = config.nesterov ? make_step<Momentum<true>> : make_step<Momentum<false>>};
}

}  // namespace trireme
