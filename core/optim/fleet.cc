// The sparse rules of Paddle's Fleet: the first weight of a row, its head, is updated separately
// from the others, its tail.
//
// A new row has only a head. Its first update changes the head, then adds the tail with its initial
// weights (Fleet extends a row at the end of an update). Formulas, per part of n weights:
//
//   sgd:          w -= lr * g
//   adagrad:      w -= lr * g * sqrt(g0 / (g0 + sum));  sum += mean(g * g)
//                 with the previous sum, one per weight without `shared`; g0 is initial_g2sum
//   adagrad_v2:   sum += mean(g * g);  w -= lr * g / (sqrt(sum) + eps)
//   adam, shared_adam:   as moments.h has them, t per part
//
// Source: behaviour of paddlepaddle 2.6.2's SparseNaiveSGDRule, SparseAdaGradSGDRule,
// StdAdaGradSGDRule, SparseAdaGradV2SGDRule, SparseAdamSGDRule and SparseSharedAdamSGDRule.
#include <cmath>
#include <cstdint>

#include "optim/counter.h"
#include "optim/kernel.h"
#include "optim/moments.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

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
        initial_g2sum(static_cast<float>(v.initial_g2sum)),
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

  float ratio(float sum) const noexcept { return std::sqrt(initial_g2sum / (initial_g2sum + sum)); }

  float lr, initial_g2sum, lower, upper;
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

struct FleetAdagradV2 {
  explicit FleetAdagradV2(const RuleValues& v) noexcept
      : lr(static_cast<float>(v.lr)),
        eps(static_cast<float>(v.eps)),
        lower(static_cast<float>(v.lower)),
        upper(static_cast<float>(v.upper)) {}

  // state: (3,): the sums of head and tail, then the count.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    part(w, state, g, 1);
    if (next_count(state + 2) > 1 && dim > 1) part(w + 1, state + 1, g + 1, dim - 1);
  }

  TRIREME_INLINE void part(float* w, float* sum, const float* g, int size) const noexcept {
    *sum += sum_lanes(size, [=](int j) { return g[j] * g[j]; }) / static_cast<float>(size);
    const float divisor = std::sqrt(*sum) + eps;
    for_lanes(size, [=, this](int j) { w[j] = clip(w[j] - lr * g[j] / divisor, lower, upper); });
  }

  float lr, eps, lower, upper;
};

// Moments of a head and a tail, each with its own count of steps.
struct FleetMoments : Moments {
  explicit FleetMoments(const RuleValues& v) noexcept : Moments(v) { weight_decay = 0.0F; }
};

struct FleetAdam : FleetMoments {
  using FleetMoments::FleetMoments;

  // state: (2 * dim + 2,): first moments, second moments, then the counts.
  TRIREME_INLINE void row(float* w, float* m, const float* g, int dim) const noexcept {
    float* v = m + dim;
    float* counts = v + dim;
    const std::uint32_t t = next_count(counts);
    own(w, m, v, g, 1, step_size_at(t));
    if (t == 1 || dim == 1) return;
    own(w + 1, m + 1, v + 1, g + 1, dim - 1, step_size_at(next_count(counts + 1)));
  }
};

struct SharedFleetAdam : FleetMoments {
  using FleetMoments::FleetMoments;

  // state: (6,): m and v of the head, of the tail, then the counts.
  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const std::uint32_t t = next_count(state + 4);
    shared(w, state, g, 1, step_size_at(t));
    if (t == 1 || dim == 1) return;
    shared(w + 1, state + 2, g + 1, dim - 1, step_size_at(next_count(state + 5)));
  }
};

}  // namespace

Rule make_fleet_sgd(const RuleConfig&) {
  return {.state = {.per_weight = 0, .per_row = 1, .counts = 1},
          .initial_state = 0,
          .make_step = make_step<FleetSgd>};
}

Rule make_fleet_adagrad(const RuleConfig& config) {
  if (config.shared) {
    return {.state = {.per_weight = 0, .per_row = 3, .counts = 1},
            .initial_state = 0,
            .make_step = make_step<SharedFleetAdagrad>};
  }
  return {.state = {.per_weight = 1, .per_row = 1, .counts = 1},
          .initial_state = 0,
          .make_step = make_step<FleetAdagrad>};
}

Rule make_fleet_adagrad_v2(const RuleConfig&) {
  return {.state = {.per_weight = 0, .per_row = 3, .counts = 1},
          .initial_state = 0,
          .make_step = make_step<FleetAdagradV2>};
}

Rule make_fleet_adam(const RuleConfig&) {
  return {.state = {.per_weight = 2, .per_row = 2, .counts = 2},
          .initial_state = 0,
          .make_step = make_step<FleetAdam>};
}

Rule make_fleet_shared_adam(const RuleConfig&) {
  return {.state = {.per_weight = 0, .per_row = 6, .counts = 2},
          .initial_state = 0,
          .make_step = make_step<SharedFleetAdam>};
}

}  // namespace trireme
