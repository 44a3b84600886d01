#include "store/layout.h"

namespace trireme {
namespace {

constexpr std::size_t bytes_of(int floats) noexcept {
  return static_cast<std::size_t>(floats) * sizeof(float);
}

bool are_zeros(const std::uint8_t* bytes, std::size_t size) noexcept {
  return std::all_of(bytes, bytes + size, [](std::uint8_t byte) { return byte == 0; });
}

}  // namespace

void RowLayout::write_weights(std::byte* row, const float* weights) const noexcept {
  if (dtype_ == Dtype::kFloat32) {
    std::memcpy(row + kWeightsOffset, weights, bytes_of(dim_));
  } else {
    round_weights_to_nearest(dtype_, weights, row + kWeightsOffset, dim_);
  }
}

void RowLayout::begin(std::byte* row, std::uint64_t key, float initial_state) const noexcept {
  std::memcpy(row, &key, sizeof key);
  std::fill_n(state(row), state_.floats(dim_), initial_state);
  std::memset(row + stamp_offset_, 0, statistics_bytes());
}

void RowLayout::take_over(std::byte* row, const RowLayout& from,
                          const std::byte* other) const noexcept {
  std::memcpy(row + kWeightsOffset, other + kWeightsOffset,
              static_cast<std::size_t>(from.dim_) * weight_bytes(dtype_));
  float* to = state(row);
  const float* had = from.state(other);
  for (int plane = 0; plane < state_.per_weight; ++plane, to += dim_, had += from.dim_) {
    std::memcpy(to, had, bytes_of(from.dim_));
  }
  std::memcpy(to, had, bytes_of(state_.per_row));
  std::memcpy(row + stamp_offset_, other + from.stamp_offset_, statistics_bytes());
}

void RowLayout::widen(const std::byte* row, std::uint8_t* wide) const noexcept {
  std::memcpy(wide + wide_stamp_offset(), row + stamp_offset_, statistics_bytes());
  if (dim_ < wide_dim_) std::memset(wide, 0, wide_stamp_offset());
  if (dtype_ == Dtype::kFloat32) {
    std::memcpy(wide, row + kWeightsOffset, bytes_of(dim_));
  } else {
    widen_weights(dtype_, row + kWeightsOffset, reinterpret_cast<float*>(wide), dim_);
  }
  const float* from = state(row);
  wide += bytes_of(wide_dim_);
  for (int plane = 0; plane < state_.per_weight; ++plane, from += dim_) {
    std::memcpy(wide, from, bytes_of(dim_));
    wide += bytes_of(wide_dim_);
  }
  std::memcpy(wide, from, bytes_of(state_.per_row));
}

void RowLayout::narrow(std::byte* row, const std::uint8_t* wide) const noexcept {
  std::memcpy(row + stamp_offset_, wide + wide_stamp_offset(), statistics_bytes());
  if (dtype_ == Dtype::kFloat32) {
    std::memcpy(row + kWeightsOffset, wide, bytes_of(dim_));
  } else {
    for (int j = 0; j < dim_; ++j) {
      float weight;
      std::memcpy(&weight, wide + bytes_of(j), sizeof weight);
      round_weights_to_nearest(dtype_, &weight, row + kWeightsOffset + 2 * j, 1);
    }
  }
  float* to = state(row);
  wide += bytes_of(wide_dim_);
  for (int plane = 0; plane < state_.per_weight; ++plane, to += dim_) {
    std::memcpy(to, wide, bytes_of(dim_));
    wide += bytes_of(wide_dim_);
  }
  std::memcpy(to, wide, bytes_of(state_.per_row));
}

bool RowLayout::lacks_nothing(const std::uint8_t* wide) const noexcept {
  for (int plane = 0; plane < 1 + state_.per_weight; ++plane, wide += bytes_of(wide_dim_)) {
    if (!are_zeros(wide + bytes_of(dim_), bytes_of(wide_dim_ - dim_))) return false;
  }
  return true;
}

}  // namespace trireme
