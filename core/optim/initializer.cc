#include "optim/initializer.h"

#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/hash.h"

namespace trireme {
namespace {

// Random bits of element j: the j-th output of splitmix64 started at `row`.
// Source: Steele, Lea, Flood, OOPSLA 2014.
constexpr std::uint64_t bits_at(std::uint64_t row, int j) noexcept {
  return mix64(row + (static_cast<std::uint64_t>(j) + 1) * 0x9E3779B97F4A7C15ULL);
}

// Natural logarithm of a positive normal number: mantissa in [sqrt(1/2), sqrt(2)), then the series
// of 2 * artanh((m - 1) / (m + 1)), whose argument is below 0.172: eleven terms leave less than
// 1e-17.
double logarithm(double x) noexcept {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  auto exponent = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double z = (m - 1.0) / (m + 1.0);
  const double square = z * z;
  double sum = 0.0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return exponent * 0.69314718055994530942 + 2.0 * z * sum;
}

}  // namespace

Initializer::Initializer(const std::string& name, float a, float b, std::uint64_t seed)
    : a_(a), b_(b), seed_(mix64(seed + 0x9E3779B97F4A7C15ULL)) {
  const auto refuse = [&](const char* expected) {
    throw Error(ErrorCode::kBadRequest, "initializer " + name + ": expected " + expected +
                                            ", found a = " + std::to_string(a) +
                                            ", b = " + std::to_string(b));
  };
  if (!std::isfinite(a) || !std::isfinite(b)) refuse("finite a and b");
  if (name == "uniform") {
    kind_ = Kind::kUniform;
    if (a > b || !std::isfinite(b - a)) refuse("a <= b, and a range that a float holds");
  } else if (name == "normal") {
    kind_ = Kind::kNormal;
    if (b < 0) refuse("a standard deviation b >= 0");
  } else if (name == "constant") {
    kind_ = Kind::kConstant;
    if (b != 0) refuse("b = 0, which a constant does not use");
  } else if (name == "tail_uniform") {
    kind_ = Kind::kTailUniform;
    if (a > b || !std::isfinite(b - a)) refuse("a <= b, and a range that a float holds");
  } else {
    throw Error(ErrorCode::kBadRequest,
                "initializer: expected uniform, normal, constant or tail_uniform, found " + name);
  }
}

void Initializer::fill(std::uint64_t key, float* weights, int dim) const noexcept {
  const std::uint64_t row = mix64(key ^ seed_);
  switch (kind_) {
    case Kind::kUniform:
    case Kind::kTailUniform:
      // 24 random bits are a float exactly; the product may round up to b only if b - a is tiny
      // compared to a.
      for (int j = 0; j < dim; ++j) {
        weights[j] = a_ + (b_ - a_) * (static_cast<float>(bits_at(row, j) >> 40) * 0x1p-24F);
      }
      if (kind_ == Kind::kTailUniform) weights[0] = 0.0F;
      break;
    case Kind::kNormal:
      for (int j = 0; j < dim; ++j) {
        const double u = (static_cast<double>(bits_at(row, j) >> 32) + 0.5) * 0x1p-32;
        weights[j] = static_cast<float>(a_ + b_ * normal_quantile(u));
      }
      break;
    case Kind::kConstant:
      for (int j = 0; j < dim; ++j) weights[j] = a_;
      break;
  }
}

// Source: Wichura, algorithm AS 241 (PPND7), Applied Statistics 37(3), 1988.
double normal_quantile(double u) noexcept {
  const double q = u - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((5.9109374720e+01 * r + 1.5929113202e+02) * r + 5.0434271938e+01) * r +
            3.3871327179e+00) /
           (((6.7187563600e+01 * r + 7.8757757664e+01) * r + 1.7895169469e+01) * r + 1.0);
  }
  double r = std::sqrt(-logarithm(q < 0 ? u : 1.0 - u));
  double tail;
  if (r <= 5.0) {
    r -= 1.6;
    tail = (((1.7023821103e-01 * r + 1.3067284816e+00) * r + 2.7568153900e+00) * r +
            1.4234372777e+00) /
           ((1.2021132975e-01 * r + 7.3700164250e-01) * r + 1.0);
  } else {
    r -= 5.0;
    tail = (((1.7337203997e-02 * r + 4.2868294337e-01) * r + 3.0812263860e+00) * r +
            6.6579051150e+00) /
           ((1.2258202635e-02 * r + 2.4197894225e-01) * r + 1.0);
  }
  return q < 0 ? -tail : tail;
}

}  // namespace trireme
