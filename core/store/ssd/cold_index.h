// The index of the cold rows of one bucket: from a key to the pages that may hold it.
//
// Keys of cold rows are on SSD only. So an entry cannot be checked in memory, and a table of
// entries cannot grow by hashing its keys again. Here an entry is 22 bits of the key's hash and the
// number of a page, in the order of the hashes. The high bits of the hash are the number of a cell,
// about 24 entries, and are not stored. A page number has as many bits as the bucket's pages need.
// The more rows, the more pages and the narrower the rest: an entry takes 2.7 to 3.2 bytes.
// An absent key finds a page in vain with probability n / 2^22 for n rows of the bucket.
//
// Entries are added many at a time, which writes all anew; one is erased where it lies.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/array.h"
#include "base/bytes.h"
#include "base/isa.h"
#include "store/ssd/page.h"

namespace trireme::ssd {

class ColdIndex {
 public:
  static constexpr std::size_t kNumPagesMax = 0xFFFF;

  struct Entry {
    std::uint64_t hash;
    PageNumber page;
  };

  // Calls visit(page) for the page of each entry that agrees with the hash. Of entries that were
  // added together it comes once.
  template <class Visit>
  void find(std::uint64_t hash, const Visit& visit) const {
    if (num_entries_ == 0) return;
    const std::uint32_t bits = bits_of(hash);
    const std::uint64_t rest = bits & ((1U << rest_bits_) - 1);
    const std::size_t cell = bits >> rest_bits_;
    std::uint64_t last = ~std::uint64_t{0};
    for (std::uint32_t i = starts_[cell]; i < starts_[cell + 1]; ++i) {
      const std::uint64_t entry = read(i);
      if (entry >> page_bits_ != rest || entry == last || is_erased(entry)) continue;
      visit(page_of(entry));
      last = entry;
    }
  }

  // Bring into cache what find() reads: first where the entries of a cell begin, then the entries.
  // Always inline, because GCC drops calls of functions that do nothing but this.
  TRIREME_INLINE void prefetch_cell(std::uint64_t hash) const noexcept {
    if (num_entries_ > 0) __builtin_prefetch(&starts_[bits_of(hash) >> rest_bits_]);
  }
  TRIREME_INLINE void prefetch_entries(std::uint64_t hash) const noexcept {
    if (num_entries_ == 0) return;
    const std::size_t bit =
        std::size_t{starts_[bits_of(hash) >> rest_bits_]} * static_cast<unsigned>(width());
    __builtin_prefetch(entries_.data() + bit / 8);
    __builtin_prefetch(entries_.data() + bit / 8 + 64);
  }

  // The index with some entries, which are sorted in place. Requires: no page has a number of
  // num_pages or above. Errors: std::bad_alloc.
  ColdIndex with(std::size_t num_pages, std::span<Entry> added) const;
  // Adds its entries to a list, with as much of the hashes as it has. Errors: std::bad_alloc.
  void append_to(std::vector<Entry>& entries) const;
  // Removes one entry. Returns whether it was there.
  bool erase(std::uint64_t hash, PageNumber page) noexcept;

  void save(ByteWriter& bytes) const;
  // What save() wrote, of a bucket with this many pages. Errors: kCorruption.
  static ColdIndex load(ByteReader& bytes, std::size_t num_pages);

  std::size_t num_entries() const noexcept { return num_entries_ - num_erased_; }
  std::size_t bytes() const noexcept { return entries_.size() + starts_.size() * sizeof(Start); }

 private:
  using Start = std::uint32_t;
  static constexpr int kHashBits = 22;
  static constexpr int kPageBitsMax = 16;
  static constexpr std::size_t kCellEntriesMin = 16;  // on average; at most twice as many

  // The bits of the hash below those of the bucket.
  static std::uint32_t bits_of(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash << 12 >> (64 - kHashBits));
  }
  // Page numbers below num_pages, and one more that says that an entry is erased.
  static int page_bits_for(std::size_t num_pages) noexcept { return std::bit_width(num_pages); }
  PageNumber page_of(std::uint64_t entry) const noexcept {
    return static_cast<PageNumber>(entry & ((1U << page_bits_) - 1));
  }
  bool is_erased(std::uint64_t entry) const noexcept {
    return page_of(entry) == (1U << page_bits_) - 1;
  }
  int width() const noexcept { return rest_bits_ + page_bits_; }
  // Entries lie bit to bit. Eight bytes contain any of them, wherever it begins.
  std::uint64_t read(std::uint32_t i) const noexcept {
    const std::size_t bit = std::size_t{i} * static_cast<unsigned>(width());
    std::uint64_t word;
    std::memcpy(&word, entries_.data() + bit / 8, sizeof word);
    return word >> bit % 8 & ((std::uint64_t{1} << width()) - 1);
  }
  void write(std::uint32_t i, std::uint64_t entry) noexcept;
  std::uint32_t bits_at(std::size_t cell, std::uint64_t entry) const noexcept {
    return static_cast<std::uint32_t>(cell << rest_bits_ | entry >> page_bits_);
  }

  Array<std::uint8_t> entries_;
  Array<Start> starts_;  // of the cells, and the end of the last
  std::uint32_t num_entries_ = 0;
  std::uint32_t num_erased_ = 0;
  int rest_bits_ = kHashBits;  // of the hash, stored in an entry
  int page_bits_ = 0;
};

}  // namespace trireme::ssd
