// The byte format of frozen rows: a read-only table that is mapped and searched in place.
// docs/format/export.md is the specification; these are its structures. Little-endian.
//
// A file holds consecutive buckets. Each bucket is the lines of its index, then its rows in the
// order of their hashes. A directory of the buckets and a footer follow. A line covers a range of
// hashes: it stores where their rows are, and sixteen bits of each hash. So a lookup touches one
// cache line and the row itself.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/hash.h"
#include "base/isa.h"
#include "base/pages.h"

namespace trireme {

static_assert(std::endian::native == std::endian::little);

// Permanent numbers.
enum class Encoding : std::uint32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

struct FrozenLine {
  static constexpr std::uint32_t kTags = 28;
  static constexpr std::uint32_t kMeanRows = 16;  // so few lines have rows without a tag

  std::uint32_t first_row;  // within the bucket
  std::uint32_t num_rows;   // rows after the first kTags have no tag
  std::uint16_t tags[kTags];

  static std::uint16_t tag_of(std::uint64_t hash) noexcept {
    return static_cast<std::uint16_t>(hash);
  }
  static std::uint32_t lines_for(std::uint64_t num_rows) noexcept {
    return static_cast<std::uint32_t>((num_rows + kMeanRows - 1) / kMeanRows);
  }
  // Thirty-two bits of the hash, below the bucket's and above the tag's, scaled to the number of
  // lines: rows sorted by hash are also sorted by line.
  TRIREME_INLINE static std::uint64_t home_of(std::uint64_t hash,
                                              std::uint32_t num_lines) noexcept {
    return std::uint64_t{static_cast<std::uint32_t>(hash >> 20)} * num_lines >> 32;
  }
};
static_assert(sizeof(FrozenLine) == 64);

// Directory entry of a bucket: its lines begin at `offset`, its rows directly follow.
struct FrozenBucket {
  std::uint64_t offset;
  std::uint32_t num_lines;
  std::uint32_t num_rows;
};
static_assert(sizeof(FrozenBucket) == 16);

// The last bytes of a file.
struct FrozenFooter {
  static constexpr std::uint64_t kMagic = 0x3153574F524D5254;  // "TRMROWS1"
  static constexpr std::uint32_t kHasFlags = 1;
  static constexpr int kDimMax = 1 << 20;
  static constexpr int kStatisticsMax = 16;

  std::uint64_t magic;
  std::uint32_t encoding;
  std::uint32_t dim;
  std::uint32_t row_bytes;
  std::uint32_t options;  // kHasFlags: each key is followed by eight bytes, 1: removed, 0: a row
  std::uint32_t first_bucket;
  std::uint32_t num_buckets;
  std::uint64_t num_rows;  // removed keys included
  std::uint64_t directory_offset;
  std::uint32_t statistics;  // float32 numbers before a row's weights: show and click, or none
  std::uint32_t unused[3];
};
static_assert(sizeof(FrozenFooter) == 64);

inline constexpr std::size_t kFrozenAlignment = 64;

// Of a row's weights.
constexpr std::size_t encoded_bytes(Encoding encoding, std::size_t dim) noexcept {
  if (encoding == Encoding::kFloat32) return dim * 4;
  return encoding == Encoding::kFloat16 ? dim * 2 : sizeof(float) + dim;
}
// Where a row's statistics begin; its weights follow them.
constexpr std::size_t frozen_values_offset(bool has_flags) noexcept { return has_flags ? 16 : 8; }

constexpr std::size_t frozen_row_bytes(Encoding encoding, std::size_t statistics, std::size_t dim,
                                       bool has_flags) noexcept {
  return round_up(
      frozen_values_offset(has_flags) + statistics * sizeof(float) + encoded_bytes(encoding, dim),
      8);
}

}  // namespace trireme
