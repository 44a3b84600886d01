// Keys to buckets, and the pure random numbers of the core.
#pragma once

#include <cstdint>

namespace trireme {

inline constexpr int kNumBuckets = 4096;

// splitmix64's finalizer: a bijection on 64 bits. Source: Steele, Lea, Flood, OOPSLA 2014.
constexpr std::uint64_t mix64(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The bucket of a key, 0..4095: placement, atomicity, recovery and files all follow it. Never
// changes.
constexpr std::uint32_t bucket_of_hash(std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(hash >> 52);
}
constexpr std::uint32_t bucket_of(std::uint64_t key) noexcept { return bucket_of_hash(mix64(key)); }

}  // namespace trireme
