// Keys and floats in text: compared to the C library, at the limits of the range, and half-way
// cases.
#include "feed/numbers.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

// Parses the whole text as a number; false if it is not one.
template <class T, class Parse>
bool parse_all(Parse parse, const std::string& text, T& value) {
  const Exact exact(text);
  const char* p = exact.data.get();
  const char* const end = p + text.size();
  return parse(p, end, value) && p == end;
}

void reads_keys() {
  std::uint64_t key = 0;
  for (const char* text :
       {"0", "7", "12345678", "123456789", "1234567890123456", "12345678901234567",
        "18446744073709551615", "000000000000000000000012"}) {
    CHECK(parse_all(parse_key, text, key));
    CHECK_EQUAL(key, std::strtoull(text, nullptr, 10));
  }
  for (const char* text : {"-0", "-1", "-9223372036854775808"}) {
    CHECK(parse_all(parse_key, text, key));
    CHECK_EQUAL(key, static_cast<std::uint64_t>(std::strtoll(text, nullptr, 10)));
  }
  for (const char* text : {"", "-", "--1", "+1", " 1", "1 ", "1.0", "0x1", "18446744073709551616",
                           "99999999999999999999999", "-9223372036854775809"}) {
    CHECK(!parse_all(parse_key, text, key));
  }
}

template <class T, class Parse>
void check_number(Parse parse, T expected, const std::string& text) {
  T value = 0;
  const bool is_number = parse_all(parse, text, value);
  if (!is_number && !std::isfinite(expected)) return;
  if (is_number && value == expected && std::signbit(value) == std::signbit(expected)) return;
  std::cerr << text << ": ";
  CHECK(is_number);
  CHECK_EQUAL(value, expected);
}

void check_float(const std::string& text) {
  check_number(parse_float, std::strtof(text.c_str(), nullptr), text);
  check_number(parse_double, std::strtod(text.c_str(), nullptr), text);
}

void reads_floats_as_the_c_library_does(std::uint64_t seed) {
  const std::string zeros(60, '0');
  const std::vector<std::string> texts = {
      "0", "1.5", "5.", ".5", "1e0", "1E+2", "1e-2", "0.1", "00000000000000000000.5",
      // The ends of the range.
      "3.4028235e38", "3.40282356e38", "3.4028236e38", "1e39", "1e400", "1e99999999999999999999",
      "1e-45", "7e-46", "8e-46", "1e-400", "1e-99999999999999999999", "0e999999999999",
      // Half-way between two floats, and a little more.
      "16777217", "16777219", "16777217.00000000000000000000001",
      // Far more digits than a number can hold.
      zeros + "1", "1" + zeros, "1" + zeros + "e-60", "0." + zeros + "1", "0." + zeros + "1e61",
      "1" + std::string(400, '0'), "1" + std::string(400, '0') + "e-400",
      "0." + std::string(400, '0') + "1", "0." + std::string(400, '0') + "1e401",
      "1" + zeros + "e999999999999"};
  for (const std::string& text : texts) {
    check_float(text);
    check_float("-" + text);
    check_float("+" + text);
  }
  test::Random random(seed);
  char text[400];
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.next());
    const float value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) continue;
    const auto above = static_cast<double>(std::nextafter(value, INFINITY));
    const double half_way = (static_cast<double>(value) + above) / 2;
    const auto any = std::bit_cast<double>(random.next());
    for (const double x : {static_cast<double>(value), half_way, value * 0.75, any}) {
      const int digits = static_cast<int>(random.below(24));
      std::snprintf(text, sizeof text, random.below(2) ? "%.*g" : "%.*e", digits, x);
      check_float(text);
    }
    std::snprintf(text, sizeof text, "%u.%0*u", bits >> random.below(32),
                  1 + static_cast<int>(random.below(12)), bits >> random.below(32));
    check_float(text);
  }
}

void refuses_what_is_no_number() {
  float value = 0;
  for (const char* text :
       {"",    "-",   "+",    ".",   "e5",  ".e5",   "1e", "1e+", "1e-", "1.5.", "--1",
        "+-1", "inf", "-inf", "nan", "NaN", "0x1p3", "1f", "1,5", " 1",  "1 ",   "1_0"}) {
    CHECK(!parse_all(parse_float, text, value));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  reads_keys();
  reads_floats_as_the_c_library_does(seed);
  refuses_what_is_no_number();
  return 0;
}
