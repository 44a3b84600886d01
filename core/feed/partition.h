// The keys of one batch that are not among those of others, and rows put at their places again.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "base/array.h"

namespace trireme {

struct KeyPart {
  Array<std::uint64_t> keys;
  Array<std::int32_t> places;  // of the keys in the whole, ascending
};

struct Partition {
  KeyPart others;  // keys that are in none of the sets
  KeyPart shared;  // keys that are in one of them
};

// Requires: all are in the order of their buckets, as unique() returns them. Cost: O(keys + those
// of the sets). Errors: kBadRequest for keys in another order, and for 2^31 keys or more.
Partition partition(std::span<const std::uint64_t> keys,
                    std::span<const std::span<const std::uint64_t>> sets);

// Copies row i of `rows` to row places[i] of `out`; both have `dim` columns.
// Errors: kBadRequest if a place is not a row of `out`, naming it.
void put_rows(std::span<const float> rows, std::span<const std::int32_t> places, std::size_t dim,
              std::span<float> out);

}  // namespace trireme
