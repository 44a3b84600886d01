// The format of a page: rows of one bucket and one row class, as they are in memory.
//
//   offset  bytes
//        0      8  checksum of all that follows
//        8      4  the table
//       12      2  the bucket
//       14      2  the page's number in the bucket
//       16      2  the number of rows
//       18      1  their class
//       19      1  format, 1
//       20      4  the bytes of a row
//       24      8  zeros
//       32         the rows, each with its key first; then zeros up to the end of the page
//
// Little-endian, like the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/ssd/device.h"

namespace trireme::ssd {

using PageNumber = std::uint16_t;

struct PageHeader {
  std::uint64_t checksum;
  std::uint32_t table;
  std::uint16_t bucket;
  PageNumber number;
  std::uint16_t num_rows;
  std::uint8_t row_class;
  std::uint8_t format;
  std::uint32_t row_bytes;
  std::uint64_t zeros;
};
static_assert(sizeof(PageHeader) == 32);

inline constexpr std::size_t kPageHeaderBytes = sizeof(PageHeader);
inline constexpr std::size_t kNumPageRowsMax = 0xFFFF;

// The bytes of a page that wastes little on rows of this size: a multiple of kBlockBytes.
std::size_t page_bytes_for(std::size_t row_bytes) noexcept;

constexpr std::size_t rows_of_page(std::size_t page_bytes, std::size_t row_bytes) noexcept {
  return (page_bytes - kPageHeaderBytes) / row_bytes;
}

inline const std::byte* row_of_page(const std::byte* page, std::size_t row_bytes,
                                    std::size_t i) noexcept {
  return page + kPageHeaderBytes + i * row_bytes;
}

PageHeader header_of(const std::byte* page) noexcept;
// Completes a page whose rows have been written: writes the header and zeros behind the rows.
void seal(std::span<std::byte> page, PageHeader header) noexcept;
// Whether a page is as seal() left it.
bool is_whole(std::span<const std::byte> page) noexcept;

}  // namespace trireme::ssd
