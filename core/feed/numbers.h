// Numbers in text: keys and floats.
//
// Each function reads from `p` on and moves `p` past what it read. The text may be read up to
// `text_end`, which is at or after the end of the line: no character of a number ends a line.
#pragma once

#include <cstdint>

#include "feed/words.h"

namespace trireme {

inline constexpr std::uint64_t kTens[] = {1,      10,      100,      1000,     10000,
                                          100000, 1000000, 10000000, 100000000};

// parse_digits for more than 16 digits. `value`: of the digits before `p`.
bool parse_more_digits(const char*& p, const char* text_end, std::uint64_t& value) noexcept;

// Decimal digits of a number below 2^64. False: no digit, or too large a number.
inline bool parse_digits(const char*& p, const char* text_end, std::uint64_t& value) noexcept {
  std::uint64_t word = load_word(p, text_end);
  unsigned size = count_digits(word);
  if (size == 0) return false;
  value = decimal_of(right_align(word, size));
  p += size;
  if (size < kWordBytes) return true;
  word = load_word(p, text_end);
  size = count_digits(word);
  value = value * kTens[size] + decimal_of(right_align(word, size));
  p += size;
  return size < kWordBytes || parse_more_digits(p, text_end, value);
}

// A key: an integer from -2^63 to 2^64 - 1, as 64 bits, negative ones in two's complement.
// False: no integer, or out of range.
inline bool parse_key(const char*& p, const char* text_end, std::uint64_t& key) noexcept {
  const bool is_negative = p < text_end && *p == '-';
  p += is_negative;
  if (!parse_digits(p, text_end, key)) return false;
  if (!is_negative) return true;
  if (key > 1ULL << 63) return false;
  key = 0 - key;
  return true;
}

// The float nearest to a decimal number: [+-] digits [. digits] [e [+-] digits], with at least one
// digit before or after the point. False: no such number, or it is beyond the largest float.
bool parse_float(const char*& p, const char* text_end, float& value) noexcept;
// The same for a double.
bool parse_double(const char*& p, const char* text_end, double& value) noexcept;

}  // namespace trireme
