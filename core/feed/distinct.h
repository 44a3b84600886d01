// The distinct keys of many values: unique() without where each occurs, in less than half the time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/array.h"
#include "base/pool.h"

namespace trireme {

// The keys of unique(), in its order.
// Threads: a pure function; the result is the same for any number of threads.
// Cost: O(N); scratch memory of 16 bytes per value.
Array<std::uint64_t> distinct(std::span<const std::uint64_t> values,
                              std::optional<std::uint64_t> padding_key, Pool& pool);

}  // namespace trireme
