// Examples as lines give them: row by row, before they become columns.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme {

// What an example consists of.
struct Layout {
  std::vector<std::size_t> dims;  // how many numbers each column of numbers has
  std::size_t num_strings = 0;
  std::size_t num_features = 0;
  bool has_weights = false;  // a weight for each key

  std::size_t num_numbers() const noexcept;  // the sum of dims
};

// Where the next values of an example go. A writer fills them in the order of the schema and moves
// each pointer on.
struct Row {
  float* numbers;
  std::string_view* strings;  // need to live until the row is committed
  std::uint32_t* counts;      // how many keys each feature has
  std::uint64_t* keys;        // of one feature after the other
  float* weights;             // one for each key, if there are weights
};

// Memory that grows; what is behind the used part is not initialized.
template <class T>
class Growing {
 public:
  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }

  // Room for `more` elements after the first `used`, which stay.
  void make_room(std::size_t used, std::size_t more) {
    if (used + more <= capacity_) return;
    const std::size_t capacity = std::max(used + more, 2 * capacity_);
    auto data = std::make_unique_for_overwrite<T[]>(capacity);
    std::copy_n(data_.get(), used, data.get());
    data_ = std::move(data);
    capacity_ = capacity;
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

// Examples of consecutive lines. Clearing it keeps the memory.
class Rows {
 public:
  explicit Rows(const Layout& layout);

  // Where to write the next example, of at most `max_keys` keys. It counts once it is committed;
  // another start() forgets it.
  Row start(std::size_t max_keys);
  // `end`: the row that start() gave, its pointers moved behind what was written.
  void commit(const Row& end);
  void clear() noexcept;

  std::size_t size() const noexcept { return starts_.size(); }
  const float* numbers() const noexcept { return numbers_.data(); }        // (size, num_numbers)
  const std::uint32_t* counts() const noexcept { return counts_.data(); }  // (size, num_features)
  const std::uint64_t* keys_of(std::size_t row) const noexcept {
    return keys_.data() + starts_[row];
  }
  const float* weights_of(std::size_t row) const noexcept {
    return has_weights_ ? weights_.data() + starts_[row] : nullptr;
  }
  const std::vector<char>& strings(std::size_t column) const noexcept { return strings_[column]; }
  const std::vector<std::size_t>& string_sizes(std::size_t column) const noexcept {
    return string_sizes_[column];
  }

 private:
  std::size_t num_numbers_, num_features_;  // of a row
  bool has_weights_;
  std::size_t num_keys_ = 0;
  std::vector<std::size_t> starts_;  // where each row's keys begin
  Growing<float> numbers_;
  Growing<std::uint32_t> counts_;
  Growing<std::uint64_t> keys_;
  Growing<float> weights_;
  std::vector<std::string_view> row_strings_;           // of the row at work
  std::vector<std::vector<char>> strings_;              // of each column, one behind the other
  std::vector<std::vector<std::size_t>> string_sizes_;  // of each column
};

}  // namespace trireme
