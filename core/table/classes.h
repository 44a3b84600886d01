// The row classes of a table: how wide its rows may be.
//
// A class for each of the table's dims, and where rows begin as a head alone, one more for that:
// its rows have weight 0, and grow to one of the others when their score has reached a threshold.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "optim/rule.h"
#include "store/arenas.h"
#include "store/layout.h"

namespace trireme {

class RowClasses {
 public:
  static constexpr int kDimMax = 1 << 16;

  // has_heads: whether rows begin as a head alone. It makes no difference if no row has more.
  // Errors: kBadRequest, naming the value.
  RowClasses(std::span<const int> dims, const std::string& dtype, StateShape state, bool is_scored,
             bool has_heads);

  std::span<const RowLayout> layouts() const noexcept { return layouts_; }
  const RowLayout& operator[](int row_class) const noexcept {
    return layouts_[static_cast<std::size_t>(row_class)];
  }
  int size() const noexcept { return static_cast<int>(layouts_.size()); }
  int num_dims() const noexcept { return size() - (head_ >= 0 ? 1 : 0); }  // without the head's
  int head() const noexcept { return head_; }                              // -1: none
  // One class of float32 weights.
  bool is_plain() const noexcept { return size() == 1 && layouts_[0].dtype() == Dtype::kFloat32; }
  // Of every row, whatever its class.
  const RowLayout& wide() const noexcept { return layouts_[0]; }
  std::vector<std::size_t> row_bytes() const;

 private:
  std::vector<RowLayout> layouts_;
  int head_ = -1;
};

}  // namespace trireme
