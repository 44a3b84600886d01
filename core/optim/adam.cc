// Adam, lazy: moments of rows without a gradient do not decay.
//
//   m += (1 - beta1) * (g - m);   v += (1 - beta2) * (g * g - v)
//   w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
//
// t is the step of the push ("global", which equals torch.optim.SparseAdam) or the number of
// updates that the row has had ("row", as Paddle's sparse rules count; kept as an integer in the
// last float of state). Source: Kingma and Ba, ICLR 2015, in the form of torch.optim.SparseAdam.
#include <cmath>
#include <cstring>

#include "optim/kernel.h"
#include "optim/power.h"
#include "optim/rules.h"

namespace trireme {
namespace {

struct Adam {
  explicit Adam(const RuleValues& v) noexcept
      : values(v),
        rate1(static_cast<float>(1.0 - v.beta1)),
        rate2(static_cast<float>(1.0 - v.beta2)),
        weight_decay(static_cast<float>(v.weight_decay)),
        eps(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)),
        step_size(step_size_at(static_cast<std::uint64_t>(v.step))) {}

  float step_size_at(std::uint64_t t) const noexcept {
    return static_cast<float>(values.lr * std::sqrt(1.0 - power(values.beta2, t)) /
                              (1.0 - power(values.beta1, t)));
  }

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    row_at(w, state, g, dim, step_size);
  }

  TRIREME_INLINE void row_at(float* w, float* m, const float* g, int dim,
                             float size) const noexcept {
    float* v = m + dim;
    for_lanes(dim, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      const float mean = m[j] + rate1 * (d - m[j]);
      const float square = v[j] + rate2 * (d * d - v[j]);
      m[j] = mean;
      v[j] = square;
      w[j] = clip(w[j] - size * (mean / (std::sqrt(square) + eps)), lower, upper);
    });
  }

  RuleValues values;
  float rate1, rate2, weight_decay, eps, lower, upper, step_size;
};

struct RowAdam : Adam {
  using Adam::Adam;

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    float* count = state + 2 * dim;
    std::uint32_t t;
    std::memcpy(&t, count, sizeof t);
    t += t != UINT32_MAX;
    std::memcpy(count, &t, sizeof t);
    row_at(w, state, g, dim, step_size_at(t));
  }
};

}  // namespace

Rule make_adam(const RuleConfig& config) {
  const bool by_row = config.bias_correction == "row";
  return {.state_per_weight = 2,
          .state_per_row = by_row ? 1 : 0,
          .initial_state = 0,
          .update = by_row ? update<RowAdam> : update<Adam>};
}

}  // namespace trireme
