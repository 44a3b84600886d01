// Weights of 16 bits: every number of each type, rounding to neighbours, and the probability of
// each.
#include "store/dtype.h"

#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "check.h"

using namespace trireme;

namespace {

// The value of 16 bits from the definition: a sign, `exponent_bits` of exponent, the rest fraction.
double value_of(std::uint16_t h, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int exponent = (h & 0x7FFF) >> fraction_bits;
  const int fraction = h & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (h & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  const int scale = std::max(exponent, 1) - bias - fraction_bits;
  return sign * std::ldexp(fraction + (exponent > 0 ? 1 << fraction_bits : 0), scale);
}

template <class Type>
constexpr int kExponentBits = std::is_same_v<Type, dtype::Bfloat16> ? 8 : 5;

constexpr std::array<std::uint32_t, 6> kRandoms = {0, 1, 0x1FFF, 0xFFFF, 0x80000000, 0xFFFFFFFF};

// Every number widens to its value, and rounds to itself for all random bits.
template <class Type>
void every_number_is_kept() {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto h = static_cast<std::uint16_t>(i);
    const double value = value_of(h, kExponentBits<Type>);
    const float widened = Type::widen(h);
    if (std::isnan(value)) {
      CHECK(std::isnan(widened));
      for (const std::uint32_t random : kRandoms) {
        CHECK(std::isnan(Type::widen(Type::round(widened, random))));
      }
      continue;
    }
    CHECK_EQUAL(static_cast<double>(widened), value);
    CHECK_EQUAL(std::signbit(widened), (h & 0x8000) != 0);
    for (const std::uint32_t random : kRandoms) CHECK_EQUAL(Type::round(widened, random), h);
    CHECK_EQUAL(Type::round(widened, Type::nearest(widened)), h);
  }
}

// The neighbours of |x|, and the position of |x| between them, 0 to 1.
struct Between {
  double lower, upper, share;
};
template <class Type>
Between between(double x) {
  std::uint16_t low = 0, high = Type::round(std::numeric_limits<float>::max(), 0);
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(middle, kExponentBits<Type>) <= x ? low : high) = middle;
  }
  const double lower = value_of(low, kExponentBits<Type>);
  const double upper = value_of(high, kExponentBits<Type>);
  return {.lower = lower, .upper = upper, .share = (x - lower) / (upper - lower)};
}

template <class Type>
std::vector<float> some_numbers(test::Random& random) {
  std::vector<float> numbers;
  const int lowest = kExponentBits<Type> == 5 ? -26 : -120;
  const int highest = kExponentBits<Type> == 5 ? 14 : 126;
  for (int i = 0; i < 300; ++i) {
    const double mantissa = 1 + static_cast<double>(random.next() >> 11) * 0x1p-53;
    const int exponent =
        lowest + static_cast<int>(random.below(static_cast<std::uint64_t>(highest - lowest)));
    const auto x = static_cast<float>(std::ldexp(mantissa, exponent));
    numbers.push_back(i % 2 == 0 ? x : -x);
  }
  return numbers;
}

// Rounding goes to a neighbour, up with the right frequency, and to the nearest if requested.
template <class Type>
void chances_are_in_proportion(test::Random& random) {
  constexpr int kDraws = 20'000;
  for (const float x : some_numbers<Type>(random)) {
    const auto [lower, upper, share] = between<Type>(std::fabs(x));
    int ups = 0;
    for (int i = 0; i < kDraws; ++i) {
      const float rounded = Type::widen(Type::round(x, static_cast<std::uint32_t>(random.next())));
      CHECK(std::signbit(rounded) == std::signbit(x));
      const double size = std::fabs(rounded);
      CHECK(size == lower || size == upper);
      ups += size == upper;
    }
    const double deviation = std::sqrt(share * (1 - share) / kDraws);
    CHECK(std::fabs(static_cast<double>(ups) / kDraws - share) <= 5 * deviation + 1e-9);
    const double nearest = std::fabs(Type::widen(Type::round(x, Type::nearest(x))));
    CHECK(nearest == (share > 0.5 ? upper : lower) || share == 0.5);
  }
}

// Ties go to the even neighbour; numbers out of range to the largest.
template <class Type>
void ends_are_as_documented() {
  for (std::uint16_t h = 0; h < 3000; ++h) {
    const auto next = static_cast<std::uint16_t>(h + 1);
    const auto middle =
        static_cast<float>((double{Type::widen(h)} + double{Type::widen(next)}) / 2);
    if (middle == 0 || !std::isnormal(middle)) continue;
    CHECK_EQUAL(Type::round(middle, Type::nearest(middle)) % 2, 0);
  }
  constexpr float kMax = std::numeric_limits<float>::max();
  const std::uint16_t largest = Type::round(kMax, 0);
  CHECK(std::isinf(value_of(static_cast<std::uint16_t>(largest + 1), kExponentBits<Type>)));
  for (const std::uint32_t random : kRandoms) {
    CHECK_EQUAL(Type::round(kMax, random), largest);
    CHECK_EQUAL(Type::round(-kMax, random), largest | 0x8000);
    CHECK_EQUAL(Type::round(0.0F, random), 0);
    CHECK(std::isinf(Type::widen(Type::round(std::numeric_limits<float>::infinity(), random))));
  }
}

// Each element draws its own bits, half of which are set.
void elements_draw_apart() {
  std::array<int, 32> ones{};
  for (int j = 0; j < 4096; ++j) {
    const std::uint32_t bits = bits_of_element(7, j);
    CHECK(j == 0 || bits != bits_of_element(7, j - 1));
    for (int bit = 0; bit < 32; ++bit) ones[static_cast<std::size_t>(bit)] += bits >> bit & 1;
  }
  for (const int count : ones) CHECK(std::abs(count - 2048) < 5 * 32);
}

}  // namespace

int main(int argc, char** argv) {
  test::Random random(test::seed_of(argc, argv));
  every_number_is_kept<dtype::Bfloat16>();
  every_number_is_kept<dtype::Float16>();
  chances_are_in_proportion<dtype::Bfloat16>(random);
  chances_are_in_proportion<dtype::Float16>(random);
  ends_are_as_documented<dtype::Bfloat16>();
  ends_are_as_documented<dtype::Float16>();
  elements_draw_apart();
}
