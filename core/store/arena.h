// The rows of a table: blocks of equal size, named by 32-bit references, in slabs of 2 MiB.
//
// A row never moves while it lives, so a pointer found under a stripe's lock stays good under that
// lock. Freed rows are used again; their slabs stay with the table.
//
// The first slabs take memory in small pages, as rows are carved, and become huge pages once they
// are full: a small table costs what it holds. Later slabs are huge from the start, which is
// negligible beside what is there already.
//
// Threads: allocate, free and bytes may be called by any thread. row() takes no lock: whoever holds
// a reference got it from allocate() or through a lock that its owner released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/pages.h"

namespace trireme {

class Arena {
 public:
  using Ref = std::uint32_t;
  static constexpr std::size_t kSlabBytes = kHugePageBytes;
  static constexpr std::size_t kRowBytesMax = kSlabBytes / 16;

  // Requires: row_bytes a multiple of 8, at most kRowBytesMax.
  explicit Arena(std::size_t row_bytes);

  // Fills `refs` with rows whose content is undefined, or none. Errors: kResourceExhausted.
  void allocate(std::span<Ref> refs);
  void free(std::span<const Ref> refs) noexcept;

  std::byte* row(Ref ref) const noexcept {
    return slabs()[ref >> index_bits_] + (ref & index_mask_) * row_bytes_;
  }

  std::size_t row_bytes() const noexcept { return row_bytes_; }
  std::size_t bytes() const;  // memory taken from the system

 private:
  std::byte** slabs() const noexcept { return reinterpret_cast<std::byte**>(slab_table_.data()); }
  void add_slab();
  void carve(std::span<Ref> refs) noexcept;
  bool starts_small(std::size_t slab) const noexcept;

  const std::size_t row_bytes_;
  const std::size_t rows_per_slab_;
  const unsigned index_bits_;  // of a reference: the row within its slab; the rest is the slab
  const Ref index_mask_;
  const std::size_t num_slabs_max_;
  const Pages
      slab_table_;  // address of each slab; reserved for all, so that readers never see it move

  mutable std::mutex mutex_;
  std::vector<Pages> chunks_;   // guarded by mutex_: address space that slabs are cut from
  std::size_t chunk_used_ = 0;  // guarded by mutex_: bytes of the last chunk that are slabs
  std::size_t num_slabs_ = 0;   // guarded by mutex_
  std::size_t slab_ = 0;        // guarded by mutex_: slab that rows are carved from
  std::size_t slab_rows_ = 0;   // guarded by mutex_: rows carved from it
  std::size_t num_free_ = 0;    // guarded by mutex_
  Ref free_ = 0;  // guarded by mutex_: first free row; each holds the next in its first bytes
};

}  // namespace trireme
