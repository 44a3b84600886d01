#include "feed/numbers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <system_error>
#include <type_traits>

#include "feed/words.h"

namespace trireme {
namespace {

// The powers of ten that a double holds exactly.
constexpr std::array<double, 23> kExactTens = [] {
  std::array<double, 23> tens{};
  double ten = 1;
  for (double& value : tens) {
    value = ten;
    ten *= 10;
  }
  return tens;
}();
constexpr std::uint64_t kMaxExact = 1ULL << 53;
constexpr std::int64_t kMaxMantissaDigits = 19;  // fewer than 2^64 in any case

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

// A number as written: the digits before and after the point as one integer, and its power of ten.
struct Decimal {
  bool is_negative = false;
  std::uint64_t mantissa = 0;  // right if num_digits <= kMaxMantissaDigits
  std::int64_t num_digits = 0;
  std::int64_t exponent = 0;
  const char* begin = nullptr;  // behind the sign
};

void scan_digits(const char*& p, const char* text_end, Decimal& number) noexcept {
  for (unsigned size = kWordBytes; size == kWordBytes;) {
    const std::uint64_t word = load_word(p, text_end);
    size = count_digits(word);
    number.mantissa = number.mantissa * kTens[size] + decimal_of(right_align(word, size));
    number.num_digits += size;
    p += size;
  }
}

// An exponent, if a complete one follows. Its value is capped if it is out of every range.
void scan_exponent(const char*& p, const char* text_end, Decimal& number) noexcept {
  const char* q = p;
  if (q == text_end || (*q | 0x20) != 'e') return;
  ++q;
  const bool is_negative = q < text_end && *q == '-';
  if (q < text_end && (*q == '-' || *q == '+')) ++q;
  if (q == text_end || !is_digit(*q)) return;
  std::int64_t exponent = 0;
  for (; q < text_end && is_digit(*q); ++q) {
    exponent = std::min<std::int64_t>(exponent * 10 + (*q - '0'), 1'000'000'000'000);
  }
  number.exponent += is_negative ? -exponent : exponent;
  p = q;
}

// The slow path, for what the fast path of parse_number cannot do exactly.
template <class T>
bool parse_exactly(const Decimal& number, const char* end, T& value) noexcept {
  const auto [stop, error] = std::from_chars(number.begin, end, value);
  if (error == std::errc()) return true;
  // Out of range: too large, or nearer to 0 than to the smallest float. The first digit that is not
  // 0 decides: its place is 10^place.
  const char* const point = std::find(number.begin, end, '.');
  const char* const first =
      std::find_if(number.begin, end, [](char c) { return c >= '1' && c <= '9'; });
  const char* const last_before =
      std::find_if(number.begin, end, [](char c) { return !is_digit(c); });
  std::int64_t place = last_before - first - 1;
  if (point != end && first > point) place = point - first;
  std::int64_t fraction_digits = 0;
  if (point != end) {
    fraction_digits = std::find_if(point + 1, end, [](char c) { return !is_digit(c); }) - point - 1;
  }
  if (place + number.exponent + fraction_digits > 0) return false;
  value = 0;
  return true;
}

// Whether rounding the double to T gives the T nearest to the number. Not if the double is half-way
// between two floats.
template <class T>
bool is_rounded_once(double x) noexcept {
  if constexpr (std::is_same_v<T, double>) return true;
  constexpr std::uint64_t kLostBits = (1ULL << 29) - 1;
  return (std::bit_cast<std::uint64_t>(x) & kLostBits) != 1ULL << 28;
}

template <class T>
bool parse_number(const char*& p, const char* text_end, T& value) noexcept {
  Decimal number;
  if (p < text_end && (*p == '-' || *p == '+')) number.is_negative = *p++ == '-';
  number.begin = p;
  scan_digits(p, text_end, number);
  if (p < text_end && *p == '.') {
    const char* const point = p++;
    scan_digits(p, text_end, number);
    number.exponent = point + 1 - p;
  }
  if (number.num_digits == 0) return false;
  scan_exponent(p, text_end, number);

  // Mantissa and power of ten are exact doubles: their product or quotient is rounded once. A
  // float is rounded once more.
  const std::int64_t tens = number.exponent < 0 ? -number.exponent : number.exponent;
  if (number.num_digits <= kMaxMantissaDigits && number.mantissa <= kMaxExact &&
      tens < static_cast<std::int64_t>(kExactTens.size())) {
    const double ten = kExactTens[static_cast<std::size_t>(tens)];
    const double mantissa = static_cast<double>(number.mantissa);
    const double x = number.exponent < 0 ? mantissa / ten : mantissa * ten;
    if (is_rounded_once<T>(x)) {
      value = static_cast<T>(number.is_negative ? -x : x);
      return true;
    }
  }
  if (!parse_exactly(number, p, value)) return false;
  if (number.is_negative) value = -value;
  return true;
}

}  // namespace

bool parse_more_digits(const char*& p, const char* text_end, std::uint64_t& value) noexcept {
  for (; p < text_end && is_digit(*p); ++p) {
    if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return false;
    if (__builtin_add_overflow(value, static_cast<std::uint64_t>(*p - '0'), &value)) return false;
  }
  return true;
}

bool parse_float(const char*& p, const char* text_end, float& value) noexcept {
  return parse_number(p, text_end, value);
}

bool parse_double(const char*& p, const char* text_end, double& value) noexcept {
  return parse_number(p, text_end, value);
}

}  // namespace trireme
