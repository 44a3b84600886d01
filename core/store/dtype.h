// The stored type of weights: float32, bfloat16, or float16 (IEEE 754 binary16).
//
// Weights of 16 bits are widened to floats for computation, and rounded when they are stored.
// Stochastic rounding goes up or down at random, in proportion to how near the neighbours are. So
// the mean of many roundings is the number itself, and updates smaller than half a step are not
// lost. The caller passes the random bits. A finite number beyond the largest becomes the largest;
// infinities and NaN do not change. Rounding never changes a number that the type can represent.
//
// Only integers and exact products are used: the same bits on every machine and instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/hash.h"
#include "base/lanes.h"

namespace trireme {

enum class Dtype : std::uint8_t { kFloat32, kBfloat16, kFloat16 };

// "float32", "bfloat16" or "float16". Errors: kBadRequest for another name.
Dtype dtype_of(std::string_view name);
std::string_view dtype_name(Dtype dtype) noexcept;
constexpr std::size_t weight_bytes(Dtype dtype) noexcept {
  return dtype == Dtype::kFloat32 ? sizeof(float) : sizeof(std::uint16_t);
}

namespace dtype {

inline constexpr std::uint32_t kSign = 0x80000000U;
inline constexpr std::uint32_t kInfinity = 0x7F800000U;

struct Bfloat16 {
  TRIREME_INLINE static float widen(std::uint16_t h) noexcept {
    return std::bit_cast<float>(std::uint32_t{h} << 16);
  }

  // Uses 16 random bits.
  TRIREME_INLINE static std::uint16_t round(float x, std::uint32_t random) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t size = bits & ~kSign;
    const std::uint32_t rounded = std::min(size + (random & 0xFFFFU), kInfinity - 1);
    const std::uint32_t special = size | (size > kInfinity ? 0x400000U : 0U);  // a quiet NaN
    return static_cast<std::uint16_t>(((bits & kSign) | (size < kInfinity ? rounded : special)) >>
                                      16);
  }

  // The random bits for which round() rounds to the nearest, ties to even.
  TRIREME_INLINE static std::uint32_t nearest(float x) noexcept {
    return 0x7FFFU + (std::bit_cast<std::uint32_t>(x) >> 16 & 1U);
  }
};

struct Float16 {
  static constexpr std::uint32_t kExponentsApart = 127 - 15;
  static constexpr float kSmallestNormal = 0x1p-14F;

  TRIREME_INLINE static float widen(std::uint16_t h) noexcept {
    const std::uint32_t sign = (h & 0x8000U) << 16;
    const std::uint32_t size = h & 0x7FFFU;
    const float small = static_cast<float>(static_cast<std::int32_t>(size)) * 0x1p-24F;
    const std::uint32_t exponents = kExponentsApart << (size >= 0x7C00U ? 24 : 23);
    const std::uint32_t normal = (size << 13) + exponents;
    return std::bit_cast<float>(sign |
                                (size < 0x400U ? std::bit_cast<std::uint32_t>(small) : normal));
  }

  // Uses 13 of the random bits for a normal number, and the upper 31 for a smaller one.
  TRIREME_INLINE static std::uint16_t round(float x, std::uint32_t random) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t size = bits & ~kSign;
    const std::uint32_t sum = (size + (random & 0x1FFFU)) >> 13;
    const std::uint32_t normal = std::min(sum - (kExponentsApart << 10), 0x7BFFU);
    const std::uint32_t special = 0x7C00U | (size > kInfinity ? 0x200U : 0U);
    const auto [whole, rest] = steps_of(std::bit_cast<float>(size));
    const auto chance = static_cast<std::uint32_t>(rest);
    const std::uint32_t small = static_cast<std::uint32_t>(whole) + ((random >> 1) < chance);
    const bool is_normal = size >= std::bit_cast<std::uint32_t>(kSmallestNormal);
    const std::uint32_t finite = is_normal ? normal : small;
    return static_cast<std::uint16_t>((bits & kSign) >> 16 | (size < kInfinity ? finite : special));
  }

  TRIREME_INLINE static std::uint32_t nearest(float x) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t size = bits & ~kSign;
    if (size >= std::bit_cast<std::uint32_t>(kSmallestNormal)) return 0xFFFU + (bits >> 13 & 1U);
    const std::uint32_t odd =
        static_cast<std::uint32_t>(steps_of(std::bit_cast<float>(size)).whole) & 1U;
    return ((1U << 30) - odd) << 1;
  }

 private:
  struct Steps {
    std::int32_t whole;
    std::int32_t rest;  // in units of 2^-31 of a step
  };
  // A number below the smallest normal one, in units of the smallest number above 0. Undefined for
  // larger numbers. Requires: not negative.
  TRIREME_INLINE static Steps steps_of(float size) noexcept {
    const float steps = size < kSmallestNormal ? size * 0x1p24F : 0.0F;
    const auto whole = static_cast<std::int32_t>(steps);
    const float rest = (steps - static_cast<float>(whole)) * 0x1p31F;
    return {.whole = whole, .rest = static_cast<std::int32_t>(rest)};
  }
};

}  // namespace dtype

// Calls function(Type()) with one of the two types above. Requires: dtype is not float32.
template <class Function>
TRIREME_INLINE void with_half(Dtype dtype, const Function& function) noexcept {
  if (dtype == Dtype::kBfloat16) {
    function(dtype::Bfloat16());
  } else {
    function(dtype::Float16());
  }
}

// Thirty-two random bits for element j of a row in one push. `draw`: the row's, from push_bits.
TRIREME_INLINE constexpr std::uint32_t bits_of_element(std::uint64_t draw, int j) noexcept {
  const auto pair = static_cast<std::uint64_t>(j / 2);
  return static_cast<std::uint32_t>(mix64(draw + (pair + 1) * 0x9E3779B97F4A7C15ULL) >>
                                    (32 * (j % 2)));
}

// Convert weights of a row, (dim) each, from and to their stored form, which is aligned to at least
// 2 bytes.
TRIREME_INLINE void widen_weights(Dtype dtype, const std::byte* from, float* to, int dim) noexcept {
  const auto* kept = reinterpret_cast<const std::uint16_t*>(from);
  with_half(dtype, [=](auto type) TRIREME_INLINE_LAMBDA {
    for_lanes(dim, [=](int j) { to[j] = type.widen(kept[j]); });
  });
}
TRIREME_INLINE void round_weights(Dtype dtype, const float* from, std::byte* to, int dim,
                                  std::uint64_t draw) noexcept {
  auto* kept = reinterpret_cast<std::uint16_t*>(to);
  with_half(dtype, [=](auto type) TRIREME_INLINE_LAMBDA {
    for_lanes(dim, [=](int j) { kept[j] = type.round(from[j], bits_of_element(draw, j)); });
  });
}
// To the nearest, ties to even.
inline void round_weights_to_nearest(Dtype dtype, const float* from, std::byte* to,
                                     int dim) noexcept {
  auto* kept = reinterpret_cast<std::uint16_t*>(to);
  with_half(dtype, [=](auto type) {
    for (int j = 0; j < dim; ++j) kept[j] = type.round(from[j], type.nearest(from[j]));
  });
}

// Rounds weights to the values that would be read after that.
inline void to_nearest(Dtype dtype, float* weights, int dim) noexcept {
  if (dtype == Dtype::kFloat32) return;
  with_half(dtype, [=](auto type) {
    for (int j = 0; j < dim; ++j) {
      weights[j] = type.widen(type.round(weights[j], type.nearest(weights[j])));
    }
  });
}

}  // namespace trireme
