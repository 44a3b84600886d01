// The bytes of a row: its key (8 bytes), its weights, its state; both float32.
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

TRIREME_INLINE void copy_floats(float* out, const float* from, int n) noexcept {
  int j = 0;
  for (; j + 16 <= n; j += 16) std::memcpy(out + j, from + j, 64);
  for (; j + 4 <= n; j += 4) std::memcpy(out + j, from + j, 16);
  for (; j < n; ++j) out[j] = from[j];
}

}  // namespace trireme
