#include "feed/strings.h"

#include <bit>
#include <cstddef>
#include <cstring>

namespace trireme {
namespace {

static_assert(std::endian::native == std::endian::little, "lanes are read as little-endian");

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;
constexpr std::size_t kStripeBytes = 32;

template <class T>
std::uint64_t load(const char* p) noexcept {
  T lane;
  std::memcpy(&lane, p, sizeof lane);
  return lane;
}

std::uint64_t add_lane(std::uint64_t accumulator, std::uint64_t lane) noexcept {
  return std::rotl(accumulator + lane * kPrime2, 31) * kPrime1;
}

// Four accumulators over whole stripes, merged into one; moves `p` past the stripes.
std::uint64_t hash_stripes(const char*& p, const char* end, std::uint64_t seed) noexcept {
  std::uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (; static_cast<std::size_t>(end - p) >= kStripeBytes; p += kStripeBytes) {
    for (int i = 0; i < 4; ++i) lanes[i] = add_lane(lanes[i], load<std::uint64_t>(p + 8 * i));
  }
  std::uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                       std::rotl(lanes[3], 18);
  for (const std::uint64_t lane : lanes) hash = (hash ^ add_lane(0, lane)) * kPrime1 + kPrime4;
  return hash;
}

}  // namespace

std::uint64_t xxh64(std::string_view bytes, std::uint64_t seed) noexcept {
  const char* p = bytes.data();
  const char* const end = p + bytes.size();
  std::uint64_t hash = bytes.size() >= kStripeBytes ? hash_stripes(p, end, seed) : seed + kPrime5;
  hash += bytes.size();
  for (; end - p >= 8; p += 8) {
    hash = std::rotl(hash ^ add_lane(0, load<std::uint64_t>(p)), 27) * kPrime1 + kPrime4;
  }
  if (end - p >= 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) hash = std::rotl(hash ^ load<std::uint8_t>(p) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

void hash_strings(std::span<const char> bytes, std::span<const std::int64_t> offsets,
                  std::string_view feature, std::span<std::uint64_t> keys) noexcept {
  const std::uint64_t seed = xxh64(feature, 0);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    const auto end = static_cast<std::size_t>(offsets[i + 1]);
    keys[i] = xxh64({bytes.data() + begin, end - begin}, seed);
  }
}

}  // namespace trireme
