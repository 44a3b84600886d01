// Runs a rule's row function over many rows, compiled once per instruction set.
//
// A rule gives `struct R { explicit R(const RuleValues&); void row(float* w, float* state, const
// float* g, int dim) const noexcept; }` in plain C++. Loops go through for_lanes, whose inner loops
// have constant length, so that the compiler turns them into whole vectors; sums go through
// sum_lanes, which fixes their order. Both do the same operations on each element for every
// instruction set.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/error.h"
#include "optim/rule.h"
#include "store/row.h"

#define TRIREME_INLINE [[gnu::always_inline]] inline

namespace trireme {

// Calls f(j) for every j in [0, dim). The calls must not depend on one another.
template <class F>
TRIREME_INLINE void for_lanes(int dim, const F& f) noexcept {
  int j = 0;
  for (; j + 16 <= dim; j += 16) {
#pragma GCC ivdep
    for (int lane = 0; lane < 16; ++lane) f(j + lane);
  }
  if (j + 8 <= dim) {
#pragma GCC ivdep
    for (int lane = 0; lane < 8; ++lane) f(j + lane);
    j += 8;
  }
  if (j + 4 <= dim) {
#pragma GCC ivdep
    for (int lane = 0; lane < 4; ++lane) f(j + lane);
    j += 4;
  }
  for (; j < dim; ++j) f(j);
}

// The sum of f(j) over j in [0, dim): sixteen partial sums (j modulo 16), then halved four times.
template <class F>
TRIREME_INLINE float sum_lanes(int dim, const F& f) noexcept {
  float partial[16] = {};
  int j = 0;
  for (; j + 16 <= dim; j += 16) {
    for (int lane = 0; lane < 16; ++lane) partial[lane] += f(j + lane);
  }
  for (int lane = 0; j + lane < dim; ++lane) partial[lane] += f(j + lane);
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

// A NaN stays a NaN, as with torch.clamp.
TRIREME_INLINE float clip(float w, float lower, float upper) noexcept {
  w = w < lower ? lower : w;
  return w > upper ? upper : w;
}

template <class R>
TRIREME_INLINE void apply_rows(const RowBatch& batch, const RuleValues& values) noexcept {
  constexpr std::size_t kAhead =
      4;  // finding the rows brought them into the second-level cache already
  const std::size_t prefetch_bytes = std::min<std::size_t>(batch.row_bytes, 256);
  const R rule(values);
  const int dim = batch.dim;
  for (std::size_t i = 0; i < batch.size; ++i) {
    const std::size_t next = std::min(i + kAhead, batch.size - 1);
    const std::size_t next_grad = batch.positions ? batch.positions[next] : batch.first + next;
    for (std::size_t byte = 0; byte < prefetch_bytes; byte += 64) {
      __builtin_prefetch(batch.rows[next] + byte, 1);
    }
    __builtin_prefetch(batch.rows[next] + prefetch_bytes - 1, 1);
    __builtin_prefetch(batch.grads + next_grad * static_cast<std::size_t>(dim));
    const std::size_t grad = batch.positions ? batch.positions[i] : batch.first + i;
    float* w = weights_of_row(batch.rows[i]);
    rule.row(w, w + dim, batch.grads + grad * static_cast<std::size_t>(dim), dim);
  }
}

template <class R>
void apply_scalar(const RowBatch& batch, const RuleValues& values) noexcept {
  apply_rows<R>(batch, values);
}
#if defined(__x86_64__)
template <class R>
[[gnu::target("avx2")]] void apply_avx2(const RowBatch& batch, const RuleValues& values) noexcept {
  apply_rows<R>(batch, values);
}
template <class R>
[[gnu::target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")]] void apply_avx512(
    const RowBatch& batch, const RuleValues& values) noexcept {
  apply_rows<R>(batch, values);
}
#endif

template <class R>
Rule::Apply apply_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return apply_avx512<R>;
  if (isa == Isa::kAvx2) return apply_avx2<R>;
#endif
  TRIREME_CHECK(isa == Isa::kScalar);
  return apply_scalar<R>;
}

}  // namespace trireme
