// The rows of a table: blocks of equal size, one after the other, identified by 32-bit numbers.
//
// Address space for as many rows as the machine could hold is reserved at the start. Memory is
// taken as rows are allocated. So a row never moves, its address is computed from its number by one
// multiplication, and a pointer obtained under a stripe's lock stays valid under that lock. Freed
// rows are reused.
//
// Memory is taken in small pages, of which each 2 MiB become a huge page when they are full, where
// the unused part of a huge page would weigh: in the first 16 MiB, because there may be many
// tables, and from 1 M to 3.5 M rows, or 512 MiB, because a table of 1 M rows promises at most 16
// bytes beside each. Elsewhere memory is taken in huge pages at once, in a fraction of the time. So
// is memory that a caller expects to fill.
//
// Threads: allocate, free and bytes may be called by any thread. row() takes no lock: a reference
// comes from allocate(), or through a lock that its owner released.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <vector>

#include "base/pages.h"

namespace trireme {

class Arena {
 public:
  using Ref = std::uint32_t;
  static constexpr std::size_t kRowBytesMax = std::size_t{1} << 20;

  // Requires: row_bytes a multiple of 8, at most kRowBytesMax. Errors: kResourceExhausted.
  explicit Arena(std::size_t row_bytes);

  // The right to take this many rows without an error. The destructor gives up rows that were not
  // taken.
  class Reservation {
   public:
    // Errors: kResourceExhausted.
    Reservation(Arena& arena, std::size_t num_rows);
    ~Reservation();
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    // Fills `refs` with rows whose content is undefined. Requires: at most as many as are left.
    void take(std::span<Ref> refs) noexcept;

   private:
    Arena& arena_;
    std::size_t num_rows_;
  };

  void free(std::span<const Ref> refs) noexcept;

  // Gives memory back: rows from number `num_rows` on are not given out again, and when the last of
  // them is freed, their memory goes to the system. Abandoned if rows are needed before that; then,
  // and if it ends, no row is leaving. False: too many rows are in use, or some are leaving
  // already. Errors: std::bad_alloc.
  bool shrink(std::size_t num_rows);
  bool is_leaving(Ref ref) const noexcept { return ref >= limit_.load(std::memory_order_relaxed); }
  bool is_shrinking() const noexcept { return limit_.load(std::memory_order_relaxed) != kNoLimit; }
  struct Use {
    std::size_t num_rows;     // whose memory was taken
    std::size_t num_bytes;    // that memory
    std::size_t num_free;     // of them, those that can be given out
    std::size_t num_leaving;  // of them, those in use that shrink() waits for
    std::size_t num_kept;     // whose memory stays when that ends
  };
  Use use() const;

  // Announces that about this many more rows will be taken. Fewer or more may be.
  void expect(std::size_t num_rows) noexcept;

  std::byte* row(Ref ref) const noexcept { return pages_.data() + std::size_t{ref} * row_bytes_; }
  // Whether a row belongs to this arena.
  bool has(const std::byte* row) const noexcept {
    return static_cast<std::size_t>(row - pages_.data()) < pages_.size();
  }
  // Row 0 belongs to no key: it is zeros, and never written.
  static constexpr Ref kNullRef = 0;
  std::byte* null_row() const noexcept { return pages_.data(); }

  std::size_t row_bytes() const noexcept { return row_bytes_; }
  std::size_t num_rows_max() const noexcept { return num_rows_max_; }
  std::size_t num_rows_ready() const;  // those that are allocated or reserved are among the first
  std::size_t bytes() const;           // memory taken from the system
  std::size_t growth(std::size_t num_rows) const;  // by as many rows that are not free yet

 private:
  void commit(std::size_t num_rows);
  Ref take() noexcept;
  void collapse() noexcept;
  void put(Ref ref) noexcept;
  void end_shrink(bool is_abandoned) noexcept;
  bool is_huge(std::size_t offset) const noexcept;
  std::size_t bytes_of(std::size_t num_rows) const noexcept;

  const std::size_t row_bytes_;
  const Pages pages_;
  const std::size_t num_rows_max_;
  const std::size_t bound_bytes_;        // memory up to this offset is full at 1 M rows
  const std::size_t small_pages_bytes_;  // memory from there to this offset is taken in small pages

  mutable std::mutex mutex_;         // guards the members below
  std::size_t committed_bytes_ = 0;  // may be touched
  std::size_t collapsed_bytes_ = 0;  // taken in small pages, and turned into huge ones since
  std::size_t expected_from_ = 0;    // memory from this offset
  std::size_t expected_until_ = 0;   // to this offset is taken in huge pages
  std::size_t num_rows_ = 1;         // allocated so far, including freed rows and the null row
  std::size_t num_reserved_ = 0;
  std::size_t num_free_ = 0;
  Ref free_ = 0;  // first free row; each holds the next in its first bytes
  static constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
  std::atomic<std::size_t> limit_{kNoLimit};  // rows from this number on are leaving
  std::vector<Ref> left_;                     // those of them that are free
};

}  // namespace trireme
