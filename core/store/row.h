// The first bytes of a row: its key (8 bytes), its weights and its state, both float32. layout.h
// defines the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/isa.h"

namespace trireme {

inline constexpr std::size_t kWeightsOffset = sizeof(std::uint64_t);

inline std::uint64_t key_of_row(const std::byte* row) noexcept {
  std::uint64_t key;
  std::memcpy(&key, row, sizeof key);
  return key;
}

inline float* weights_of_row(std::byte* row) noexcept {
  return reinterpret_cast<float*>(row + kWeightsOffset);
}
inline const float* weights_of_row(const std::byte* row) noexcept {
  return reinterpret_cast<const float*>(row + kWeightsOffset);
}

// Sixteen floats at any address: one vector register if the instruction set has one.
using Floats16 [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = float;

TRIREME_INLINE void copy16(float* out, const float* from) noexcept {
  *reinterpret_cast<Floats16*>(out) = *reinterpret_cast<const Floats16*>(from);
}

// Copies n floats in few instructions: the last piece may overlap the one before it.
TRIREME_INLINE void copy_floats(float* out, const float* from, std::ptrdiff_t n) noexcept {
  if (n >= 16) {
    for (std::ptrdiff_t j = 0; j < n - 16; j += 16) copy16(out + j, from + j);
    copy16(out + n - 16, from + n - 16);
  } else if (n >= 8) {
    std::memcpy(out, from, 32);
    std::memcpy(out + n - 8, from + n - 8, 32);
  } else if (n >= 4) {
    std::memcpy(out, from, 16);
    std::memcpy(out + n - 4, from + n - 4, 16);
  } else {
    for (std::ptrdiff_t j = 0; j < n; ++j) std::memcpy(out + j, from + j, 4);
  }
}

}  // namespace trireme
