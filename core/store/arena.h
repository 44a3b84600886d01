// The rows of a table: blocks of equal size, one after the other, named by their 32-bit number.
//
// Address space for as many rows as the machine could hold is reserved at the start, and memory is
// taken as rows are carved from it. So a row never moves while it lives, its address is one
// multiplication away from its number, and a pointer found under a stripe's lock stays good under
// that lock. Freed rows are used again.
//
// The first 512 MiB are taken in small pages, and each 2 MiB becomes a huge page once it is full: a
// small table costs what it holds. What follows is huge pages from the start, which is negligible
// beside what is there already; and so is what a caller expects to fill at once, which spares the
// way over small pages.
//
// Threads: allocate, free and bytes may be called by any thread. row() takes no lock: whoever holds
// a reference got it from allocate() or through a lock that its owner released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>

#include "base/pages.h"

namespace trireme {

class Arena {
 public:
  using Ref = std::uint32_t;
  static constexpr std::size_t kRowBytesMax = std::size_t{1} << 20;

  // Requires: row_bytes a multiple of 8, at most kRowBytesMax. Errors: kResourceExhausted.
  explicit Arena(std::size_t row_bytes, Ref last = std::numeric_limits<Ref>::max());

  // The right to take so many rows without an error; what is not taken is given up in the end.
  class Reservation {
   public:
    // Errors: kResourceExhausted.
    Reservation(Arena& arena, std::size_t num_rows);
    ~Reservation();
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    // Fills `refs` with rows whose content is undefined. Requires: at most what is left.
    void take(std::span<Ref> refs) noexcept;

   private:
    Arena& arena_;
    std::size_t num_rows_;
  };

  void free(std::span<const Ref> refs) noexcept;

  // So many more rows are about to be taken. Fewer or more may be.
  void expect(std::size_t num_rows) noexcept;

  std::byte* row(Ref ref) const noexcept { return pages_.data() + std::size_t{ref} * row_bytes_; }
  // Whether a row is of this arena.
  bool has(const std::byte* row) const noexcept {
    return static_cast<std::size_t>(row - pages_.data()) < pages_.size();
  }
  // Row 0 is nobody's: zeros, never written.
  static constexpr Ref kNullRef = 0;
  std::byte* null_row() const noexcept { return pages_.data(); }

  std::size_t row_bytes() const noexcept { return row_bytes_; }
  std::size_t bytes() const;  // memory taken from the system

 private:
  void commit(std::size_t num_rows);
  Ref take() noexcept;
  void collapse() noexcept;
  bool is_huge(std::size_t offset) const noexcept;

  const std::size_t row_bytes_;
  const Pages pages_;
  const std::size_t num_rows_max_;

  mutable std::mutex mutex_;         // guards what follows
  std::size_t committed_bytes_ = 0;  // may be touched
  std::size_t collapsed_bytes_ = 0;  // taken in small pages, and made huge since
  std::size_t expected_from_ = 0;    // what lies from here
  std::size_t expected_until_ = 0;   // to here is taken in huge pages
  std::size_t num_rows_ = 1;         // carved so far, with free ones and the null row
  std::size_t num_reserved_ = 0;
  std::size_t num_free_ = 0;
  Ref free_ = 0;  // first free row; each holds the next in its first bytes
};

}  // namespace trireme
