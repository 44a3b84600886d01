// Shared by the files of the column store: errors, and the next number of a random sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/hash.h"

namespace trireme {

inline void expect(bool holds, const std::string& expected, const std::string& found) {
  if (holds) return;
  throw Error(ErrorCode::kBadRequest, "ColumnStore: expected " + expected + ", found " + found);
}

inline void expect_size(const std::string& what, std::size_t found, std::size_t expected) {
  expect(found == expected, std::to_string(expected) + " " + what, std::to_string(found));
}

inline void expect_rows(std::size_t num_rows) {
  if (num_rows <= std::numeric_limits<std::uint32_t>::max()) return;
  throw Error(ErrorCode::kResourceExhausted,
              "ColumnStore: expected fewer than 2^32 rows in one process, found " +
                  std::to_string(num_rows) + "; use more workers");
}

// splitmix64: advances `state` and returns the next number.
inline std::uint64_t next_random(std::uint64_t& state) noexcept {
  return mix64(state += 0x9E3779B97F4A7C15ULL);
}

}  // namespace trireme
