#include "table/classes.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {
namespace {

[[noreturn]] void refuse(const std::string& expected, const std::string& found) {
  throw Error(ErrorCode::kBadRequest, "Table: expected " + expected + ", found " + found);
}

}  // namespace

RowClasses::RowClasses(std::span<const int> dims, const std::string& dtype, StateShape state,
                       bool is_scored, bool has_heads) {
  const Dtype kept_as = dtype_of(dtype);
  if (dims.empty()) refuse("at least one row class in dims", "none");
  for (const int dim : dims) {
    if (dim < 1 || dim > kDimMax) {
      refuse("a dim in [1, " + std::to_string(kDimMax) + "]", std::to_string(dim));
    }
  }
  const int wide_dim = *std::max_element(dims.begin(), dims.end());
  const auto add = [&](int dim) {
    layouts_.emplace_back(dim, wide_dim, state, kept_as, is_scored);
    if (layouts_.back().row_bytes() > Arena::kRowBytesMax) {
      refuse("rows of at most " + std::to_string(Arena::kRowBytesMax) + " bytes",
             std::to_string(layouts_.back().row_bytes()) + " for dim " + std::to_string(dim));
    }
  };
  for (const int dim : dims) add(dim);
  if (has_heads && !is_scored) refuse("a scored table where rows begin as heads", "another");
  if (has_heads && wide_dim > 1) {
    head_ = size();
    add(1);
  }
  if (size() > Arenas::kClassesMax) {
    refuse("at most " + std::to_string(Arenas::kClassesMax) + " row classes, the heads' included",
           std::to_string(size()));
  }
}

std::vector<std::size_t> RowClasses::row_bytes() const {
  std::vector<std::size_t> bytes;
  for (const RowLayout& layout : layouts_) bytes.push_back(layout.row_bytes());
  return bytes;
}

}  // namespace trireme
