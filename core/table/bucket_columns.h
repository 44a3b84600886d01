// Rows of several buckets as columns, and back; the content of row files.
//
// A column is a range of the bytes of a wide row. Together the columns make up the row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/array.h"
#include "table/table.h"

namespace trireme {

// The content of buckets first, first + 1, ... one after the other, each at one moment. Lists have
// one offset more than there are buckets.
struct BucketColumns {
  std::vector<std::uint32_t> num_rows;       // per bucket
  Array<std::uint64_t> keys;                 // (n)
  Array<std::uint8_t> classes;               // (n)
  std::vector<Array<std::uint8_t>> columns;  // each (n, width)
  std::vector<std::int32_t> mark_offsets;
  std::vector<std::int64_t> streams;     // of the marks
  std::vector<std::uint64_t> sequences;  // of the marks
  std::vector<std::int64_t> pending_offsets;
  std::vector<std::uint8_t> pending;
  std::vector<std::int64_t> removed_offsets;
  std::vector<std::uint64_t> removed;
  std::uint32_t removed_since = 0;  // the highest of the buckets
  std::vector<std::int64_t> place_offsets;
  std::vector<std::uint8_t> places;  // of rows on SSD, if they stay there
};

// widths: bytes of each column, which add up to table.row_bytes().   since, removed_since: see
// Table::snapshot; with `stay`, Table::snapshot_in_memory, where `since` has no meaning.
// Errors: kBadRequest, kResourceExhausted.
BucketColumns snapshot_columns(const Table& table, std::uint32_t first, std::uint32_t count,
                               std::uint32_t since, std::uint32_t removed_since,
                               std::span<const std::size_t> widths, bool stay = false);

// The rows of some buckets, as columns. Buckets can be skipped.
struct ColumnsView {
  std::span<const std::uint16_t> buckets;   // (m)
  std::span<const std::uint32_t> num_rows;  // (m)
  std::span<const bool> wanted;             // (m)
  std::span<const std::uint64_t> keys;
  std::span<const std::uint8_t> classes;
  std::span<const std::span<const std::uint8_t>> columns;
  std::span<const std::size_t> widths;
  std::span<const std::int32_t> mark_offsets;  // (m + 1); no marks if empty
  std::span<const std::int64_t> streams;
  std::span<const std::uint64_t> sequences;
  std::span<const std::int64_t> removed_offsets;  // (m + 1)
  std::span<const std::uint64_t> removed;
  std::span<const std::int64_t> pending_offsets;  // (m + 1)
  std::span<const std::uint8_t> pending;
  std::span<const std::int64_t> place_offsets;  // (m + 1) of restore; empty: no rows on SSD
  std::span<const std::uint8_t> places;
  std::uint32_t removed_at;  // of restore: see Table::BucketView
  std::uint32_t removed_since;
};

// Table::restore for each wanted bucket; or, if `apply`, Table::apply. Both use the claims.
// Errors: those of Table::restore; buckets before the one that is refused have been replaced.
void restore_columns(Table& table, const ColumnsView& view, bool apply, Tier::Claims claims = {});

}  // namespace trireme
