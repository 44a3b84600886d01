#include "feed/multislot.h"

#include <cstdint>
#include <utility>

#include "feed/numbers.h"
#include "feed/words.h"

namespace trireme {
MultiSlotParser::MultiSlotParser(const TextOptions& options, std::vector<Field> fields,
                                 const MultiSlotRules& rules)
    : TextParser(options, layout_of(fields), kMaxLineBytes),
      fields_(std::move(fields)),
      rules_(rules) {}

bool MultiSlotParser::parse_line(const Slice& line, Row& row, BrokenLine& broken) const {
  const char* p = line.begin;
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    if (i > 0 && p < line.end) ++p;  // the space behind the slot before
    broken.expected = parse_slot(fields_[i], line, p, row);
    if (!broken.expected.empty()) {
      broken.field = static_cast<int>(i);
      broken.found = quoted({p, find_byte(p, line.end, line.text_end, ' ')});
      return false;
    }
  }
  if (p < line.end) ++p;
  if (p == line.end) return true;
  broken.field = -1;
  broken.expected = "the line to end behind " + std::to_string(fields_.size()) + " slots";
  broken.found = quoted({p, line.end});
  return false;
}

// What was expected, with `p` at what was found; or nothing, with `p` at the end of the line or at
// the space behind the slot.
std::string MultiSlotParser::parse_slot(const Field& field, const Slice& line, const char*& p,
                                        Row& row) const {
  const char* word = p;
  auto is_at_end_of_word = [&] { return p == line.end || *p == ' '; };
  std::uint64_t count = 0;
  if (!parse_digits(p, line.text_end, count) || !is_at_end_of_word()) {
    p = word;
    return "a count of values";
  }
  if (!field.is_sparse() && count != field.dim) {
    p = word;
    return "the count " + std::to_string(field.dim);
  }
  const std::uint64_t* const first_key = row.keys;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (p < line.end) ++p;  // the space
    word = p;
    const char* const end = field.is_text() ? find_byte(p, line.end, line.text_end, ' ') : line.end;
    if (p == end || !parse_value(field, p, end, line.text_end, row) || !is_at_end_of_word()) {
      p = word;
      return expected_value(field);
    }
    if (rules_.drop_zeros && field.kind == FieldKind::kKeys && row.keys[-1] == 0) --row.keys;
  }
  if (!field.is_sparse()) return {};
  if (rules_.pad_empty && row.keys == first_key) *row.keys++ = 0;
  *row.counts++ = static_cast<std::uint32_t>(row.keys - first_key);
  return {};
}

}  // namespace trireme
