#include "store/ssd/cold_index.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "base/error.h"

namespace trireme::ssd {

namespace {

void expect(bool is_right) {
  if (!is_right)
    throw Error(ErrorCode::kCorruption, "expected an index of rows on SSD, found none");
}

}  // namespace

void ColdIndex::write(std::uint32_t i, std::uint64_t entry) noexcept {
  const std::size_t bit = std::size_t{i} * static_cast<unsigned>(width());
  const std::uint64_t mask = ((std::uint64_t{1} << width()) - 1) << bit % 8;
  std::uint64_t word;
  std::memcpy(&word, entries_.data() + bit / 8, sizeof word);
  word = (word & ~mask) | entry << bit % 8;
  std::memcpy(entries_.data() + bit / 8, &word, sizeof word);
}

ColdIndex ColdIndex::with(std::size_t num_pages, std::span<Entry> added) const {
  std::ranges::sort(added, {},
                    [](const Entry& entry) { return std::pair(bits_of(entry.hash), entry.page); });
  ColdIndex merged;
  const std::size_t size = num_entries() + added.size();
  TRIREME_CHECK(size < std::numeric_limits<Start>::max() && num_pages <= kNumPagesMax);
  if (size == 0) return merged;
  const int cell_bits =
      std::clamp(static_cast<int>(std::bit_width(size / kCellEntriesMin)) - 1, 0, kHashBits);
  merged.rest_bits_ = kHashBits - cell_bits;
  merged.page_bits_ = page_bits_for(num_pages);
  const std::size_t num_cells = std::size_t{1} << cell_bits;
  const std::size_t num_bytes = (size * static_cast<unsigned>(merged.width()) + 7) / 8 + 8;
  merged.entries_ = Array<std::uint8_t>(num_bytes);
  std::ranges::fill(merged.entries_.span(), 0);
  merged.starts_ = Array<Start>(num_cells + 1);
  std::size_t next_cell = 0;  // of merged: the first that has not begun
  const auto append = [&](std::uint32_t bits, PageNumber page) {
    const std::size_t cell = bits >> merged.rest_bits_;
    while (next_cell <= cell) merged.starts_[next_cell++] = merged.num_entries_;
    const std::uint64_t rest = bits & ((1U << merged.rest_bits_) - 1);
    merged.write(merged.num_entries_++, rest << merged.page_bits_ | page);
  };
  auto next = added.begin();
  const auto append_below = [&](std::uint32_t bits) {
    for (; next != added.end() && bits_of(next->hash) < bits; ++next) {
      append(bits_of(next->hash), next->page);
    }
  };
  for (std::size_t cell = 0; cell + 1 < starts_.size(); ++cell) {
    for (std::uint32_t i = starts_[cell]; i < starts_[cell + 1]; ++i) {
      const std::uint64_t entry = read(i);
      if (is_erased(entry)) continue;
      append_below(bits_at(cell, entry));
      append(bits_at(cell, entry), page_of(entry));
    }
  }
  append_below(1U << kHashBits);
  while (next_cell <= num_cells) merged.starts_[next_cell++] = merged.num_entries_;
  return merged;
}

void ColdIndex::append_to(std::vector<Entry>& entries) const {
  for (std::size_t cell = 0; cell + 1 < starts_.size(); ++cell) {
    for (std::uint32_t i = starts_[cell]; i < starts_[cell + 1]; ++i) {
      const std::uint64_t entry = read(i);
      if (is_erased(entry)) continue;
      const std::uint64_t hash = std::uint64_t{bits_at(cell, entry)} << (64 - 12 - kHashBits);
      entries.push_back({.hash = hash, .page = page_of(entry)});
    }
  }
}

bool ColdIndex::erase(std::uint64_t hash, PageNumber page) noexcept {
  if (num_entries_ == 0 || page >= (1U << page_bits_) - 1) return false;
  const std::uint32_t bits = bits_of(hash);
  const std::uint64_t rest = bits & ((1U << rest_bits_) - 1);
  const std::size_t cell = bits >> rest_bits_;
  const std::uint64_t wanted = rest << page_bits_ | page;
  std::uint32_t i = starts_[cell];
  while (i < starts_[cell + 1] && read(i) != wanted) ++i;
  if (i == starts_[cell + 1]) return false;
  write(i, rest << page_bits_ | ((1U << page_bits_) - 1));
  ++num_erased_;
  return true;
}

void ColdIndex::save(ByteWriter& bytes) const {
  bytes.value(num_entries_);
  bytes.value(num_erased_);
  bytes.value(static_cast<std::uint16_t>(rest_bits_));
  bytes.value(static_cast<std::uint16_t>(page_bits_));
  bytes.value(static_cast<std::uint32_t>(entries_.size()));
  bytes.array(starts_.span());
  bytes.array(entries_.span());
}

ColdIndex ColdIndex::load(ByteReader& bytes, std::size_t num_pages) {
  ColdIndex index;
  index.num_entries_ = bytes.value<std::uint32_t>();
  index.num_erased_ = bytes.value<std::uint32_t>();
  const auto rest_bits = bytes.value<std::uint16_t>();
  const auto page_bits = bytes.value<std::uint16_t>();
  const auto num_bytes = bytes.value<std::uint32_t>();
  if (index.num_entries_ == 0) {
    expect(index.num_erased_ == 0 && rest_bits == kHashBits && page_bits == 0 && num_bytes == 0);
    return index;
  }
  expect(rest_bits <= kHashBits && page_bits > 0 && page_bits <= kPageBitsMax);
  index.rest_bits_ = rest_bits;
  index.page_bits_ = page_bits;
  const std::size_t num_cells = std::size_t{1} << (kHashBits - index.rest_bits_);
  const std::uint64_t num_bits = std::uint64_t{index.num_entries_} * index.width();
  expect(num_bytes == (num_bits + 7) / 8 + 8);
  bytes.expect<Start>(num_cells + 1);
  index.starts_ = Array<Start>(num_cells + 1);
  bytes.array(index.starts_.span());
  expect(index.starts_[0] == 0 && index.starts_[num_cells] == index.num_entries_ &&
         std::ranges::is_sorted(index.starts_.span()));
  bytes.expect<std::uint8_t>(num_bytes);
  index.entries_ = Array<std::uint8_t>(num_bytes);
  bytes.array(index.entries_.span());
  std::uint32_t num_erased = 0;
  for (std::uint32_t i = 0; i < index.num_entries_; ++i) {
    const std::uint64_t entry = index.read(i);
    num_erased += index.is_erased(entry);
    expect(index.is_erased(entry) || index.page_of(entry) < num_pages);
  }
  expect(num_erased == index.num_erased_);
  return index;
}

}  // namespace trireme::ssd
