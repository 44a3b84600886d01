// An owned array whose elements start uninitialized: the results of batch operations, which write
// every element. A large one therefore takes huge pages: a few page faults in place of thousands.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/pages.h"

namespace trireme {

template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t size) : data_(new T[size]), size_(size) {
    advise_huge_within(data(), size * sizeof(T));
  }

  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  std::span<T> span() noexcept { return {data(), size_}; }
  std::span<const T> span() const noexcept { return {data(), size_}; }

  // Forgets the elements from `size` on. Requires: size <= size().
  void truncate(std::size_t size) noexcept { size_ = size; }

  // Gives the memory to the caller, which deletes it with delete[].
  T* release() noexcept {
    size_ = 0;
    return data_.release();
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t size_ = 0;
};

}  // namespace trireme
