// Design: values are first distributed over pieces (key_pieces.h). Every piece numbers its own rows
// and writes its own part of all four results, in parallel and independent of how the work was
// divided.
#include "feed/unique.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/search_steps.h"
#include "feed/chunks.h"
#include "feed/key_pieces.h"

namespace trireme {
namespace {

constexpr int kPieceBitsMax = 10;
constexpr std::size_t kChunkValuesMin = 8192;  // less is not worth waking a thread for

struct Entry {
  std::uint64_t hash;
  std::uint32_t position;
  std::uint32_t row;  // within the piece, by first occurrence
};

class Deduplicator {
 public:
  Deduplicator(std::span<const std::uint64_t> values, std::optional<std::uint64_t> padding_key,
               Pool& pool)
      : pool_(pool),
        pieces_({values}, padding_key, kPieceBitsMax, pool),
        entries_(values.size()),
        row_hash_(values.size()),
        row_count_(values.size()) {
    result_.index = Array<std::int32_t>(values.size());
  }

  Unique run() {
    pieces_.distribute(
        [&](std::size_t at, std::uint64_t hash, std::size_t i) {
          entries_[at] = {hash, static_cast<std::uint32_t>(i), 0};
        },
        [&](std::size_t i) { result_.index[i] = -1; });
    const std::size_t num_pieces = pieces_.size(), num_values = pieces_.begin(num_pieces);
    std::vector<std::size_t> first_row(num_pieces + 1, 0);
    pool_.run(num_pieces, [&](std::size_t p) { first_row[p + 1] = find_rows(p); });
    for (std::size_t p = 0; p < num_pieces; ++p) first_row[p + 1] += first_row[p];
    result_.keys = Array<std::uint64_t>(first_row.back());
    result_.occurrences.starts = Array<std::int32_t>(first_row.back() + 1);
    result_.occurrences.order = Array<std::int32_t>(num_values);
    pool_.run(num_pieces, [&](std::size_t p) {
      write_piece(p, first_row[p], first_row[p + 1] - first_row[p]);
    });
    result_.occurrences.starts[first_row.back()] = static_cast<std::int32_t>(num_values);
    return std::move(result_);
  }

 private:
  // Numbers the rows of a piece by first occurrence; row_hash_ and row_count_ of the piece start at
  // its first entry.
  std::size_t find_rows(std::size_t piece) {
    const std::size_t begin = pieces_.begin(piece), size = pieces_.num_values(piece);
    const std::size_t mask = std::bit_ceil(2 * size + 1) - 1;
    std::vector<std::uint32_t> slots(mask + 1, 0);  // row + 1, 0 for empty
    std::uint64_t* const row_hash = row_hash_.data() + begin;
    std::uint32_t* const row_count = row_count_.data() + begin;
    std::map<std::uint64_t, std::uint32_t> tree;  // the same, of keys after too many steps
    std::size_t steps_left = kStepsPerKey * size;
    std::uint32_t rows = 0;
    for (Entry& entry : std::span(entries_.data() + begin, size)) {
      std::size_t slot = entry.hash & mask;
      while (slots[slot] != 0 && row_hash[slots[slot] - 1] != entry.hash && steps_left > 0) {
        slot = (slot + 1) & mask;
        --steps_left;
      }
      if (steps_left == 0 && tree.empty()) {
        for (std::uint32_t row = 0; row < rows; ++row) tree[row_hash[row]] = row + 1;
      }
      std::uint32_t& row = steps_left > 0 ? slots[slot] : tree[entry.hash];
      if (row == 0) {
        row_hash[rows] = entry.hash;
        row_count[rows] = 0;
        row = ++rows;
      }
      entry.row = row - 1;
      ++row_count[entry.row];
    }
    return rows;
  }

