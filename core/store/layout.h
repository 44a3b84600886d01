// Where the parts of a row are.
//
//   in memory   key, weights, state, statistics; each part begins at a multiple of what it is made
//   of wide        weights, state, statistics: rows as snapshots, files and messages have them
//
// Weights are of the table's dtype in memory; wide, like the state, float32. State is `per_weight`
// planes, each one float for every weight, then `per_row` floats. Statistics are a Stamp, and in a
// scored table a Score.
//
// All wide rows of a table have the same size, that of its widest row class. In a class with fewer
// weights, the missing weights and their places in each plane of state are zeros.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "base/pages.h"
#include "store/dtype.h"
#include "store/row.h"

namespace trireme {

// Part of every row; used by exports and expiry.
struct Stamp {
  std::uint32_t version;  // of the table, when the row last changed
  std::uint32_t time;     // data time of the last push, seconds; 0: no push had one
};

// Part of the rows of a scored table, as of the day of the stamp's time.
struct Score {
  double show;
  double click;
  float delta_score;      // gained since the last export
  std::uint32_t feature;  // the key's feature in the last push
};
static_assert(sizeof(Stamp) == 8 && sizeof(Score) == 24);

// Floats of state that a rule needs.
struct StateShape {
  int per_weight;
  int per_row;
  int counts = 0;  // how many of per_row, the last ones, are 32-bit counts of the row's updates

  int floats(int dim) const noexcept { return per_weight * dim + per_row; }
  bool operator==(const StateShape&) const noexcept = default;
};

class RowLayout {
 public:
  // wide_dim: of the table's widest class.
  RowLayout(int dim, int wide_dim, StateShape state, Dtype dtype, bool is_scored) noexcept
      : dim_(dim), wide_dim_(wide_dim), state_(state), dtype_(dtype), is_scored_(is_scored) {
    const std::size_t weights_bytes = static_cast<std::size_t>(dim) * weight_bytes(dtype);
    state_offset_ = round_up(kWeightsOffset + weights_bytes, sizeof(float));
    stamp_offset_ = round_up(state_offset_ + state_bytes(dim), alignof(Score));
    is_wide_ = dim == wide_dim && dtype == Dtype::kFloat32 &&
               stamp_offset_ == kWeightsOffset + wide_stamp_offset();
  }

  bool operator==(const RowLayout&) const noexcept = default;

  int dim() const noexcept { return dim_; }
  int wide_dim() const noexcept { return wide_dim_; }
  int wide_state_floats() const noexcept { return state_.floats(wide_dim_); }
  int state_floats() const noexcept { return state_.floats(dim_); }
  int state_planes() const noexcept { return state_.per_weight; }
  int state_counts() const noexcept { return state_.counts; }
  Dtype dtype() const noexcept { return dtype_; }
  bool is_scored() const noexcept { return is_scored_; }

  std::size_t row_bytes() const noexcept { return stamp_offset_ + statistics_bytes(); }
  std::size_t wide_bytes() const noexcept { return wide_stamp_offset() + statistics_bytes(); }
  std::size_t stamp_offset() const noexcept { return stamp_offset_; }
  std::size_t wide_stamp_offset() const noexcept {
    return static_cast<std::size_t>(wide_dim_) * sizeof(float) + state_bytes(wide_dim_);
  }
  // The end of the weights of the widest class, if they have this dtype.
  std::size_t weights_end() const noexcept {
    return kWeightsOffset + static_cast<std::size_t>(wide_dim_) * weight_bytes(dtype_);
  }

  float* state(std::byte* row) const noexcept {
    return reinterpret_cast<float*>(row + state_offset_);
  }
  const float* state(const std::byte* row) const noexcept {
    return reinterpret_cast<const float*>(row + state_offset_);
  }
  Stamp& stamp(std::byte* row) const noexcept {
    return *reinterpret_cast<Stamp*>(row + stamp_offset_);
  }
  const Stamp& stamp(const std::byte* row) const noexcept {
    return *reinterpret_cast<const Stamp*>(row + stamp_offset_);
  }
  // Requires: is_scored().
  Score& score(std::byte* row) const noexcept {
    return *reinterpret_cast<Score*>(row + stamp_offset_ + sizeof(Stamp));
  }
  const Score& score(const std::byte* row) const noexcept {
    return *reinterpret_cast<const Score*>(row + stamp_offset_ + sizeof(Stamp));
  }

  // The first `size` weights of a row as floats.
  TRIREME_INLINE void read_weights(const std::byte* row, float* weights, int size) const noexcept {
    if (dtype_ == Dtype::kFloat32) {
      copy_floats(weights, weights_of_row(row), size);
    } else {
      widen_weights(dtype_, row + kWeightsOffset, weights, size);
    }
  }
  // Rounds to the nearest.
  void write_weights(std::byte* row, const float* weights) const noexcept;

  // Initializes a row except for its weights: sets its state to `initial_state` and its statistics
  // to zeros.
  void begin(std::byte* row, std::uint64_t key, float initial_state) const noexcept;
  // Copies from a row of the same key and another class what both have: the first weights and their
  // state, the row's state and the statistics. Requires: this class has more weights.
  void take_over(std::byte* row, const RowLayout& from, const std::byte* other) const noexcept;

  // Whether what is behind the key of a row is its wide form.
  bool is_wide() const noexcept { return is_wide_; }
  // A row to its wide form and back; the key is not part of it.   wide: (wide_bytes()).
  TRIREME_INLINE void write_wide(const std::byte* row, std::uint8_t* wide) const noexcept {
    if (is_wide_) {
      copy_row(wide, row + kWeightsOffset, wide_bytes());
    } else {
      widen(row, wide);
    }
  }
  TRIREME_INLINE void read_wide(std::byte* row, const std::uint8_t* wide) const noexcept {
    if (is_wide_) {
      copy_row(row + kWeightsOffset, wide, wide_bytes());
    } else {
      narrow(row, wide);
    }
  }
  // Whether everything that this class lacks is zero.
  bool fits_wide(const std::uint8_t* wide) const noexcept {
    return dim_ == wide_dim_ || lacks_nothing(wide);
  }
  std::uint32_t version_of_wide(const std::uint8_t* wide) const noexcept {
    std::uint32_t version;
    std::memcpy(&version, wide + wide_stamp_offset() + offsetof(Stamp, version), sizeof version);
    return version;
  }

 private:
  std::size_t state_bytes(int dim) const noexcept {
    return static_cast<std::size_t>(state_.floats(dim)) * sizeof(float);
  }
  std::size_t statistics_bytes() const noexcept {
    return sizeof(Stamp) + (is_scored_ ? sizeof(Score) : 0);
  }
  bool lacks_nothing(const std::uint8_t* wide) const noexcept;
  void widen(const std::byte* row, std::uint8_t* wide) const noexcept;
  void narrow(std::byte* row, const std::uint8_t* wide) const noexcept;

  int dim_;
  int wide_dim_;
  StateShape state_;
  Dtype dtype_;
  bool is_scored_;
  std::size_t state_offset_;
  std::size_t stamp_offset_;
  bool is_wide_;
};

}  // namespace trireme
