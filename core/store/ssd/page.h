// The format of a page: rows of one bucket and one row class, as they are in memory.
//
//   offset  bytes
//        0      8  checksum of all that follows
//        8      4  the table
//       12      2  the bucket
//       14      2  the page's number in the bucket
//       16      2  the number of rows
//       18      1  their class
//       19      1  format, 2
//       20      4  the bytes of a row
//       24      8  the time of the tier's clock when it was written
//       32         the rows in the order of the hashes of their keys, each with its key first; a
//                  byte for each, how often it was used; then zeros up to the end of the page
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
  std::uint64_t time;
};
static_assert(sizeof(PageHeader) == 32);

inline constexpr std::size_t kPageHeaderBytes = sizeof(PageHeader);
inline constexpr std::size_t kNumPageRowsMax = 0xFFFF;

// The bytes of a page that wastes little on rows of this size: a multiple of kBlockBytes.
std::size_t page_bytes_for(std::size_t row_bytes) noexcept;

constexpr std::size_t rows_of_page(std::size_t page_bytes, std::size_t row_bytes) noexcept {
  return (page_bytes - kPageHeaderBytes) / (row_bytes + 1);
}

inline const std::byte* row_of_page(const std::byte* page, std::size_t row_bytes,
                                    std::size_t i) noexcept {
  return page + kPageHeaderBytes + i * row_bytes;
}

// Where the page says how often its rows were used.
inline std::size_t uses_offset(std::size_t row_bytes, std::size_t num_rows) noexcept {
  return kPageHeaderBytes + row_bytes * num_rows;
}

PageHeader header_of(const std::byte* page) noexcept;
// Completes a page whose rows and their uses have been written: writes the header, and zeros behind
// them.
void seal(std::span<std::byte> page, PageHeader header) noexcept;
// Whether a page is as seal() left it.
bool is_whole(std::span<const std::byte> page) noexcept;

}  // namespace trireme::ssd
