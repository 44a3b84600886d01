// All examples of a pass in memory, by columns. Each column is a list of chunks.
//
// A row of a numbers column is `dim` floats, of a strings column bytes, of a feature keys and, if
// the data has weights, a weight per key. Memory beyond the values: packed counts (see
// column_chunk.h) and one small block per chunk and column. The store grows chunk by chunk.
//
// Threads: any number of readers, or one writer. Results depend neither on the pool's threads nor
// on the sizes of earlier appends, except for the number of chunks.
//
// Shapes: B rows of a batch, F features.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/array.h"
#include "base/pool.h"
#include "feed/column_chunk.h"
#include "feed/columns.h"
#include "feed/rows.h"

namespace trireme {

// Examples in the order of the store, as spans.
struct ColumnSpans {
  struct Strings {
    std::span<const std::uint8_t> bytes;
    std::span<const std::int64_t> offsets;  // (B + 1,) within bytes, not decreasing
  };
  std::size_t num_rows;                         // B
  std::vector<std::span<const float>> numbers;  // (B * dim,) each
  std::vector<Strings> strings;
  std::span<const std::int64_t> keys;     // (N,)
  std::span<const std::int64_t> offsets;  // (F*B + 1,) within keys, feature-major, not decreasing
  std::span<const float> weights;         // (N,), or empty: the data has none
};

class ColumnStore {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{2} << 20;

  // chunk_bytes: approximate size of all columns of a chunk together.
  // Errors: kBadRequest for a dim or chunk_bytes of 0, or for none or more than 2^20 columns.
  explicit ColumnStore(const Layout& layout, std::size_t chunk_bytes = kChunkBytes);
  ColumnStore(ColumnStore&&) = default;
  ColumnStore(const ColumnStore&) = delete;
  ColumnStore& operator=(const ColumnStore&) = delete;

  std::size_t num_rows() const noexcept { return starts_.back(); }
  std::size_t num_chunks() const noexcept { return starts_.size() - 1; }
  // Bytes of values and weights alone; and all memory of the chunks.
  std::size_t num_value_bytes() const noexcept;
  std::size_t num_bytes() const noexcept;
  const Layout& layout() const noexcept { return layout_; }

  // Appends these rows, in one chunk or several.
  // Errors: kBadRequest if sizes or offsets do not agree; kResourceExhausted for 2^32 values of a
  // column or more. Nothing changes on an error.
  void append(const ColumnSpans& rows, Pool& pool);

  // Rows begin .. end - 1. Errors: kBadRequest unless begin <= end <= num_rows().
  Columns batch(std::size_t begin, std::size_t end, Pool& pool) const;

  // Puts the rows of the chosen columns (numbers, ascending; all of them or some) into the order of
  // `permutation(num_rows(), seed)`. Needs memory for one more column, and 4 to 8 bytes per row.
  // Errors: kResourceExhausted for 2^32 rows or more. If memory runs out midway, the store is empty
  // afterwards.
  void shuffle(std::uint64_t seed, std::span<const std::size_t> chosen, Pool& pool);

  // Moves the first chunks (all, if there are fewer) into a new store.
  ColumnStore take_chunks(std::size_t num_chunks);

  // The part, of `num_parts`, of each row: random, or by the hash of a strings column (XXH64, seed
  // 0). Errors: kBadRequest for 0 parts or no such column.
  Array<std::uint32_t> random_parts(std::uint64_t seed, std::uint32_t num_parts) const;
  Array<std::uint32_t> parts_by_string(std::size_t string, std::uint32_t num_parts) const;

  // The rows of each part, in their order, as bytes for append_piece. Errors: kBadRequest unless
  // each row has a part below num_parts.
  std::vector<Array<std::byte>> split(std::span<const std::uint32_t> parts, std::uint32_t num_parts,
                                      Pool& pool) const;

  // Appends a chunk from the bytes that split() made of a store with the same columns; none for no
  // rows. Errors: kCorruption for any other bytes. Nothing changes on an error.
  void append_piece(std::span<const std::byte> piece);

 private:
  using Chunks = std::vector<ColumnChunk>;

  void check(const ColumnSpans& rows) const;
  void push_back(Chunks&& chunk);
  ColumnChunk input_chunk(const ColumnSpans& rows, std::size_t column, std::size_t begin,
                          std::size_t end) const;
  std::size_t num_chunks_for(std::size_t num_rows, std::size_t num_bytes) const noexcept;

  Layout layout_;
  std::vector<ColumnType> types_;  // of the columns: numbers, strings, features
  std::size_t first_string_, first_feature_;
  std::size_t chunk_bytes_;
  std::vector<Chunks> columns_;  // the chunks of each column; chunk i has the same rows in all
  std::vector<std::size_t> starts_ = {0};  // rows before each chunk, and all rows
};

// A permutation of 0 .. n-1, a function of n and seed alone. All permutations are equally likely,
// as far as 64-bit random numbers allow. Requires: n < 2^32.
Array<std::uint32_t> permutation(std::size_t n, std::uint64_t seed);

}  // namespace trireme
