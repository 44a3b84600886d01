#include "base/finite.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace trireme {

std::size_t first_not_finite(std::span<const float> values) noexcept {
  constexpr std::size_t kBlock = 1024;  // examined by vector instructions, without a branch
  const auto is_finite = [](float value) {
    return (std::bit_cast<std::uint32_t>(value) & 0x7F800000U) != 0x7F800000U;
  };
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const std::span<const float> block =
        values.subspan(begin, std::min(kBlock, values.size() - begin));
    // Adding 1 to an exponent of 255 sets the bit of the sign, which is cleared before.
    std::uint32_t carry = 0;
    for (const float value : block) {
      carry |= (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) + 0x00800000U;
    }
    if (carry >> 31 == 0) continue;
    for (std::size_t i = 0; i < block.size(); ++i) {
      if (!is_finite(block[i])) return begin + i;
    }
  }
  return values.size();
}

}  // namespace trireme
