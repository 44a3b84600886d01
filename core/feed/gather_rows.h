// Rows of a column in any order, gathered from its chunks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/array.h"
#include "base/pool.h"
#include "feed/column_chunk.h"

namespace trireme {

// Finds the chunk of a row.
class ChunkOfRow {
 public:
  // starts: rows before each chunk, and all rows; kept by the caller.
  explicit ChunkOfRow(std::span<const std::size_t> starts);

  std::size_t operator()(std::size_t row) const noexcept {
    std::size_t chunk = first_[row / kStep];
    while (starts_[chunk + 1] <= row) ++chunk;
    return chunk;
  }
  std::span<const std::size_t> starts() const noexcept { return starts_; }

 private:
  static constexpr std::size_t kStep = 256;
  std::span<const std::size_t> starts_;
  std::vector<std::uint32_t> first_;  // the chunk of every kStep-th row
};

// One column that rows are gathered from, with an index of where each row's values begin, if needed
// (4 bytes per row). `pool`: to build the index in parallel, if not null. Threads: any number of
// readers.
class GatheredColumn {
 public:
  GatheredColumn(const ColumnType& type, std::span<const ColumnChunk> chunks,
                 const ChunkOfRow& chunk_of, Pool* pool);

  // Returns a chunk of these rows, in this order. Errors: kResourceExhausted for 2^32 values or
  // more.
  ColumnChunk gather(std::span<const std::uint32_t> rows) const;

 private:
  struct Place {
    std::uint32_t chunk;
    std::uint32_t start;
  };
  std::uint32_t find(std::size_t row, Place& place) const noexcept;  // returns the count

  const ColumnType& type_;
  std::span<const ColumnChunk> chunks_;
  const ChunkOfRow& chunk_of_;
  // Where each row's values begin; after the rows of each chunk, its number of values. Empty if all
  // counts are constant.
  Array<std::uint32_t> value_starts_;
};

}  // namespace trireme
