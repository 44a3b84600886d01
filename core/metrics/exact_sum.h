// Sums of doubles without rounding, so that any order of adding gives the same bits.
//
// A sum is a fixed-point number of kLimbs digits to the base 2^32, lowest digit first, in units of
// 2^-1074, the smallest double. All digits but the highest are in [0, 2^32); the sign is in the
// highest. So equal sums have equal digits. Sums are added digit by digit; exact_add then carries.
//
// Threads: functions without state.
// Source: Kulisch, Computer Arithmetic and Validity, chapter 8 (complete arithmetic).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace trireme {

// 2098 bits for a double's range, and 46 more: enough for 2^46 of the largest values.
constexpr std::size_t kExactLimbs = 67;

// Adds values, then carries. Requires: finite values; |limbs[i]| < 2^62.   Cost: O(values).
void exact_add(std::span<const double> values, std::span<std::int64_t, kExactLimbs> limbs) noexcept;

}  // namespace trireme
