// Rows of a table as text, as Paddle's Fleet writes and reads them: a line per row, the key, then
// numbers, with blanks between them.
//
// A row has `num_head` numbers, or all `num_full` of them. The caller defines what the numbers
// mean. Those listed in `wide` have the precision of a double (counts), the others that of a float.
// Numbers are written with the fewest digits that parse to the same value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/array.h"
#include "feed/text.h"

namespace trireme {

struct RowTextFormat {
  std::size_t num_head = 0;
  std::size_t num_full = 0;
  std::vector<std::size_t> wide;  // ascending, below num_head

  // Errors: kBadRequest, naming the value.
  void check() const;
};

struct TextRows {
  Array<std::uint64_t> keys;         // (n)
  Array<float> numbers;              // (n, num_full): 0 where a row has none, and at the wide ones
  Array<double> wide;                // (n, number of wide ones)
  Array<std::uint8_t> is_full;       // (n)
  std::size_t num_lines = 0;         // also of the buckets left out
  std::optional<BrokenLine> broken;  // the first; nothing after it was read
};

// Reads whole lines; the last line may lack its end. Rows of buckets that are not `wanted`
// (kNumBuckets values, 0 or 1) are left out; only their keys are parsed.
TextRows parse_rows(std::span<const char> text, const RowTextFormat& format,
                    std::span<const std::uint8_t> wanted);

// Requires: the sizes that parse_rows gives.
Array<char> write_rows(std::span<const std::uint64_t> keys, std::span<const float> numbers,
                       std::span<const double> wide, std::span<const std::uint8_t> is_full,
                       const RowTextFormat& format);

}  // namespace trireme
