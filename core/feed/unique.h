// Distinct keys of a batch, and where each occurs.
//
// Shapes: N values, K distinct keys, M occurrences (values that are not padding).
// Threads: pure functions; the result is the same for any number of threads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/array.h"
#include "base/pool.h"

namespace trireme {

// For each row (a distinct key) the positions where it occurs: order[starts[k]] .. order[starts[k +
// 1] - 1], ascending.
struct Occurrences {
  Array<std::int32_t> order;   // (M,)
  Array<std::int32_t> starts;  // (K + 1,)
};

struct Unique {
  Array<std::uint64_t> keys;  // (K,) ordered by bucket, within a bucket by first occurrence
  Array<std::int32_t> index;  // (N,) the row of each value, -1 for padding
  Occurrences occurrences;
};

// Removes duplicates. A value equal to `padding_key` gets no row.
// Errors: kBadRequest if there are 2^31 values or more.
// Cost: O(N); scratch memory of about 28 bytes per value.
Unique unique(std::span<const std::uint64_t> values, std::optional<std::uint64_t> padding_key,
              Pool& pool);

// The occurrences in an index that unique() made, or in a part of it. Rows may occur anywhere, or
// not at all. Errors: kBadRequest if an element of index is not -1 .. num_rows - 1, naming it.
Occurrences occurrences(std::span<const std::int32_t> index, std::int32_t num_rows, Pool& pool);

}  // namespace trireme
