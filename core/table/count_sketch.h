// Counts occurrences of keys without a row, in bounded memory: a count-min sketch for the keys of
// one bucket, with conservative update.
//
// Cormode, Muthukrishnan, "An improved data stream summary", J. Algorithms 2005; Estan, Varghese,
// SIGCOMM 2002. kDepth rows of `width` cells; a key has one cell in each row. Its estimate is the
// least of them. The estimate is never less than the count, and with probability at most e^-kDepth
// it exceeds the count by e / width * total() or more. Cells saturate at `limit`.
//
// Cell of key k in row r: (mix64(mix64(k) + (r + 1) * 0x9E3779B97F4A7C15) >> 32) * width >> 32.
// Threads: none; the stripe's lock guards it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace trireme {

// The size of a sketch, the same for every bucket of a table.
struct SketchShape {
  static constexpr std::uint32_t kDepth = 4;

  std::uint32_t limit;       // largest count that matters
  std::uint32_t cell_bytes;  // 1, 2 or 4, as `limit` needs
  std::uint32_t width;       // cells of a row

  // The widest sketch of at most this many bytes. Requires: bytes >= kDepth * 4.
  static SketchShape of(std::size_t bytes, std::uint32_t limit);
  std::size_t num_cells() const noexcept { return std::size_t{kDepth} * width; }
  std::size_t bytes() const noexcept { return num_cells() * cell_bytes; }
};

class CountSketch {
 public:
  // Allocates the memory, at the first call. Errors: std::bad_alloc.
  void allocate(const SketchShape& shape);
  bool is_empty() const noexcept { return cells_ == nullptr; }

  // Counts occurrences of a key, and returns its estimate, at most shape.limit. Requires:
  // allocate().
  std::uint32_t add(const SketchShape& shape, std::uint64_t key, std::uint32_t count,
                    std::uint32_t time) noexcept;
  // Halves every count, rounding down.
  void halve(const SketchShape& shape, std::uint32_t now) noexcept;

  // The memory of the cells, little-endian, row after row; as long as shape.bytes(). Requires:
  // allocate().
  std::uint8_t* cells() noexcept { return cells_.get(); }
  const std::uint8_t* cells() const noexcept { return cells_.get(); }

  std::uint64_t total = 0;      // occurrences counted; halved with the cells
  std::uint32_t halved_at = 0;  // data time of the last halving, or of the first count, seconds

 private:
  std::unique_ptr<std::uint8_t[]> cells_;
};

// Cell `i`, of 1, 2 or 4 bytes.
std::uint32_t load_cell(const std::uint8_t* cells, std::uint32_t cell_bytes,
                        std::size_t i) noexcept;

}  // namespace trireme
