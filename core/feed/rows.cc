#include "feed/rows.h"

#include <numeric>

namespace trireme {

std::size_t Layout::num_numbers() const noexcept {
  return std::accumulate(dims.begin(), dims.end(), std::size_t{0});
}

Rows::Rows(const Layout& layout)
    : num_numbers_(layout.num_numbers()),
      num_features_(layout.num_features),
      has_weights_(layout.has_weights),
      row_strings_(layout.num_strings),
      strings_(layout.num_strings),
      string_sizes_(layout.num_strings) {}

Row Rows::start(std::size_t max_keys) {
  numbers_.make_room(size() * num_numbers_, num_numbers_);
  counts_.make_room(size() * num_features_, num_features_);
  keys_.make_room(num_keys_, max_keys);
  if (has_weights_) weights_.make_room(num_keys_, max_keys);
  return {numbers_.data() + size() * num_numbers_, row_strings_.data(),
          counts_.data() + size() * num_features_, keys_.data() + num_keys_,
          has_weights_ ? weights_.data() + num_keys_ : nullptr};
}

void Rows::commit(const Row& end) {
  starts_.push_back(num_keys_);
  num_keys_ = static_cast<std::size_t>(end.keys - keys_.data());
  for (std::size_t i = 0; i < strings_.size(); ++i) {
    strings_[i].insert(strings_[i].end(), row_strings_[i].begin(), row_strings_[i].end());
    string_sizes_[i].push_back(row_strings_[i].size());
  }
}

void Rows::clear() noexcept {
  num_keys_ = 0;
  starts_.clear();
  for (std::vector<char>& bytes : strings_) bytes.clear();
  for (std::vector<std::size_t>& sizes : string_sizes_) sizes.clear();
}

}  // namespace trireme
