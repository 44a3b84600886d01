// Where the parts of a row are.
//
//   in memory   key, weights, state, up to 4 bytes that round up to a multiple of 8, statistics
//   wide        weights, state, statistics: rows as snapshots, files and messages have them
//
// Weights and state are float32. Statistics are a Stamp, and in a scored table a Score.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/pages.h"
#include "store/row.h"

namespace trireme {

// Of every row: what exports and expiry go by.
struct Stamp {
  std::uint32_t version;  // of the table, when the row last changed
  std::uint32_t time;     // data time of the last push, seconds; 0: no push had one
};

// Of the rows of a scored table, as of the day of the stamp's time.
struct Score {
  double show;
  double click;
  float delta_score;      // gained since the last export
  std::uint32_t feature;  // that the key was last pushed for
};
static_assert(sizeof(Stamp) == 8 && sizeof(Score) == 24);

class RowLayout {
 public:
  RowLayout(int dim, int state_floats, bool is_scored) noexcept
      : dim_(dim), state_floats_(state_floats), is_scored_(is_scored) {}

  int dim() const noexcept { return dim_; }
  int state_floats() const noexcept { return state_floats_; }
  bool is_scored() const noexcept { return is_scored_; }

  std::size_t row_bytes() const noexcept { return stamp_offset() + statistics_bytes(); }
  std::size_t wide_bytes() const noexcept { return values_bytes() + statistics_bytes(); }
  std::size_t stamp_offset() const noexcept {
    return round_up(kWeightsOffset + values_bytes(), alignof(Score));
  }

  Stamp& stamp(std::byte* row) const noexcept {
    return *reinterpret_cast<Stamp*>(row + stamp_offset());
  }
  const Stamp& stamp(const std::byte* row) const noexcept {
    return *reinterpret_cast<const Stamp*>(row + stamp_offset());
  }
  // Requires: is_scored().
  Score& score(std::byte* row) const noexcept {
    return *reinterpret_cast<Score*>(row + stamp_offset() + sizeof(Stamp));
  }
  const Score& score(const std::byte* row) const noexcept {
    return *reinterpret_cast<const Score*>(row + stamp_offset() + sizeof(Stamp));
  }
  void clear_statistics(std::byte* row) const noexcept {
    std::memset(row + stamp_offset(), 0, statistics_bytes());
  }

  // A row to its wide form and back; the key is not part of it.   wide: (wide_bytes()).
  void write_wide(const std::byte* row, std::uint8_t* wide) const noexcept {
    std::memcpy(wide, row + kWeightsOffset, values_bytes());
    std::memcpy(wide + values_bytes(), row + stamp_offset(), statistics_bytes());
  }
  void read_wide(std::byte* row, const std::uint8_t* wide) const noexcept {
    std::memcpy(row + kWeightsOffset, wide, values_bytes());
    std::memcpy(row + stamp_offset(), wide + values_bytes(), statistics_bytes());
  }
  std::uint32_t version_of_wide(const std::uint8_t* wide) const noexcept {
    std::uint32_t version;
    std::memcpy(&version, wide + values_bytes() + offsetof(Stamp, version), sizeof version);
    return version;
  }

 private:
  std::size_t values_bytes() const noexcept {
    return static_cast<std::size_t>(dim_ + state_floats_) * sizeof(float);
  }
  std::size_t statistics_bytes() const noexcept {
    return sizeof(Stamp) + (is_scored_ ? sizeof(Score) : 0);
  }

  int dim_;
  int state_floats_;
  bool is_scored_;
};

}  // namespace trireme
