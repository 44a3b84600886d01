// Cutting a range into nearly equal parts for the thread pool.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/pool.h"

namespace trireme {

// Where part i of `parts` begins; part i is [chunk_begin(n, i, parts), chunk_begin(n, i + 1,
// parts)).
constexpr std::size_t chunk_begin(std::size_t n, std::size_t i, std::size_t parts) noexcept {
  return n / parts * i + n % parts * i / parts;
}

// How many parts to cut n units of work into: one for little work, at most `per_thread` per thread.
inline std::size_t num_chunks(std::size_t n, std::size_t units_min, const Pool& pool,
                              std::size_t per_thread) noexcept {
  if (pool.threads() == 1) return 1;
  return std::clamp<std::size_t>(n / units_min, 1,
                                 static_cast<std::size_t>(pool.threads()) * per_thread);
}

}  // namespace trireme
