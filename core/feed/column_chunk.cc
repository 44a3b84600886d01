#include "feed/column_chunk.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::size_t kRowsPerMark = 256;
constexpr std::uint32_t kWidths[] = {1, 2, 4, 8, 16, 32};

constexpr std::size_t padded(std::size_t bytes) noexcept { return (bytes + 7) / 8 * 8; }

std::uint32_t checked_values(std::uint64_t num_values) {
  if (num_values > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kResourceExhausted,
                "ColumnStore: expected fewer than 2^32 values of a column in one chunk, found " +
                    std::to_string(num_values));
  }
  return static_cast<std::uint32_t>(num_values);
}

std::uint32_t width_of(std::uint32_t largest) noexcept {
  return *std::find_if(std::begin(kWidths), std::end(kWidths), [largest](std::uint32_t width) {
    return width == 32 || largest >> width == 0;
  });
}

template <int kWidth>
void pack(std::span<const std::uint32_t> counts, std::byte* packed) noexcept {
  if constexpr (kWidth < 8) {
    constexpr std::size_t kPerByte = 8 / kWidth;
    for (std::size_t row = 0; row < counts.size(); ++row) {
      packed[row / kPerByte] |=
          static_cast<std::byte>(counts[row] << row % kPerByte * kWidth & 0xFF);
    }
  } else {
    for (std::size_t row = 0; row < counts.size(); ++row) {
      std::memcpy(packed + row * (kWidth / 8), &counts[row], kWidth / 8);
    }
  }
}

[[noreturn]] void fail_shape(const std::string& expected, const ChunkShape& shape) {
  throw Error(ErrorCode::kCorruption, "ColumnStore.append_piece: expected " + expected +
                                          ", found a column of " + std::to_string(shape.num_rows) +
                                          " rows, " + std::to_string(shape.num_values) +
                                          " values, counts of " + std::to_string(shape.width) +
                                          " bits, constant " + std::to_string(shape.constant));
}

void check_shape(const ColumnType& type, const ChunkShape& shape) {
  if (shape.width != 0 &&
      std::find(std::begin(kWidths), std::end(kWidths), shape.width) == std::end(kWidths)) {
    fail_shape("counts of 0, 1, 2, 4, 8, 16 or 32 bits", shape);
  }
  if (type.dim != 0 && (shape.width != 0 || shape.constant != type.dim)) {
    fail_shape(std::to_string(type.dim) + " values in every row", shape);
  }
  if (shape.width == 0 &&
      std::uint64_t{shape.num_rows} * shape.constant != std::uint64_t{shape.num_values}) {
    fail_shape("as many values as the rows have together", shape);
  }
}

}  // namespace

ColumnChunk::ColumnChunk(const ColumnType& type, std::span<const std::uint32_t> counts) {
  std::uint64_t sum = 0;
  std::uint32_t smallest = std::numeric_limits<std::uint32_t>::max(), largest = 0;
  for (const std::uint32_t count : counts) {
    sum += count;
    smallest = std::min(smallest, count);
    largest = std::max(largest, count);
  }
  const bool is_constant = smallest >= largest;
  shape_ = {static_cast<std::uint32_t>(counts.size()), checked_values(sum),
            is_constant ? 0 : width_of(largest), is_constant ? largest : 0};
  allocate(type);
  if (is_constant) return;
  with_width(shape_.width, [&](auto width) { pack<width>(counts, bytes_.data() + counts_at_); });
  write_marks();
}

ColumnChunk::ColumnChunk(const ColumnType& type, std::size_t num_rows, std::uint32_t constant)
    : shape_{static_cast<std::uint32_t>(num_rows), checked_values(num_rows * constant), 0,
             constant} {
  allocate(type);
}

ColumnChunk::ColumnChunk(const ColumnType& type, const ChunkShape& shape,
                         std::span<const std::byte>& bytes)
    : shape_(shape) {
  check_shape(type, shape);
  // Checked before any allocation: a wrong number must not cost memory.
  if (shape.num_values > bytes.size() ||
      std::size_t{shape.num_rows} / 8 * shape.width > bytes.size()) {
    fail_shape("no more than " + std::to_string(bytes.size()) + " bytes", shape);
  }
  allocate(type);
  if (marks_at_ > bytes.size()) {
    fail_shape("no more than " + std::to_string(bytes.size()) + " bytes", shape);
  }
  copy_bytes(bytes_.data(), bytes.data(), marks_at_);
  bytes = bytes.subspan(marks_at_);
  if (shape.width != 0 && write_marks() != shape.num_values) {
    fail_shape("counts that add up to the number of values", shape);
  }
}

void ColumnChunk::allocate(const ColumnType& type) {
  const std::size_t filled = static_cast<std::size_t>(shape_.num_values) * type.value_bytes();
  counts_at_ = padded(filled);
  marks_at_ =
      counts_at_ + padded((static_cast<std::size_t>(shape_.num_rows) * shape_.width + 7) / 8);
  const std::size_t num_marks =
      shape_.width == 0 ? 0 : (shape_.num_rows + kRowsPerMark - 1) / kRowsPerMark;
  bytes_ = Array<std::byte>(marks_at_ + num_marks * sizeof(std::uint32_t));
  std::fill(bytes_.data() + filled, bytes_.data() + marks_at_, std::byte{0});
}

std::uint64_t ColumnChunk::write_marks() noexcept {
  std::uint64_t sum = 0;
  std::byte* mark = bytes_.data() + marks_at_;
  with_width(shape_.width, [&](auto width) {
    for (std::size_t row = 0; row < shape_.num_rows; ++row) {
      if (row % kRowsPerMark == 0) {
        const auto before = static_cast<std::uint32_t>(sum);
        std::memcpy(mark, &before, sizeof(before));
        mark += sizeof(before);
      }
      sum += packed_count<width>(packed(), row);
    }
  });
  return sum;
}

std::size_t ColumnChunk::start(std::size_t row) const noexcept {
  if (shape_.width == 0) return row * shape_.constant;
  if (row == shape_.num_rows) return shape_.num_values;
  std::uint32_t mark;
  std::memcpy(&mark, bytes_.data() + marks_at_ + row / kRowsPerMark * sizeof(mark), sizeof(mark));
  std::size_t sum = mark;
  with_width(shape_.width, [&](auto width) {
    for (std::size_t i = row / kRowsPerMark * kRowsPerMark; i < row; ++i) {
      sum += packed_count<width>(packed(), i);
    }
  });
  return sum;
}

}  // namespace trireme