  // Orders the rows of a piece by bucket and writes the piece's part of the result.
  void write_piece(std::size_t piece, std::size_t first_row, std::size_t rows) {
    struct Row {
      std::int32_t row;         // in the result
      std::int32_t next_order;  // where to write its next position
    };
    const std::size_t begin = pieces_.begin(piece);
    const std::uint64_t* const row_hash = row_hash_.data() + begin;
    const std::uint32_t* const row_count = row_count_.data() + begin;
    std::int32_t* const starts = result_.occurrences.starts.data();
    std::vector<Row> where(rows);
    pieces_.order_by_bucket(std::span(row_hash, rows), [&](std::size_t row, std::size_t rank) {
      where[row].row = static_cast<std::int32_t>(first_row + rank);
      result_.keys[first_row + rank] = unmix64(row_hash[row]);
      starts[first_row + rank] = static_cast<std::int32_t>(row_count[row]);
    });
    auto start = static_cast<std::int32_t>(begin);
    for (std::size_t r = first_row; r < first_row + rows; ++r)
      start += std::exchange(starts[r], start);
    for (Row& row : where) row.next_order = starts[row.row];
    for (const Entry& entry : std::span(entries_.data() + begin, pieces_.num_values(piece))) {
      Row& row = where[entry.row];
      result_.index[entry.position] = row.row;
      result_.occurrences.order[row.next_order++] = static_cast<std::int32_t>(entry.position);
    }
  }

  Pool& pool_;
  KeyPieces pieces_;
  Array<Entry> entries_;            // (N,) by piece
  Array<std::uint64_t> row_hash_;   // (N,) by piece, then by row in the piece
  Array<std::uint32_t> row_count_;  // (N,) likewise: occurrences
  Unique result_;
};

void check_size(const char* name, std::size_t size) {
  if (size > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(
        ErrorCode::kBadRequest,
        std::string(name) + ": expected fewer than 2^31 values, found " + std::to_string(size));
  }
}

}  // namespace

Unique unique(std::span<const std::uint64_t> values, std::optional<std::uint64_t> padding_key,
              Pool& pool) {
  check_size("unique", values.size());
  return Deduplicator(values, padding_key, pool).run();
}

Occurrences occurrences(std::span<const std::int32_t> index, std::int32_t num_rows, Pool& pool) {
  check_size("occurrences", index.size());
  const auto rows = static_cast<std::size_t>(num_rows);
  // Each chunk needs a counter per row. So there are few chunks, and only if there is much to
  // count.
  const std::size_t chunks = num_chunks(index.size(), std::max(kChunkValuesMin, rows), pool, 1);
  std::vector<std::int32_t> next(chunks * rows, 0);  // (chunk, row): count, then where to write
  std::vector<std::int64_t> wrong(chunks, -1);
  pool.run(chunks, [&](std::size_t c) {
    std::int32_t* const count = next.data() + c * rows;
    const std::size_t end = chunk_begin(index.size(), c + 1, chunks);
    for (std::size_t i = chunk_begin(index.size(), c, chunks); i < end; ++i) {
      if (index[i] == -1) continue;
      if (index[i] < 0 || index[i] >= num_rows) {
        wrong[c] = static_cast<std::int64_t>(i);
        return;
      }
      ++count[index[i]];
    }
  });
  for (const std::int64_t i : wrong) {
    if (i < 0) continue;
    throw Error(ErrorCode::kBadRequest, "occurrences: expected index of -1 to " +
                                            std::to_string(num_rows - 1) + ", found " +
                                            std::to_string(index[i]) + " at " + std::to_string(i));
  }
  Occurrences result;
  result.starts = Array<std::int32_t>(rows + 1);
  std::int32_t total = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    result.starts[r] = total;
    for (std::size_t c = 0; c < chunks; ++c) total += std::exchange(next[c * rows + r], total);
  }
  result.starts[rows] = total;
  result.order = Array<std::int32_t>(static_cast<std::size_t>(total));
  pool.run(chunks, [&](std::size_t c) {
    std::int32_t* const write = next.data() + c * rows;
    const std::size_t end = chunk_begin(index.size(), c + 1, chunks);
    for (std::size_t i = chunk_begin(index.size(), c, chunks); i < end; ++i) {
      if (index[i] >= 0) result.order[write[index[i]]++] = static_cast<std::int32_t>(i);
    }
  });
  return result;
}

}  // namespace trireme
