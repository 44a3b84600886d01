// Frozen rows in memory or in mapped files: one search structure over all buckets.
//
// The header data of a file is checked when the file is opened, the content of a line when it is
// used. Damaged bytes can give wrong rows, never a read outside the file.
// Threads: nothing changes after the constructor.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/array.h"
#include "base/isa.h"
#include "frozen/format.h"
#include "store/row.h"

namespace trireme {

struct FrozenFile {
  std::string name;  // for messages
  std::span<const std::uint8_t> bytes;
};

class FrozenRows {
 public:
  // The files' bytes must stay valid. Errors: kBadRequest without files; kCorruption, naming the
  // file, if it is not frozen rows, has another version, or another shape or length than it states,
  // or repeats a bucket of another file.
  explicit FrozenRows(std::span<const FrozenFile> files);
  FrozenRows(const FrozenRows&) = delete;
  FrozenRows& operator=(const FrozenRows&) = delete;

  Encoding encoding() const noexcept { return encoding_; }
  int dim() const noexcept { return dim_; }
  int statistics() const noexcept { return statistics_; }
  bool has_flags() const noexcept { return has_flags_; }
  std::size_t row_bytes() const noexcept { return row_bytes_; }
  std::size_t num_rows() const noexcept { return num_rows_; }
  // Buckets that are in one of the files, empty or not.
  std::size_t num_buckets() const noexcept { return num_buckets_; }

  // The rows of a bucket in the form that FrozenWriter::add takes, in the order of their hashes.
  // Errors: kBadRequest for a bucket outside [0, kNumBuckets).
  struct Content {
    Array<std::uint64_t> keys;
    Array<std::uint8_t> values;
  };
  Content content(std::uint32_t bucket) const;

  TRIREME_INLINE const FrozenLine* home(std::uint64_t hash) const noexcept {
    const Bucket& bucket = buckets_[bucket_of_hash(hash)];
    return bucket.lines + FrozenLine::home_of(hash, bucket.num_lines);
  }
  // The row that is probably the key's: that of the first matching tag; null_row() if there is
  // none.
  TRIREME_INLINE const std::byte* candidate(std::uint64_t hash,
                                            const FrozenLine* line) const noexcept;
  // The row of a key, null if absent.
  const std::byte* find(std::uint64_t key, std::uint64_t hash) const noexcept;
  // A row of zeros that belongs to no key.
  const std::byte* null_row() const noexcept { return null_row_.data(); }

  bool is_removed(const std::byte* row) const noexcept {
    return has_flags_ && key_of_row(row + sizeof(std::uint64_t)) != 0;
  }
  // Statistics, if there are any, and weights.
  const std::byte* values_of(const std::byte* row) const noexcept {
    return row + frozen_values_offset(has_flags_);
  }

 private:
  struct Bucket {
    const FrozenLine* lines;
    const std::byte* rows;
    std::uint32_t num_lines = 0;
    std::uint32_t num_rows = 0;
  };

  void add(const FrozenFile& file, bool is_first);
  void add_bucket(const FrozenFile& file, std::uint32_t number, const FrozenBucket& entry,
                  std::uint64_t end);
  TRIREME_INLINE static std::uint32_t match(const FrozenLine* line, std::uint16_t tag) noexcept;

  Encoding encoding_ = Encoding::kFloat32;
  int dim_ = 0;
  int statistics_ = 0;
  bool has_flags_ = false;
  std::size_t row_bytes_ = 0;
  std::size_t num_rows_ = 0;
  std::size_t num_buckets_ = 0;
  std::vector<std::byte> null_row_;
  std::array<bool, kNumBuckets> is_held_{};
  std::array<Bucket, kNumBuckets> buckets_;
};

// Bit i is set if tag i is in use and tags[i] == tag.
TRIREME_INLINE std::uint32_t FrozenRows::match(const FrozenLine* line, std::uint16_t tag) noexcept {
  const std::uint32_t in_use = (1U << std::min(line->num_rows, FrozenLine::kTags)) - 1;
#if defined(__SSE2__)
  const auto* from = reinterpret_cast<const std::byte*>(line);
  const __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
  const auto same = [&](std::size_t at) TRIREME_INLINE_LAMBDA {
    return _mm_cmpeq_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)), wanted);
  };
  // Sixteen bits of each half line; the first four are not tags.
  const auto low =
      static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(same(0), same(16))));
  const auto high =
      static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(same(32), same(48))));
  return (low | high << 16) >> 4 & in_use;
#else
  std::uint32_t mask = 0;
  for (std::uint32_t slot = 0; slot < FrozenLine::kTags; ++slot) {
    mask |= std::uint32_t{line->tags[slot] == tag} << slot;
  }
  return mask & in_use;
#endif
}

TRIREME_INLINE const std::byte* FrozenRows::candidate(std::uint64_t hash,
                                                      const FrozenLine* line) const noexcept {
  const Bucket& bucket = buckets_[bucket_of_hash(hash)];
  const std::uint32_t slots = match(line, FrozenLine::tag_of(hash));
  const std::uint32_t row = line->first_row + static_cast<std::uint32_t>(std::countr_zero(slots));
  const bool is_match = slots != 0 && row < bucket.num_rows;
  return is_match ? bucket.rows + row * row_bytes_ : null_row();
}

}  // namespace trireme
