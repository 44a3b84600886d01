// The sparse rules of Paddle's Fleet: the first weight of a row, its head, learns apart from the
// others, its tail.
//
// A new row has a head alone: its first update moves that, and then the tail begins with its
// initial weights (Fleet extends a row at the end of an update). Formulas, per part of n weights:
//
//   sgd:      w -= lr * g
//   adagrad:  w -= lr * g * sqrt(g0 / (g0 + sum));  sum += mean(g * g)      the sum of before; g0
//   is
//             the step's eps                        (sum += g * g per weight without `shared`)
//   adam:     m = beta1 * m + (1 - beta1) * g;  v likewise of g * g
//             w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps), t per part
//
// Source: behaviour of paddlepaddle 2.6.2's SparseNaiveSGDRule, SparseAdaGradSGDRule,
// StdAdaGradSGDRule and SparseAdamSGDRule.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/kernel.h"
#include "optim/power.h"
#include "optim/rules.h"

namespace trireme {
namespace {

// How many updates a row has had, kept as an integer in a float of its state; counts this one.
TRIREME_INLINE std::uint32_t next_count(float* count) noexcept {
  std::uint32_t t;
  std::memcpy(&t, count, sizeof t);
  t += t != UINT32_MAX;
  std::memcpy(count, &t, sizeof t);
  return t;
}

struct FleetSgd {
  explicit FleetSgd(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  // state: (1,): the count.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const int size = next_count(state) > 1 ? dim : 1;
    for_lanes(size, [=, this](int j) { w[j] = clip(w[j] - lr * g[j], lower, upper); });
  }

  float lr, lower, upper;
};

struct FleetAdagrad {
  explicit FleetAdagrad(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        initial(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  // state: (dim + 1,): the sums, then the count.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const int size = next_count(state + dim) > 1 ? dim : 1;
    for_lanes(size, [=, this](int j) {
      w[j] = clip(w[j] - lr * g[j] * ratio(state[j]), lower, upper);
      state[j] += g[j] * g[j];
    });
  }

  float ratio(float sum) const noexcept { return std::sqrt(initial / (initial + sum)); }

  float lr, initial, lower, upper;
};

struct SharedFleetAdagrad : FleetAdagrad {
  using FleetAdagrad::FleetAdagrad;

  // state: (3,): the sums of head and tail, then the count.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    part(w, state, g, 1);
    if (next_count(state + 2) > 1 && dim > 1) part(w + 1, state + 1, g + 1, dim - 1);
  }

  TRIREME_INLINE void part(float* w, float* sum, const float* g, int size) const noexcept {
    const float rate = lr * ratio(*sum);
    const float squares = sum_lanes(size, [=](int j) { return g[j] * g[j]; });
    for_lanes(size, [=, this](int j) { w[j] = clip(w[j] - rate * g[j], lower, upper); });
    *sum += squares / static_cast<float>(size);
  }
};

struct FleetAdam {
  explicit FleetAdam(const RuleValues& v) noexcept
      : values(v),
        rate1(static_cast<float>(1.0 - v.beta1)),
        rate2(static_cast<float>(1.0 - v.beta2)),
        eps(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  // state: (2 * dim + 1,): first moments, second moments, then the count.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const std::uint32_t t = next_count(state + 2 * dim);
    part(w, state, state + dim, g, 1, step_size_at(t));
    if (t > 1) part(w + 1, state + 1, state + dim + 1, g + 1, dim - 1, step_size_at(t - 1));
  }

  TRIREME_INLINE void part(float* w, float* m, float* v, const float* g, int size,
                           float step) const noexcept {
    for_lanes(size, [=, this](int j) {
      const float mean = m[j] + rate1 * (g[j] - m[j]);
      const float square = v[j] + rate2 * (g[j] * g[j] - v[j]);
      m[j] = mean;
      v[j] = square;
      w[j] = clip(w[j] - step * (mean / (std::sqrt(square) + eps)), lower, upper);
    });
  }

  float step_size_at(std::uint64_t t) const noexcept {
    return static_cast<float>(values.lr * std::sqrt(1.0 - power(values.beta2, t)) /
                              (1.0 - power(values.beta1, t)));
  }

  RuleValues values;
  float rate1, rate2, eps, lower, upper;
};

}  // namespace

Rule make_fleet_sgd(const RuleConfig&) {
  return {
      .state_per_weight = 0, .state_per_row = 1, .initial_state = 0, .update = update<FleetSgd>};
}

Rule make_fleet_adagrad(const RuleConfig& config) {
  if (config.shared) {
    return {.state_per_weight = 0,
            .state_per_row = 3,
            .initial_state = 0,
            .update = update<SharedFleetAdagrad>};
  }
  return {.state_per_weight = 1,
          .state_per_row = 1,
          .initial_state = 0,
          .update = update<FleetAdagrad>};
}

Rule make_fleet_adam(const RuleConfig&) {
  return {
      .state_per_weight = 2, .state_per_row = 1, .initial_state = 0, .update = update<FleetAdam>};
}

}  // namespace trireme
