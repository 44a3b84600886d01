// The cold rows of a table: which pages each bucket has, which rows of them are left, and where to
// look for a key.
//
// A page number belongs to a bucket; the page table gives its position in the log, so a page can
// move without a change of the index. A row leaves its page when it becomes hot or is removed: its
// bit is cleared, its bytes stay.
//
// Threads: what concerns a bucket is guarded by its stripe's lock, which the table holds.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"
#include "store/layout.h"
#include "store/ssd/cold_index.h"
#include "store/ssd/page_log.h"

namespace trireme::ssd {

class ColdRows {
 public:
  // layouts: of the row classes; they and the log outlive this. table: the number in its pages.
  ColdRows(PageLog& log, std::span<const RowLayout> layouts, std::uint32_t table);

  std::size_t num_rows(std::uint32_t bucket) const noexcept { return buckets_[bucket].num_rows(); }
  std::size_t rows_per_page(int row_class) const noexcept;

  // Whether a row of the key may be here.
  bool may_have(std::uint64_t key) const {
    const std::uint64_t hash = mix64(key);
    bool has = false;
    buckets_[bucket_of_hash(hash)].find(hash, [&](PageNumber) { has = true; });
    return has;
  }

  // A row in a page that was read.
  struct Place {
    std::uint32_t bucket;
    PageNumber page;
    std::uint16_t slot;
    std::uint8_t row_class;
    std::uint8_t uses;   // how often it had been used, in the units of the tier
    std::uint64_t time;  // when that was written
    const std::byte* row;
  };

  // Pages from one or more reads.
  using Reads = std::span<const PagesRead>;

  enum class Found { kAbsent, kHere, kUnread };
  // Looks for a key in the pages that were read. kUnread: pages to be read were added to `wanted`.
  // Errors: kCorruption, kUnavailable: a page of the key could not be read.
  Found find(std::uint64_t key, Reads reads, Place& place, std::vector<Position>& wanted) const;
  // Whether the row of the key is in a page that was read. Pages that were not, or are no more what
  // they were, do not have it.
  bool find_at(Position position, const PagesRead& read, std::uint64_t key, Place& place) const;
  // Brings into cache where find() looks for the keys.
  void prefetch(std::span<const std::uint64_t> keys) const noexcept;
  // Calls visit(place) for each row of a bucket, but for those of damaged pages: they stay where
  // they are, and whoever asks for one of them gets the error. False: nothing was visited, and
  // pages to be read were added to `wanted`. Errors: kUnavailable, as above.
  template <class Visit>
  bool for_rows(std::uint32_t bucket, Reads reads, std::vector<Position>& wanted,
                const Visit& visit) const;
  // Calls visit(position, page) for the pages of a bucket with rows for which keep(position,
  // version) holds, where version is the newest of the rows. Pages to be read are added to
  // `wanted` instead. Errors: as for find().
  template <class Keep, class Visit>
  void for_pages(std::uint32_t bucket, Reads reads, std::vector<Position>& wanted, const Keep& keep,
                 const Visit& visit) const;

  // Forgets a row. Requires: find() or for_rows() returned the place under the same lock.
  void take(const Place& place) noexcept;
  // Forgets all rows of a bucket.
  void clear(std::uint32_t bucket) noexcept;

 private:
  struct Page {
    Position position = 0;
    std::uint32_t version = 0;  // the newest of its rows
  };

 public:
  // Rows of a bucket that become pages, each of one class.
  class Pages {
   public:
    std::size_t size() const noexcept { return ends_.size(); }
    // By how much the bucket takes more memory with them.
    std::size_t growth() const noexcept { return growth_; }

   private:
    friend class ColdRows;
    std::vector<std::size_t> ends_;  // of each page's rows
    ColdIndex index_;                // with them: of the recent entries, or of all
    bool has_all_ = false;
    std::vector<PageNumber> numbers_;
    std::vector<Page> pages_;          // with room for all pages, if the bucket has not enough
    std::vector<std::uint32_t> left_;  // the same
    std::size_t growth_ = 0;
  };
  struct Rows {
    // By class, and those of a class in the order of the hashes of their keys.
    std::span<const std::byte* const> rows;
    std::span<const std::uint8_t> classes;  // of the rows
    std::span<const std::uint8_t> uses;     // of the rows, as of `time`
    std::uint64_t time;
    std::span<const Place> moved;  // where some of the rows have been so far
  };
  // Prepares so that put() cannot fail, and changes nothing.
  // Errors: std::bad_alloc; kResourceExhausted: the bucket has 2^16 pages.
  Pages prepare(std::uint32_t bucket, const Rows& rows) const;
  // Writes the rows to pages. Requires: prepare() under the same lock; room for pages.size();
  // scratch: a page.
  void put(std::uint32_t bucket, const Rows& rows, Pages&& pages, PageLog::Room& room,
           std::span<std::byte> scratch) noexcept;

  // Whether a row is left of a page of a bucket that was at this position.
  bool is_left(std::uint32_t bucket, PageNumber number, Position position,
               std::size_t slot) const noexcept {
    const Bucket& own = buckets_[bucket];
    return number < own.pages.size() && own.pages[number].position == position &&
           is_left(own, number, slot);
  }
  // Whether a page of the log still has rows.
  bool is_current(const PageHeader& header, Position position) const noexcept;
  // Calls visit(place) for the rows that are left of a current page. Returns their number.
  template <class Visit>
  std::size_t for_rows_of_page(const PageHeader& header, const std::byte* page,
                               const Visit& visit) const;

