// Fleet's MultiSlot text.
//
// A line is one slot for each field, in order, separated by one space; one more space may end the
// line. A slot is a count and that many values, separated by one space. Numbers and strings have
// one value, dense features dim, bags any number. A string is any bytes except spaces.
//
//   1 ad-17 1 0 2 1234 2345 0 3 0.5 1e-3 -2      ins_id, label, two bags (one empty), dense of 3
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "feed/fields.h"
#include "feed/text.h"

namespace trireme {

// What Fleet does after parsing; both only for keys that are numbers.
struct MultiSlotRules {
  bool drop_zeros = false;  // a key 0 is no key
  bool pad_empty = false;   // a bag without keys gets the key 0
};

// The field of a broken line is the number of a field.
class MultiSlotParser final : public TextParser {
 public:
  static constexpr std::size_t kMaxLineBytes = 1 << 20;

  MultiSlotParser(const TextOptions& options, std::vector<Field> fields,
                  const MultiSlotRules& rules = {});

 private:
  bool parse_line(const Slice& line, Row& row, BrokenLine& broken) const override;
  bool parse_slot(const Field& field, Slice& rest, Row& row, BrokenLine& broken) const;
  bool parse_values(const Field& field, std::uint64_t count, Slice& rest, Row& row) const noexcept;
  bool parse_keys(std::uint64_t count, Slice& rest, Row& row) const noexcept;

  std::vector<Field> fields_;
  MultiSlotRules rules_;
};

}  // namespace trireme
