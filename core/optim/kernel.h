// Runs a rule's row function over many rows, compiled once per instruction set.
//
// A rule gives `struct R { explicit R(const RuleValues&); void row(float* w, float* state, const
// float* g, int dim) const noexcept; }` in plain C++. Loops and sums go through base/lanes.h.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/dims.h"
#include "base/isa.h"
#include "base/lanes.h"
#include "optim/rule.h"
#include "store/find.h"
#include "store/row.h"

namespace trireme {

// A NaN stays a NaN, as with torch.clamp.
TRIREME_INLINE float clip(float w, float lower, float upper) noexcept {
  w = w < lower ? lower : w;
  return w > upper ? upper : w;
}

// Compiled once, without the instruction sets: for what is seldom called in a loop.
template <class Function, class... Arguments>
[[gnu::noinline]] void call_apart(const Function& function, Arguments... arguments) {
  function(arguments...);
}

// Calls apply(i, line, row) for each key of the group that has a row, in order, and writes the
// numbers of the others to `absent`; returns how many they are. Calls fetch(i) some keys ahead.
template <class Rows, class Fetch, class Apply>
TRIREME_INLINE std::size_t for_rows_of(const Updates& updates, const Rows& rows, const Fetch& fetch,
                                       std::uint32_t* absent, const Apply& apply) noexcept {
  constexpr std::size_t kAhead = 16;  // gradients to fetch: they are near, but in no order
  const Group group = updates.group;
  const std::size_t last = group.keys.size() - 1;
  std::size_t num_absent = 0;
  Finder finder(rows, updates.index, rows.row_bytes());
  for (std::size_t begin = 0; begin < group.keys.size(); begin += kFindBlock) {
    finder.begin(group.keys.subspan(begin, std::min(kFindBlock, last + 1 - begin)));
    finder.find(
        [=](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
            TRIREME_INLINE_LAMBDA {
              fetch(std::min(begin + i + kAhead, last));
              if (is_found) apply(begin + i, line, row);
            },
        [&](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
          if (row == nullptr) {
            absent[num_absent++] = static_cast<std::uint32_t>(begin + i);
          } else {
            call_apart(apply, begin + i, line, row);
          }
        });
  }
  return num_absent;
}

// A table of one row class of float32 weights: rules work on the rows themselves. Whether it is
// scored is known at compile time: a call in the loop would cost a tenth of its speed.
template <class R, bool kIsScored, class Dim>
TRIREME_INLINE std::size_t update_plain_rows(const Updates& updates, Dim dim,
                                             const RuleValues& values,
                                             std::uint32_t* absent) noexcept {
  const R rule(values);
  const Group group = updates.group;
  const float* const grads = updates.parts[0].rows;
  const auto grad_of = [=](std::size_t position) TRIREME_INLINE_LAMBDA {
    return grads + position * static_cast<std::size_t>(dim);
  };
  const RowLayout layout = updates.layouts[0];
  const StatisticsPush statistics = updates.statistics;
  Index& index = updates.index;
  return for_rows_of(
      updates, updates.arenas.of(0),
      [=](std::size_t i) TRIREME_INLINE_LAMBDA {
        const float* next = grad_of(group.position(i));
        __builtin_prefetch(next);
        __builtin_prefetch(next + dim - 1);
      },
      absent,
      [=, &index](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
        const std::size_t position = group.position(i);
        float* weights = weights_of_row(row);
        rule.row(weights, weights + dim, grad_of(position), dim);
        if constexpr (kIsScored) statistics.count(layout, row, position);
        statistics.mark(layout, row);
        index.touch(line, statistics.version);
      });
}

// Any other table: each row goes by its class; weights of 16 bits are widened, and rounded when the
// rule has been applied; a gradient is cut, or filled up with zeros, to the row's dim.
template <class R>
TRIREME_INLINE std::size_t update_any_rows(const Updates& updates, const RuleValues& values,
                                           std::uint32_t* absent, Risen& risen) noexcept {
  const R rule(values);
  const Group group = updates.group;
  float* const filled = updates.scratch + updates.layouts[0].wide_dim();
  const auto grad_of = [&](std::size_t position, int dim) TRIREME_INLINE_LAMBDA {
    const GradientPart& part = updates.part_of(position);
    if (dim <= part.dim) return part.of(position);
    copy_floats(filled, part.of(position), part.dim);
    std::fill(filled + part.dim, filled + dim, 0.0F);
    return static_cast<const float*>(filled);
  };
  return for_rows_of(
      updates, updates.arenas,
      [&](std::size_t i) TRIREME_INLINE_LAMBDA {
        const std::size_t position = group.position(i);
        __builtin_prefetch(updates.part_of(position).of(position));
      },
      absent,
      [&](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
        const int row_class = updates.arenas.class_of(row);
        const RowLayout& layout = updates.layouts[static_cast<std::size_t>(row_class)];
        const bool is_half = layout.dtype() != Dtype::kFloat32;
        const std::size_t position = group.position(i);
        const int dim = layout.dim();
        float* weights = is_half ? updates.scratch : weights_of_row(row);
        if (is_half) layout.read_weights(row, weights, dim);
        rule.row(weights, layout.state(row), grad_of(position, dim), dim);
        if (is_half) {
          round_weights(layout.dtype(), weights, row + kWeightsOffset, dim,
                        updates.draw_of(key_of_row(row)));
        }
        if (updates.statistics.is_scored()) updates.statistics.count(layout, row, position);
        updates.statistics.mark(layout, row);
        updates.index.touch(line, updates.statistics.version);
        if (row_class == risen.head_class &&
            updates.statistics.rates.score_of(layout.score(row)) >= risen.threshold) {
          risen.numbers[risen.size++] = static_cast<std::uint32_t>(i);
        }
      });
}

template <class R, bool kKnowsDims>
std::size_t update_plain(const Updates& updates, const RuleValues& values, Isa isa,
                         std::uint32_t* absent) noexcept {
  std::size_t num_absent = 0;
  with_isa(isa, [&]() TRIREME_INLINE_LAMBDA {
    const int dim = updates.layouts[0].dim();
    if (updates.statistics.is_scored()) {
      num_absent = update_plain_rows<R, true>(updates, dim, values, absent);
    } else if constexpr (kKnowsDims) {
      with_dim(dim, [&](auto known) TRIREME_INLINE_LAMBDA {
        num_absent = update_plain_rows<R, false>(updates, known, values, absent);
      });
    } else {
      num_absent = update_plain_rows<R, false>(updates, dim, values, absent);
    }
  });
  return num_absent;
}

template <class R>
std::size_t update_any(const Updates& updates, const RuleValues& values, Isa isa,
                       std::uint32_t* absent, Risen& risen) noexcept {
  std::size_t num_absent = 0;
  with_isa(isa, [&]() TRIREME_INLINE_LAMBDA {
    num_absent = update_any_rows<R>(updates, values, absent, risen);
  });
  return num_absent;
}

template <class R>
constexpr Kernels kernels = {.plain = update_plain<R, false>, .any = update_any<R>};

// Of the rules that most tables have: compiled for the usual dims as well, a minute each.
template <class R>
constexpr Kernels kernels_of_usual_dims = {.plain = update_plain<R, true>, .any = update_any<R>};

}  // namespace trireme
