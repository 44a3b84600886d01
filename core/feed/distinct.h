// The distinct keys of many values: unique() without where each occurs, in less than half the time.
#pragma once

#include <cstdint>
#include <span>

#include "base/array.h"
#include "base/pool.h"

namespace trireme {

// The distinct keys of several arrays, in the order of their hashes, and so of their buckets.
// Threads: a pure function; the result is the same for any number of threads.
// Cost: O(N) for N values, and 8 N bytes, which the result keeps if it has at least N / 2 keys.
Array<std::uint64_t> distinct(std::span<const std::span<const std::uint64_t>> parts, Pool& pool);

}  // namespace trireme
