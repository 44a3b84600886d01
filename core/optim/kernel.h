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

#include "base/dims.h"
#include "base/isa.h"
#include "optim/rule.h"
#include "store/find.h"
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

template <class R, class Dim>
TRIREME_INLINE std::size_t update_rows(const Updates& updates, Dim dim, const RuleValues& values,
                                       std::uint32_t* absent) noexcept {
  constexpr std::size_t kAhead = 16;  // gradients to fetch: they are near, but in no order
  const R rule(values);
  const Group group = updates.group;
  const float* const grads = updates.grads;
  const std::size_t last = group.keys.size() - 1;
  const auto grad_of = [=](std::size_t i) TRIREME_INLINE_LAMBDA {
    return grads + group.position(i) * static_cast<std::size_t>(dim);
  };
  const StatisticsPush statistics = updates.statistics;
  Index& index = updates.index;
  const auto apply = [=, &index](std::size_t i, const IndexLine* line, std::byte* row)
                         TRIREME_INLINE_LAMBDA {
                           float* weights = weights_of_row(row);
                           rule.row(weights, weights + dim, grad_of(i), dim);
                           statistics.apply(row, group.position(i));
                           index.touch(line, statistics.version);
                         };
  std::size_t num_absent = 0;
  Finder finder(updates.arena, updates.index, updates.arena.row_bytes());
  for (std::size_t begin = 0; begin < group.keys.size(); begin += Finder::kBlock) {
    finder.begin(group.keys.subspan(begin, std::min(Finder::kBlock, last + 1 - begin)));
    finder.find(
        [=, &index](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
            TRIREME_INLINE_LAMBDA {
              const float* next = grad_of(std::min(begin + i + kAhead, last));
              __builtin_prefetch(next);
              __builtin_prefetch(next + dim - 1);
              if (is_found) apply(begin + i, line, row);
            },
        [&](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
          if (row == nullptr) {
            absent[num_absent++] = static_cast<std::uint32_t>(begin + i);
          } else {
            apply(begin + i, line, row);
          }
        });
  }
  return num_absent;
}

template <class R>
std::size_t update(const Updates& updates, const RuleValues& values, Isa isa,
                   std::uint32_t* absent) noexcept {
  std::size_t num_absent = 0;
  with_isa(isa, [&]() TRIREME_INLINE_LAMBDA {
    with_dim(updates.dim, [&](auto dim) TRIREME_INLINE_LAMBDA {
      num_absent = update_rows<R>(updates, dim, values, absent);
    });
  });
  return num_absent;
}

}  // namespace trireme
