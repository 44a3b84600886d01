// Iterating over many rows of a bucket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "store/arenas.h"
#include "store/layout.h"

namespace trireme {

// Calls visit(i, layout, row) for the row of each reference. Prefetches `num_bytes` bytes of each
// row from offset(layout) on, some rows ahead.   layouts: of the row classes.
template <class Offset, class Visit>
void for_rows(const Arenas& arenas, std::span<const RowLayout> layouts,
              std::span<const Arena::Ref> refs, const Offset& offset, std::size_t num_bytes,
              const Visit& visit) {
  constexpr std::size_t kAhead = 16;
  const auto layout_of = [&](Arena::Ref ref) -> const RowLayout& {
    return layouts[static_cast<std::size_t>(arenas.class_of(ref))];
  };
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const Arena::Ref ahead = refs[std::min(i + kAhead, refs.size() - 1)];
    const std::byte* next = arenas.row(ahead) + offset(layout_of(ahead));
    for (std::size_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(next + byte);
    visit(i, layout_of(refs[i]), arenas.row(refs[i]));
  }
}

inline std::size_t from_stamp(const RowLayout& layout) noexcept { return layout.stamp_offset(); }
inline std::size_t from_start(const RowLayout&) noexcept { return 0; }

}  // namespace trireme
