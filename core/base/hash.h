// Keys to buckets, and the pure random numbers of the core.
#pragma once

#include <cstdint>
#include <span>

namespace trireme {

inline constexpr int kNumBuckets = 4096;

// splitmix64's finalizer: a bijection on 64 bits. Source: Steele, Lea, Flood, OOPSLA 2014.
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Inverse of mix64.
constexpr std::uint64_t unmix64(std::uint64_t x) noexcept {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ULL;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ULL;
  return x ^ (x >> 30) ^ (x >> 60);
}
static_assert(unmix64(mix64(0x123456789ABCDEF0ULL)) == 0x123456789ABCDEF0ULL);

// Of many at once, by this machine's vectors. mix64_all: hashes has as many places as keys.
void mix64_all(std::span<const std::uint64_t> keys, std::uint64_t* hashes) noexcept;
void unmix64_all(std::span<std::uint64_t> hashes) noexcept;

// The bucket of a key, 0..4095: placement, atomicity, recovery and files depend on it. It never
// changes.
constexpr std::uint32_t bucket_of_hash(std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(hash >> 52);
}
constexpr std::uint32_t bucket_of(std::uint64_t key) noexcept { return bucket_of_hash(mix64(key)); }

// The random bits of one key in one push. A retry of the push draws the same bits, on any server.
// The function never changes. `salt` separates purposes; a table's seed separates tables.
constexpr std::uint64_t push_bits(std::uint64_t seed, std::uint64_t salt, std::uint64_t key,
                                  std::int64_t stream, std::int64_t sequence) noexcept {
  const std::uint64_t of_table = mix64(seed + salt * 0x9E3779B97F4A7C15ULL);
  const std::uint64_t of_stream = mix64(mix64(of_table ^ key) ^ static_cast<std::uint64_t>(stream));
  return mix64(of_stream ^ static_cast<std::uint64_t>(sequence));
}

}  // namespace trireme
