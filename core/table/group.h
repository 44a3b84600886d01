// Some keys of a call, and their positions in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trireme {

struct Group {
  std::span<const std::uint64_t> keys;
  const std::uint32_t* positions;  // keys[i] is key positions[i] of the call; null: first + i
  std::size_t first;

  std::size_t position(std::size_t i) const noexcept {
    return positions ? positions[i] : first + i;
  }
};

}  // namespace trireme
