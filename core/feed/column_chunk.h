// One column of a group of rows: the values of the rows one after the other, and the number of
// values of each row. These counts are packed into as few bits as the largest needs, or into none
// if all are equal.
//
// Layout of bytes(): values | weights (if any) | padding to 8 | packed counts, padded to 8 | marks.
// A mark is the number of values before every 256th row, so that a row is found without counting
// from the first one. The shape and the bytes before the marks are also the wire format.
//
// Threads: any number of readers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/array.h"

namespace trireme {

static_assert(std::endian::native == std::endian::little, "chunks travel as they lie in memory");

struct ColumnType {
  std::uint32_t element_bytes;  // 4: floats; 8: keys; 1: text
  std::uint32_t dim;            // values of every row; 0: the number varies
  bool has_weights;             // a float beside each value

  std::size_t value_bytes() const noexcept { return element_bytes + (has_weights ? 4 : 0); }
};

// memcpy that accepts null pointers if there is nothing to copy.
inline void copy_bytes(void* to, const void* from, std::size_t size) noexcept {
  if (size != 0) std::memcpy(to, from, size);
}

// Permanent: it is sent between processes.
struct ChunkShape {
  std::uint32_t num_rows;
  std::uint32_t num_values;
  std::uint32_t width;     // bits of a packed count: 0 (none are stored), 1, 2, 4, 8, 16 or 32
  std::uint32_t constant;  // width 0: the count of every row
};

// Calls function(std::integral_constant<int, width>) for one of the packed widths.
template <class Function>
void with_width(std::uint32_t width, const Function& function) {
  switch (width) {
    case 1:
      return function(std::integral_constant<int, 1>());
    case 2:
      return function(std::integral_constant<int, 2>());
    case 4:
      return function(std::integral_constant<int, 4>());
    case 8:
      return function(std::integral_constant<int, 8>());
    case 16:
      return function(std::integral_constant<int, 16>());
    default:
      return function(std::integral_constant<int, 32>());
  }
}

template <int kWidth>
std::uint32_t packed_count(const std::byte* packed, std::size_t row) noexcept {
  if constexpr (kWidth < 8) {
    constexpr std::size_t kPerByte = 8 / kWidth;
    const auto byte = static_cast<std::uint32_t>(packed[row / kPerByte]);
    return byte >> row % kPerByte * kWidth & ((1U << kWidth) - 1);
  } else {
    std::uint32_t count = 0;
    std::memcpy(&count, packed + row * (kWidth / 8), kWidth / 8);
    return count;
  }
}

class ColumnChunk {
 public:
  ColumnChunk() = default;
  // Creates rows with these counts; the caller writes the values and weights.
  // Errors: kResourceExhausted for 2^32 values or more.
  ColumnChunk(const ColumnType& type, std::span<const std::uint32_t> counts);
  // The same if every row has `constant` values. Errors: as above.
  ColumnChunk(const ColumnType& type, std::size_t num_rows, std::uint32_t constant);
  // Reads a chunk from the wire, and moves `bytes` past it. Errors: kCorruption if shape, bytes and
  // type do not agree.
  ColumnChunk(const ColumnType& type, const ChunkShape& shape, std::span<const std::byte>& bytes);

  const ChunkShape& shape() const noexcept { return shape_; }
  std::size_t num_rows() const noexcept { return shape_.num_rows; }
  std::byte* values() noexcept { return bytes_.data(); }
  const std::byte* values() const noexcept { return bytes_.data(); }
  // Weights, from that of value 0 on. Requires: the type has weights.
  std::byte* weights(const ColumnType& type) noexcept { return bytes_.data() + weights_at(type); }
  const std::byte* weights(const ColumnType& type) const noexcept {
    return bytes_.data() + weights_at(type);
  }
  std::span<const std::byte> wire_bytes() const noexcept { return {bytes_.data(), marks_at_}; }
  // Memory of this chunk, without the object itself.
  std::size_t num_bytes() const noexcept { return bytes_.size(); }

  // The number of values before a row. Requires: row <= num_rows().
  std::size_t start(std::size_t row) const noexcept;

  // Calls function(number of values before the row) for rows begin .. end, both included.
  template <class Function>
  void for_starts(std::size_t begin, std::size_t end, const Function& function) const {
    std::size_t at = start(begin);
    function(at);
    if (shape_.width == 0) {
      for (std::size_t row = begin; row < end; ++row) function(at += shape_.constant);
      return;
    }
    with_width(shape_.width, [&](auto width) {
      for (std::size_t row = begin; row < end; ++row) {
        function(at += packed_count<width>(packed(), row));
      }
    });
  }

 private:
  std::size_t weights_at(const ColumnType& type) const noexcept {
    return static_cast<std::size_t>(shape_.num_values) * type.element_bytes;
  }
  const std::byte* packed() const noexcept { return bytes_.data() + counts_at_; }
  void allocate(const ColumnType& type);
  std::uint64_t write_marks() noexcept;  // returns the sum of the counts

  ChunkShape shape_{};
  std::size_t counts_at_ = 0;
  std::size_t marks_at_ = 0;
  Array<std::byte> bytes_;
};

}  // namespace trireme
