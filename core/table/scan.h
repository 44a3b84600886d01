// Passing over many rows of a bucket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "store/arena.h"

namespace trireme {

// Calls visit(i, row) for the row of each reference. Of every row, `num_bytes` bytes from `offset`
// on are fetched some rows ahead.
template <class Visit>
void for_rows(const Arena& arena, std::span<const Arena::Ref> refs, std::size_t offset,
              std::size_t num_bytes, const Visit& visit) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const std::byte* next = arena.row(refs[std::min(i + kAhead, refs.size() - 1)]) + offset;
    for (std::size_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(next + byte);
    visit(i, arena.row(refs[i]));
  }
}

}  // namespace trireme
