// Criteo's tab-separated text.
//
// A line is: label, 13 integers, 26 categories, separated by tabs. The label is 0 or 1. An integer
// has an optional minus sign and 1 to 19 digits that fit 64 bits; empty means 0. A category is 1 to
// 8 hexadecimal digits; empty means none, an empty bag. Its key is (category number 0..25) << 32 |
// value of the digits. Anything else makes the line broken.
//
// There are two parsers. The fast one reads eight bytes at a time, accepts the usual forms and
// rejects everything else. The careful one parses what the fast one rejected, and reports errors.
// The careful one defines the format.
#pragma once

#include <cstddef>
#include <vector>

#include "feed/text.h"

namespace trireme {

// The field of a broken line is 0..39, in the order of the line.
class CriteoParser final : public TextParser {
 public:
  static constexpr std::size_t kNumDense = 13;
  static constexpr std::size_t kNumSparse = 26;
  static constexpr std::size_t kNumFields = 1 + kNumDense + kNumSparse;
  static constexpr std::size_t kMaxLineBytes = 4096;  // no correct line has more than 600

  // Dense value of an integer x: scale * log(1 + max(x, 0)) with log1p, else scale * x; computed in
  // double and rounded once to float. Errors: kBadRequest, also for a scale that is not finite.
  CriteoParser(const TextOptions& options, bool log1p = true, double scale = 0.125);

  // The numbers are the label and the 13 integers.
  static Layout layout_of_lines();

 private:
  bool parse_line(const Slice& line, Row& row, BrokenLine& broken) const override;
  bool parse_fast(const Slice& line, Row& row) const noexcept;
  bool parse_carefully(const Slice& line, Row& row, BrokenLine& broken) const;
  const char* parse_field(std::string_view text, std::size_t field, Row& row) const noexcept;
  bool parse_integer_fast(const char*& p, float& out) const noexcept;
  float dense_of(std::int64_t x) const noexcept;
  float compute_dense(std::int64_t x) const noexcept;

  bool log1p_;
  double scale_;
  std::vector<float> dense_table_;  // the values of small integers
};

}  // namespace trireme
