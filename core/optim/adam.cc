// Adam, lazy: moments of rows without a gradient do not decay. Formula and source: moments.h.
//
// t is the step of the push ("global", which equals torch.optim.SparseAdam) or the row's number of
// updates ("row", as Paddle's sparse rules count; the last float of state).
#include "optim/counter.h"
#include "optim/moments.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

// state: (2 * dim,): first moments, then second ones; shared: (2,).
template <bool kShared>
struct Adam : Moments {
  explicit Adam(const RuleValues& v) noexcept
      : Moments(v), step_size(step_size_at(static_cast<std::uint64_t>(v.step))) {}

  static constexpr int moment_floats(int dim) noexcept { return kShared ? 2 : 2 * dim; }

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    row_at(w, state, g, dim, step_size);
  }

  TRIREME_INLINE void row_at(float* w, float* state, const float* g, int dim,
                             float size) const noexcept {
    if constexpr (kShared) {
      shared(w, state, g, dim, size);
    } else {
      own(w, state, state + dim, g, dim, size);
    }
  }

  float step_size;
};

// state: those moments, then the count.
template <bool kShared>
struct RowAdam : Adam<kShared> {
  using Adam<kShared>::Adam;

  TRIREME_INLINE void row(float* w, float* state, const float* g, int dim) const noexcept {
    const std::uint32_t t = next_count(state + this->moment_floats(dim));
    this->row_at(w, state, g, dim, this->step_size_at(t));
  }
};

template <bool kShared>
Rule make(bool by_row) {
  return {
      .state = {.per_weight = kShared ? 0 : 2,
                .per_row = (kShared ? 2 : 0) + (by_row ? 1 : 0),
                .counts = by_row ? 1 : 0},
      .initial_state = 0,
      .make_step = by_row ? make_step<RowAdam<kShared>> : make_step_of_usual_dims<Adam<kShared>>};
}

}  // namespace

Rule make_adam(const RuleConfig& config) {
  const bool by_row = config.bias_correction == "row";
  return config.shared ? make<true>(by_row) : make<false>(by_row);
}

}  // namespace trireme
