// Writes frozen rows bucket by bucket, in pieces that the caller appends to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/array.h"
#include "frozen/format.h"

namespace trireme {

class FrozenWriter {
 public:
  // statistics: float32 numbers before the weights of each row. has_flags: rows have the eight
  // bytes that mark a removed key. Errors: kBadRequest for a number out of range.
  FrozenWriter(Encoding encoding, int statistics, int dim, bool has_flags,
               std::uint32_t first_bucket);

  // Bytes of a row without its key, as add() takes it.
  std::size_t value_bytes() const noexcept { return row_bytes_ - sizeof(std::uint64_t); }

  // The bytes of the next bucket, to be appended. keys: (n), distinct, in any order.
  // values: (n, value_bytes): flags if there are any, statistics, weights as encoded, zeros up to a
  // multiple of eight. Errors: kBadRequest for a key of another bucket, or twice the same.
  Array<std::uint8_t> add(std::span<const std::uint64_t> keys,
                          std::span<const std::uint8_t> values);

  // The end of the file, to be appended.
  Array<std::uint8_t> finish() const;

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint32_t position;
  };
  std::vector<Entry> in_order(std::span<const std::uint64_t> keys) const;

  const Encoding encoding_;
  const std::uint32_t statistics_;
  const std::uint32_t dim_;
  const bool has_flags_;
  const std::uint32_t first_bucket_;
  const std::size_t row_bytes_;
  std::uint64_t num_bytes_ = 0;
  std::vector<FrozenBucket> directory_;
};

}  // namespace trireme
