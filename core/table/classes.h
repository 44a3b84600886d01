// The row classes of a table: the widths of its rows.
//
// There is a class for each of the table's dims. If rows begin as a head alone, there is one more
// class: its rows have only weight 0, and move to one of the other classes when their score reaches
// a threshold.
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

  // has_heads: whether rows begin as a head alone. It has no effect if no row has more.
  // Errors: kBadRequest, naming the value.
  RowClasses(std::span<const int> dims, const std::string& dtype, StateShape state, bool is_scored,
             bool has_heads);

  std::span<const RowLayout> layouts() const noexcept { return layouts_; }
  const RowLayout& operator[](int row_class) const noexcept {
    return layouts_[static_cast<std::size_t>(row_class)];
  }
  int size() const noexcept { return static_cast<int>(layouts_.size()); }
  int num_dims() const noexcept { return size() - (head_ >= 0 ? 1 : 0); }  // without head()
  int head() const noexcept { return head_; }                              // -1: none
  // One class of float32 weights.
  bool is_plain() const noexcept { return size() == 1 && layouts_[0].dtype() == Dtype::kFloat32; }
  // The layout of wide rows, the same for all classes.
  const RowLayout& wide() const noexcept { return layouts_[0]; }
  std::vector<std::size_t> row_bytes() const;

 private:
  std::vector<RowLayout> layouts_;
  int head_ = -1;
};

}  // namespace trireme
