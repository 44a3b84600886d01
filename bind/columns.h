// The columns of a batch as Python objects.
#pragma once

#include <cstddef>
#include <utility>

#include "bind.h"
#include "feed/columns.h"
#include "feed/rows.h"

namespace trireme::bind {

// (numbers, strings, keys, offsets, weights). numbers: a list of (B, dim) float32; strings: a list
// of ((M,) uint8, (B + 1,) int64 offsets). keys: (N,) int64, feature-major; offsets: (F*B + 1,)
// int64; weights: (N,) float32, or None if the layout has none.
inline nb::tuple to_tuple(Columns&& columns, const Layout& layout) {
  nb::list numbers, strings;
  for (std::size_t i = 0; i < layout.dims.size(); ++i) {
    numbers.append(result(std::move(columns.numbers[i]), layout.dims[i]));
  }
  for (StringColumn& column : columns.strings) {
    strings.append(
        nb::make_tuple(result(std::move(column.bytes)), result(std::move(column.offsets))));
  }
  nb::object weights = nb::none();
  if (layout.has_weights) weights = nb::cast(result(std::move(columns.weights)));
  return nb::make_tuple(numbers, strings, result(std::move(columns.keys)),
                        result(std::move(columns.offsets)), weights);
}

}  // namespace trireme::bind
