// Numbers in text: keys and floats.
//
// Each function reads from `p` on and moves it behind what it read. The text may be read up to
// `text_end`, which is at or behind the end of the line: no character of a number ends a line.
#pragma once

#include <cstdint>

namespace trireme {

// Decimal digits of a number below 2^64. False: no digit, or too large a number.
bool parse_digits(const char*& p, const char* text_end, std::uint64_t& value) noexcept;

// A key: an integer from -2^63 to 2^64 - 1, as 64 bits, negative ones in two's complement.
// False: no integer, or out of range.
bool parse_key(const char*& p, const char* text_end, std::uint64_t& key) noexcept;

// The float nearest to a decimal number: [+-] digits [. digits] [e [+-] digits], with at least one
// digit before or behind the point. False: no such number, or it is beyond the largest float.
bool parse_float(const char*& p, const char* text_end, float& value) noexcept;

}  // namespace trireme
