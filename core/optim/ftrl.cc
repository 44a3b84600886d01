// FTRL-proximal: per weight a sum z of gradients and a sum n of their squares, and sparse weights.
//
//   sigma = (sqrt(n + g * g) - sqrt(n)) / lr;   z += g - sigma * w;   n += g * g
//   w = 0 if |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2)
//
// lr is the paper's alpha. A step with lr 0 changes nothing.
// Source: McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013, algorithm 1.
#include <cmath>

#include "optim/kernel.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

// state: (2 * dim,): z, then n.
struct Ftrl {
  explicit Ftrl(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        beta(static_cast<float>(v.beta)),
        l1(static_cast<float>(v.l1)),
        l2(static_cast<float>(v.l2)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  TRIREME_INLINE void row(float* w, float* z, const float* g, int dim) const noexcept {
    if (lr == 0.0F) return;
    float* n = z + dim;
    for_lanes(dim, [=, this](int j) {
      const float before = n[j];
      const float squares = before + g[j] * g[j];
      const float root = std::sqrt(squares);
      const float sum = z[j] + (g[j] - (root - std::sqrt(before)) / lr * w[j]);
      n[j] = squares;
      z[j] = sum;
      const float beyond = std::fabs(sum) - l1;
      const float moved = -std::copysign(beyond, sum) / ((beta + root) / lr + l2);
      w[j] = clip(beyond <= 0.0F ? 0.0F : moved, lower, upper);  // a NaN stays one
    });
  }

  float lr, beta, l1, l2, lower, upper;
};

}  // namespace

Rule make_ftrl(const RuleConfig&) {
  return {
      .state = {.per_weight = 2, .per_row = 0}, .initial_state = 0, .make_step = make_step<Ftrl>};
}

}  // namespace trireme
