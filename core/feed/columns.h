// The columns of a batch, feature-major, made from examples that were parsed row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/array.h"
#include "base/pool.h"
#include "feed/rows.h"

namespace trireme {

// A string per example: that of example b is bytes[offsets[b] .. offsets[b + 1]].
struct StringColumn {
  Array<std::uint8_t> bytes;
  Array<std::int64_t> offsets;  // (B + 1,)
};

// One batch of B examples, F features and N keys.
struct Columns {
  std::size_t num_examples = 0;       // B
  std::vector<Array<float>> numbers;  // (B, dim) each
  std::vector<StringColumn> strings;
  Array<std::int64_t> keys;     // (N,)
  Array<std::int64_t> offsets;  // (F*B + 1,)
  Array<float> weights;         // (N,), empty without weights
};

// All examples of the blocks, in their order. The same for any number of threads.
Columns to_columns(const Layout& layout, std::span<const Rows> blocks, Pool& pool);

}  // namespace trireme
