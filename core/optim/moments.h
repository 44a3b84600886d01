// The step of Adam on some weights, shared by the rules that use it.
//
//   m += (1 - beta1) * (g - m);   v += (1 - beta2) * (g * g - v)
//   w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
//
// Source: Kingma and Ba, ICLR 2015, in the form of torch.optim.SparseAdam. With shared moments
// there is one m and one v: each weight steps by its own new m and v, and then the means over all
// weights are kept. Source: behaviour of paddlepaddle 2.6.2's SparseSharedAdamSGDRule.
#pragma once

#include <cmath>

#include "base/power.h"
#include "optim/kernel.h"
#include "optim/rule.h"

namespace trireme {

struct Moments {
  explicit Moments(const RuleValues& v) noexcept
      : values(v),
        rate1(static_cast<float>(1.0 - v.beta1)),
        rate2(static_cast<float>(1.0 - v.beta2)),
        weight_decay(static_cast<float>(v.weight_decay)),
        eps(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  // The factor of m / (sqrt(v) + eps) in the t-th step, from 1.
  float step_size_at(std::uint64_t t) const noexcept {
    return static_cast<float>(values.lr * std::sqrt(1.0 - power(values.beta2, t)) /
                              (1.0 - power(values.beta1, t)));
  }

  // w, m, v, g: (size).
  TRIREME_INLINE void own(float* w, float* m, float* v, const float* g, int size,
                          float step) const noexcept {
    for_lanes(size, [=, this](int j) {
      const float d = g[j] + weight_decay * w[j];
      const float mean = m[j] + rate1 * (d - m[j]);
      const float square = v[j] + rate2 * (d * d - v[j]);
      m[j] = mean;
      v[j] = square;
      w[j] = clip(w[j] - step * (mean / (std::sqrt(square) + eps)), lower, upper);
    });
  }

  // w, g: (size); moments: m, then v.
  TRIREME_INLINE void shared(float* w, float* moments, const float* g, int size,
                             float step) const noexcept {
    const float m = moments[0];
    const float v = moments[1];
    const auto mean_of = [=, this](float d) { return m + rate1 * (d - m); };
    const auto square_of = [=, this](float d) { return v + rate2 * (d * d - v); };
    const auto decayed = [=, this](int j) { return g[j] + weight_decay * w[j]; };
    const float means = sum_lanes(size, [=](int j) { return mean_of(decayed(j)); });
    const float squares = sum_lanes(size, [=](int j) { return square_of(decayed(j)); });
    for_lanes(size, [=, this](int j) {
      const float d = decayed(j);
      w[j] = clip(w[j] - step * (mean_of(d) / (std::sqrt(square_of(d)) + eps)), lower, upper);
    });
    moments[0] = means / static_cast<float>(size);
    moments[1] = squares / static_cast<float>(size);
  }

  RuleValues values;
  float rate1, rate2, weight_decay, eps, lower, upper;
};

}  // namespace trireme
