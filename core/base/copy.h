// Copies of rows, which are tens to hundreds of bytes: inlined, unlike memcpy of a size that the
// compiler does not know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/isa.h"

namespace trireme {

TRIREME_INLINE void copy_row(void* to, const void* from, std::size_t bytes) noexcept {
  constexpr std::size_t kStep = 32;
  auto* const out = static_cast<std::uint8_t*>(to);
  const auto* const in = static_cast<const std::uint8_t*>(from);
  if (bytes < kStep) {
    std::memcpy(out, in, bytes);
    return;
  }
  for (std::size_t i = 0; i + kStep <= bytes; i += kStep) std::memcpy(out + i, in + i, kStep);
  std::memcpy(out + bytes - kStep, in + bytes - kStep, kStep);
}

// The same past the caches, which saves reading what is overwritten: for much memory that is not
// read soon. Other threads see it after order_streamed().   Requires: `to` and `bytes` are
// multiples of 8.
TRIREME_INLINE void stream_row(void* to, const void* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  for (std::size_t i = 0; i < bytes; i += 8) {
    long long word;
    std::memcpy(&word, static_cast<const std::uint8_t*>(from) + i, sizeof word);
    _mm_stream_si64(reinterpret_cast<long long*>(static_cast<std::uint8_t*>(to) + i), word);
  }
#else
  copy_row(to, from, bytes);
#endif
}

inline void order_streamed() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace trireme
