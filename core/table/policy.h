// How long the rows of a table live.
#pragma once

#include <cstdint>
#include <optional>

#include "store/statistics.h"

namespace trireme {

struct PolicyConfig {
  bool is_scored = false;  // rows count shows and clicks
  ScoreRates rates;
  // shrink() removes rows with a lower score, those without a push for more days, and those of any
  // table that no push has touched for longer.
  double delete_threshold = 0.0;
  std::optional<std::uint32_t> delete_after_unseen_days;
  std::optional<std::uint64_t> ttl_s;
  // Rows have a head alone until their score reaches it; none: they are whole from the start.
  std::optional<double> embedx_threshold;
  // Of the table: memory for its rows, their index included. Each bucket holds at most its share,
  // every row counted as one of the widest class.
  std::optional<std::uint64_t> max_rows;
  std::optional<std::uint64_t> max_bytes;

  // The most rows of a bucket, none: no limit. `row_bytes`: of a row in memory.
  // Errors: kBadRequest for a limit that leaves a bucket no row.
  std::optional<std::uint32_t> max_rows_of_bucket(std::size_t row_bytes) const;
  // The oldest data time of a last push that shrink() lets live, whatever the score; 0: any.
  std::uint32_t oldest_kept(std::uint32_t now) const noexcept;
  // Whether shrink() removes a row. `score` is null if the table is not scored.
  bool is_expired(const Stamp& stamp, const Score* score, const Moment& now) const noexcept;
};

// What has become of keys and rows since the table was made.
struct Counters {
  std::uint64_t admitted = 0;  // keys that got a row by a push
  std::uint64_t rejected = 0;  // pushes of a key that did not get one
  std::uint64_t expired = 0;
  std::uint64_t evicted = 0;  // rows removed to keep within a limit
};

}  // namespace trireme
