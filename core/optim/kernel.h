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

#include "base/isa.h"
#include "optim/rule.h"
#include "store/row.h"

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

// Fetches [data, data + bytes) for writing or reading. Requires: both ends are multiples of 4.
template <int kWrite>
TRIREME_INLINE void fetch(const void* data, std::size_t bytes) noexcept {
  const auto* begin = static_cast<const std::byte*>(data);
  for (std::size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(begin + byte, kWrite);
  __builtin_prefetch(begin + bytes - 4, kWrite);
}

template <class R>
TRIREME_INLINE void apply_rows(const RowBatch& batch, const RuleValues& values) noexcept {
  // Finding the rows brought them near already: this is the distance for the second-level cache.
  constexpr std::size_t kAhead = 16;
  const R rule(values);
  const int dim = batch.dim;
  const std::size_t grad_bytes = static_cast<std::size_t>(dim) * sizeof(float);
  const auto grad_of = [&](std::size_t i) TRIREME_INLINE_LAMBDA {
    const std::size_t position = batch.positions ? batch.positions[i] : batch.first + i;
    return batch.grads + position * static_cast<std::size_t>(dim);
  };
  for (std::size_t i = 0; i < batch.size; ++i) {
    const std::size_t next = std::min(i + kAhead, batch.size - 1);
    fetch<1>(batch.rows[next], std::min<std::size_t>(batch.row_bytes, 256));
    fetch<0>(grad_of(next), std::min<std::size_t>(grad_bytes, 256));
    float* w = weights_of_row(batch.rows[i]);
    rule.row(w, w + dim, grad_of(i), dim);
  }
}

template <class R>
void apply(const RowBatch& batch, const RuleValues& values, Isa isa) noexcept {
  with_isa(isa, [&]() TRIREME_INLINE_LAMBDA { apply_rows<R>(batch, values); });
}

}  // namespace trireme
