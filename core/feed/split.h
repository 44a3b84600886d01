// Grouping the keys of a request by the server that owns their bucket.
//
// Threads: a pure function; the same result for any number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "base/array.h"
#include "base/pool.h"

namespace trireme {

struct Split {
  Array<std::int32_t>
      order;  // (K,) positions of the keys of owner 0, ascending, then of owner 1, ...
  Array<std::int64_t> counts;  // (num_owners,)
};

// Errors: kBadRequest unless there are 4096 owners, all below num_owners, and fewer than 2^31 keys.
Split split(std::span<const std::uint64_t> keys,    // (K,)
            std::span<const std::uint16_t> owners,  // (4096,) of each bucket
            std::uint16_t num_owners, Pool& pool);

}  // namespace trireme
