// The number of updates of a row, stored as an integer in a float of its state.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/isa.h"

namespace trireme {

// Increments the count and returns it. The count saturates.
TRIREME_INLINE std::uint32_t next_count(float* count) noexcept {
  std::uint32_t n;
  std::memcpy(&n, count, sizeof n);
  n += n != UINT32_MAX;
  std::memcpy(count, &n, sizeof n);
  return n;
}

}  // namespace trireme
