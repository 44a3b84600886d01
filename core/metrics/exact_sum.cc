#include "metrics/exact_sum.h"

#include <algorithm>
#include <bit>

namespace trireme {
namespace {

constexpr std::uint64_t kLow32 = 0xffffffff;
// A value adds less than 2^33 to a digit: far from 2^63 before the carry.
constexpr std::size_t kValuesPerCarry = std::size_t{1} << 28;

void add_one(double value, std::int64_t* limbs) noexcept {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const std::uint64_t exponent = bits >> 52 & 0x7ff;
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
  // |value| = mantissa * 2^(position - 1074)
  const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | std::uint64_t{1} << 52;
  const std::uint64_t position = exponent == 0 ? 0 : exponent - 1;
  const std::uint64_t low = (mantissa & kLow32) << (position & 31);
  const std::uint64_t high = (mantissa >> 32) << (position & 31);
  const std::int64_t sign = bits >> 63 ? -1 : 1;
  std::int64_t* const at = limbs + (position >> 5);
  at[0] += sign * static_cast<std::int64_t>(low & kLow32);
  at[1] += sign * static_cast<std::int64_t>((low >> 32) + (high & kLow32));
  at[2] += sign * static_cast<std::int64_t>(high >> 32);
}

void carry(std::span<std::int64_t, kExactLimbs> limbs) noexcept {
  for (std::size_t i = 0; i + 1 < limbs.size(); ++i) {
    limbs[i + 1] += limbs[i] >> 32;
    limbs[i] &= static_cast<std::int64_t>(kLow32);
  }
}

}  // namespace

void exact_add(std::span<const double> values,
               std::span<std::int64_t, kExactLimbs> limbs) noexcept {
  do {
    const std::size_t count = std::min(values.size(), kValuesPerCarry);
    for (const double value : values.first(count)) add_one(value, limbs.data());
    values = values.subspan(count);
    carry(limbs);
  } while (!values.empty());
}

}  // namespace trireme
