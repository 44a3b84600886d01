// Strings to keys: XXH64 of the bytes, seeded per feature, so that equal strings of different
// features have different keys.
//
// Source: "XXH64" in the xxHash fast digest algorithm specification, version 0.1.1. The values are
// on disk in every checkpoint and never change.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace trireme {

std::uint64_t xxh64(std::string_view bytes, std::uint64_t seed) noexcept;

// keys[i] = xxh64(string i, xxh64(feature, 0)); string i is bytes[offsets[i]..offsets[i + 1]].
// Requires: offsets do not decrease and lie within bytes. Cost: O(bytes); allocates nothing.
void hash_strings(std::span<const char> bytes, std::span<const std::int64_t> offsets,  // (N + 1,)
                  std::string_view feature,
                  std::span<std::uint64_t> keys) noexcept;  // (N,)

}  // namespace trireme
