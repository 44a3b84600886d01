// Values and arrays of them as bytes, one after the other, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace trireme {

// Appends to bytes.
class ByteWriter {
 public:
  explicit ByteWriter(std::vector<std::uint8_t>& bytes) : bytes_(bytes) {}

  template <class T>
  void array(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::size_t at = bytes_.size();
    bytes_.resize(at + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size_bytes());
  }
  template <class T>
  void value(const T& value) {
    array(std::span<const T>(&value, 1));
  }

 private:
  std::vector<std::uint8_t>& bytes_;
};

// Errors: kCorruption: the bytes end too early.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  void array(std::span<T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_.size() < values.size_bytes()) {
      throw Error(ErrorCode::kCorruption, "expected " + std::to_string(values.size_bytes()) +
                                              " bytes more, found " +
                                              std::to_string(bytes_.size()));
    }
    if (!values.empty()) std::memcpy(values.data(), bytes_.data(), values.size_bytes());
    bytes_ = bytes_.subspan(values.size_bytes());
  }
  template <class T>
  T value() {
    T value;
    array(std::span<T>(&value, 1));
    return value;
  }
  // Whether `num_values` of a type can be there: asked before memory is taken for them.
  template <class T>
  void expect(std::size_t num_values) const {
    if (bytes_.size() / sizeof(T) >= num_values) return;
    throw Error(ErrorCode::kCorruption, "expected " + std::to_string(num_values) +
                                            " values, found " + std::to_string(bytes_.size()) +
                                            " bytes");
  }
  bool is_at_end() const noexcept { return bytes_.empty(); }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace trireme