  // Where the rows of a bucket are, without them.
  void save(std::uint32_t bucket, ByteWriter& bytes) const;
  // What save() wrote; the log has adopted the segments.
  class Saved;
  // Errors: kCorruption.
  Saved parse(std::uint32_t bucket, ByteReader& bytes) const;
  // Goes on with it, in the place of the bucket's rows.
  void restore(std::uint32_t bucket, Saved&& saved) noexcept;

  // Those of a bucket that have rows.
  std::size_t num_pages(std::uint32_t bucket) const noexcept {
    const Bucket& own = buckets_[bucket];
    std::size_t n = 0;
    for (std::size_t i = 0; i < own.pages.size(); ++i) n += num_left(own, i) > 0 ? 1 : 0;
    return n;
  }
  std::size_t bytes(std::uint32_t bucket) const noexcept;  // of memory, beside kOwnBytes

 private:
  struct Bucket {
    ColdIndex index;
    ColdIndex recent;  // what was added since the index was written anew
    std::vector<Page> pages;
    std::vector<std::uint32_t> left;  // a bit for each row of each page; none: its number is free
    std::size_t num_free = 0;         // page numbers

    std::size_t num_rows() const noexcept { return index.num_entries() + recent.num_entries(); }
    template <class Visit>
    void find(std::uint64_t hash, const Visit& visit) const {
      index.find(hash, visit);
      recent.find(hash, visit);
    }
  };

 public:
  static constexpr std::size_t kOwnBytes = sizeof(Bucket) * kNumBuckets;

 private:
  // Adding entries writes an index anew, so that a long one is written once for many additions:
  // when the recent entries are this share of all.
  static constexpr std::size_t kRecentShare = 32;

  const std::byte* bytes_of(const Bucket& bucket, PageNumber number, std::uint32_t bucket_number,
                            Reads reads, std::vector<Position>& wanted) const;
  bool is_left(const Bucket& bucket, PageNumber page, std::size_t slot) const noexcept {
    return bucket.left[page * words_per_page_ + slot / 32] >> slot % 32 & 1;
  }
  // The number of rows that are left of a page.
  std::size_t num_left(const Bucket& bucket, std::size_t page) const noexcept {
    std::size_t n = 0;
    for (std::size_t word = 0; word < words_per_page_; ++word) {
      n += static_cast<std::size_t>(std::popcount(bucket.left[page * words_per_page_ + word]));
    }
    return n;
  }
  static std::uint16_t slot_of(const PageHeader& header, const std::byte* page,
                               std::uint64_t hash) noexcept;
  static Place place_of(const PageHeader& header, const std::byte* page,
                        std::uint16_t slot) noexcept;
  void drop(Bucket& bucket, const Place& place) noexcept;

  PageLog& log_;
  const std::span<const RowLayout> layouts_;
  const std::uint32_t table_;
  std::size_t words_per_page_ = 0;
  const std::unique_ptr<std::array<Bucket, kNumBuckets>> memory_ =
      std::make_unique<std::array<Bucket, kNumBuckets>>();
  std::array<Bucket, kNumBuckets>& buckets_ = *memory_;
};

class ColdRows::Saved {
 public:
  Saved() = default;
  std::uint32_t version() const noexcept { return version_; }  // the newest of the rows

 private:
  friend class ColdRows;
  Bucket bucket_;
  std::uint32_t version_ = 0;
};

inline ColdRows::Place ColdRows::place_of(const PageHeader& header, const std::byte* page,
                                          std::uint16_t slot) noexcept {
  const std::byte* uses = page + uses_offset(header.row_bytes, header.num_rows);
  return {.bucket = header.bucket,
          .page = header.number,
          .slot = slot,
          .row_class = header.row_class,
          .uses = static_cast<std::uint8_t>(uses[slot]),
          .time = header.time,
          .row = row_of_page(page, header.row_bytes, slot)};
}

template <class Visit>
std::size_t ColdRows::for_rows_of_page(const PageHeader& header, const std::byte* page,
                                       const Visit& visit) const {
  const Bucket& bucket = buckets_[header.bucket];
  std::size_t n = 0;
  for (std::uint16_t slot = 0; slot < header.num_rows; ++slot) {
    if (!is_left(bucket, header.number, slot)) continue;
    ++n;
    visit(place_of(header, page, slot));
  }
  return n;
}

template <class Visit>
bool ColdRows::for_rows(std::uint32_t bucket, Reads reads, std::vector<Position>& wanted,
                        const Visit& visit) const {
  const Bucket& own = buckets_[bucket];
  const std::size_t num_wanted = wanted.size();
  std::vector<const std::byte*> pages;
  for (std::size_t i = 0; i < own.pages.size(); ++i) {
    if (num_left(own, i) == 0) continue;
    try {
      pages.push_back(bytes_of(own, static_cast<PageNumber>(i), bucket, reads, wanted));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCorruption) throw;
    }
  }
  if (wanted.size() > num_wanted) return false;
  for (const std::byte* page : pages) for_rows_of_page(header_of(page), page, visit);
  return true;
}

template <class Keep, class Visit>
void ColdRows::for_pages(std::uint32_t bucket, Reads reads, std::vector<Position>& wanted,
                         const Keep& keep, const Visit& visit) const {
  const Bucket& own = buckets_[bucket];
  for (std::size_t i = 0; i < own.pages.size(); ++i) {
    const Page& page = own.pages[i];
    if (num_left(own, i) == 0 || !keep(page.position, page.version)) continue;
    const std::byte* bytes = bytes_of(own, static_cast<PageNumber>(i), bucket, reads, wanted);
    if (bytes != nullptr) visit(page.position, bytes);
  }
}

}  // namespace trireme::ssd
