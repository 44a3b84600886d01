#include "store/ssd/cold_index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"

namespace trireme::ssd {

void ColdIndex::write(std::uint32_t i, std::uint64_t entry) noexcept {
  const std::size_t bit = std::size_t{i} * static_cast<unsigned>(width());
  const std::uint64_t mask = ((std::uint64_t{1} << width()) - 1) << bit % 8;
  std::uint64_t word;
  std::memcpy(&word, entries_.data() + bit / 8, sizeof word);
  word = (word & ~mask) | entry << bit % 8;
  std::memcpy(entries_.data() + bit / 8, &word, sizeof word);
}

ColdIndex ColdIndex::with(std::span<Entry> added, std::span<const Entry> removed) const {
  if (!removed.empty()) {
    ColdIndex rest = with({});
    for (const Entry& entry : removed) rest.erase(entry.hash, entry.page);
    return rest.with(added);
  }
  std::ranges::sort(added, {}, [](const Entry& entry) { return bits_of(entry.hash); });
  ColdIndex merged;
  const std::size_t size = num_entries() + added.size();
  TRIREME_CHECK(size < std::numeric_limits<Start>::max());
  if (size == 0) return merged;
  const int cell_bits =
      std::clamp(static_cast<int>(std::bit_width(size / kCellEntriesMin)) - 1, 0, kHashBits);
  merged.rest_bits_ = kHashBits - cell_bits;
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
    merged.write(merged.num_entries_++, rest << kPageBits | page);
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
      const auto page = static_cast<PageNumber>(entry);
      if (page == kErased) continue;
      append_below(bits_at(cell, entry));
      append(bits_at(cell, entry), page);
    }
  }
  append_below(1U << kHashBits);
  while (next_cell <= num_cells) merged.starts_[next_cell++] = merged.num_entries_;
  return merged;
}

void ColdIndex::erase(std::uint64_t hash, PageNumber page) noexcept {
  const std::uint32_t bits = bits_of(hash);
  const std::uint64_t rest = bits & ((1U << rest_bits_) - 1);
  const std::size_t cell = bits >> rest_bits_;
  const std::uint64_t wanted = rest << kPageBits | page;
  std::uint32_t i = starts_[cell];
  while (i < starts_[cell + 1] && read(i) != wanted) ++i;
  TRIREME_CHECK(i < starts_[cell + 1]);
  write(i, rest << kPageBits | kErased);
  ++num_erased_;
}

}  // namespace trireme::ssd
