#include "store/ssd/page.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/hash.h"
#include "base/pages.h"

namespace trireme::ssd {

namespace {

constexpr std::uint8_t kFormat = 2;
constexpr std::size_t kChecksumBytes = sizeof(PageHeader::checksum);

// Four lanes, so that the multiplications overlap. Each step is a bijection of the lane and of the
// word; so a change within one word always changes the sum.
std::uint64_t checksum_of(std::span<const std::byte> bytes) noexcept {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15ULL;
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  const auto take = [&](std::uint64_t& lane, std::size_t at) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    lane = std::rotl((lane ^ word) * kFactor, 29);
  };
  std::size_t at = 0;
  for (; at + 32 <= bytes.size(); at += 32) {
    for (std::size_t i = 0; i < lanes.size(); ++i) take(lanes[i], at + 8 * i);
  }
  for (; at < bytes.size(); at += 8) take(lanes[0], at);
  std::uint64_t sum = bytes.size();
  for (const std::uint64_t lane : lanes) sum = mix64(sum ^ lane);
  return sum;
}

}  // namespace

std::size_t page_bytes_for(std::size_t row_bytes) noexcept {
  constexpr std::size_t kBlocksMax = 8, kWastePercent = 12;
  const std::size_t least = round_up(kPageHeaderBytes + row_bytes + 1, kBlockBytes);
  for (std::size_t bytes = least; bytes <= kBlocksMax * kBlockBytes; bytes += kBlockBytes) {
    const std::size_t used = kPageHeaderBytes + rows_of_page(bytes, row_bytes) * row_bytes;
    if ((bytes - used) * 100 <= kWastePercent * bytes) return bytes;
  }
  return least;
}

PageHeader header_of(const std::byte* page) noexcept {
  PageHeader header;
  std::memcpy(&header, page, sizeof header);
  return header;
}

void seal(std::span<std::byte> page, PageHeader header) noexcept {
  header.format = kFormat;
  std::memcpy(page.data(), &header, sizeof header);
  const std::size_t end = uses_offset(header.row_bytes, header.num_rows) + header.num_rows;
  std::memset(page.data() + end, 0, page.size() - end);
  header.checksum = checksum_of(page.subspan(kChecksumBytes));
  std::memcpy(page.data(), &header.checksum, sizeof header.checksum);
}

bool is_whole(std::span<const std::byte> page) noexcept {
  const PageHeader header = header_of(page.data());
  return header.format == kFormat && header.checksum == checksum_of(page.subspan(kChecksumBytes));
}

}  // namespace trireme::ssd
