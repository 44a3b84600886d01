// Powers with an integer exponent.
#pragma once

#include <cstdint>

namespace trireme {

// base^n by squaring: the same bits on every machine, which std::pow does not promise.
constexpr double power(double base, std::uint64_t n) noexcept {
  double result = 1.0;
  for (; n > 0; n >>= 1, base *= base) {
    if (n & 1) result *= base;
  }
  return result;
}

}  // namespace trireme
