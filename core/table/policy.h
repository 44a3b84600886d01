// How long the rows of a table live.
#pragma once

#include <cstdint>
#include <optional>

#include "store/statistics.h"

namespace trireme {

struct PolicyConfig {
  bool is_scored = false;  // rows count shows and clicks
  ScoreRates rates;
  // In a scored table shrink() removes rows with a score below delete_threshold or without a push
  // for more than delete_after_unseen_days. In any table it removes rows without a push for longer
  // than ttl_s.
  double delete_threshold = 0.0;
  std::optional<std::uint32_t> delete_after_unseen_days;
  std::optional<std::uint64_t> ttl_s;
  // Rows have only a head until their score reaches this; none: rows are complete from the start.
  std::optional<double> embedx_threshold;
  // Limits of the table: rows, and memory of rows and index. Each bucket holds at most its share.
  // Every row is counted as one of the widest class.
  std::optional<std::uint64_t> max_rows;
  std::optional<std::uint64_t> max_bytes;

  // The limit of rows per bucket; none: no limit. `row_bytes`: of a row in memory.
  // Errors: kBadRequest for a limit below one row per bucket.
  std::optional<std::uint32_t> max_rows_of_bucket(std::size_t row_bytes) const;
  // Rows with an earlier data time of their last push are removed by shrink(), whatever their
  // score; 0: none.
  std::uint32_t oldest_kept(std::uint32_t now) const noexcept;
  // Whether shrink() removes a row. `score` is null if the table is not scored.
  bool is_expired(const Stamp& stamp, const Score* score, const DataTime& now) const noexcept;
};

// Numbers of keys and rows since the table was created.
struct Counters {
  std::uint64_t admitted = 0;  // keys that got a row by a push
  std::uint64_t rejected = 0;  // times that a pushed key did not get one
  std::uint64_t expired = 0;
  std::uint64_t evicted = 0;  // rows removed to keep within a limit
};

}  // namespace trireme
