// The rows of a table whose row classes differ in size: an arena for each class.
//
// A reference identifies a row in all arenas. Its high bits are the number of a chunk, 2^20 rows of
// one class. A class gets chunks as it grows, so any class may have nearly all 2^32 references.
// With one class a reference equals the arena's.
//
// Threads: as for Arena.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "store/arena.h"

namespace trireme {

class Arenas {
 public:
  using Ref = Arena::Ref;
  static constexpr int kClassesMax = 16;

  // row_bytes: of each class. Requires: 1 to kClassesMax of them. Errors: kResourceExhausted.
  explicit Arenas(std::span<const std::size_t> row_bytes);

  int num_classes() const noexcept { return static_cast<int>(arenas_.size()); }
  const Arena& of(int row_class) const noexcept {
    return *arenas_[static_cast<std::size_t>(row_class)];
  }

  std::byte* row(Ref ref) const noexcept {
    const Chunk& chunk = chunks_[ref >> kChunkBits];
    return chunk.data + std::size_t{ref & kInChunk} * chunk.row_bytes;
  }
  int class_of(Ref ref) const noexcept { return chunks_[ref >> kChunkBits].row_class; }
  // Requires: the row belongs to one of the arenas.
  int class_of(const std::byte* row) const noexcept {
    int row_class = num_classes() - 1;
    while (row_class > 0 && !of(row_class).has(row)) --row_class;
    return row_class;
  }
  std::byte* null_row() const noexcept { return arenas_[0]->null_row(); }
  std::size_t row_bytes() const noexcept { return row_bytes_; }  // of the largest class

  // The right to take rows of each class without an error. The destructor gives up rows that were
  // not taken.
  class Reservation {
   public:
    // num_rows: of each class. Errors: kResourceExhausted.
    Reservation(Arenas& arenas, std::span<const std::size_t> num_rows);

    // Fills `refs` with rows whose content is undefined. Requires: at most as many as are left.
    void take(int row_class, std::span<Ref> refs) noexcept;
    Ref take(int row_class) noexcept;

   private:
    const Arenas& arenas_;
    std::array<std::optional<Arena::Reservation>, kClassesMax> of_classes_;
  };

  void free(std::span<const Ref> refs) noexcept;
  // The reference of a row that belongs to one of the arenas.
  Ref ref_of(const std::byte* row) const noexcept;
  // See Arena.
  bool shrink(int row_class, std::size_t num_rows) {
    return arenas_[static_cast<std::size_t>(row_class)]->shrink(num_rows);
  }
  bool is_leaving(Ref ref) const noexcept {
    const Chunk& chunk = chunks_[ref >> kChunkBits];
    return of(chunk.row_class).is_leaving(Ref{chunk.number} << kChunkBits | (ref & kInChunk));
  }
  // Announces that about this many more rows will be taken, of any classes.
  void expect(std::size_t num_rows) noexcept;
  std::size_t bytes() const;  // memory taken from the system

 private:
  static constexpr int kChunkBits = 20;
  static constexpr Ref kInChunk = (Ref{1} << kChunkBits) - 1;
  static constexpr std::size_t kNumChunks = std::size_t{1} << (32 - kChunkBits);

  struct Chunk {
    std::byte* data = nullptr;  // of its first row
    std::uint32_t row_bytes = 0;
    std::uint16_t number = 0;  // among those of its class
    std::uint8_t row_class = 0;
  };
  struct Class {
    std::unique_ptr<std::uint16_t[]> chunks = std::make_unique<std::uint16_t[]>(kNumChunks);
    std::size_t num_chunks = 0;
  };

  void add_chunks(int row_class, std::size_t num_rows);

  std::vector<std::unique_ptr<Arena>> arenas_;
  std::size_t row_bytes_ = 0;
  // A chunk is written before a reference in it is given out, and never changed.
  const std::unique_ptr<Chunk[]> chunks_ = std::make_unique<Chunk[]>(kNumChunks);
  std::mutex mutex_;  // guards the members below
  std::vector<Class> classes_;
  std::size_t num_chunks_ = 0;
};

}  // namespace trireme
