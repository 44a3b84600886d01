#include "feed/multislot.h"

#include <cstdint>
#include <utility>

#include "feed/numbers.h"
#include "feed/words.h"

namespace trireme {
namespace {

bool is_at_end_of_word(const char* p, const Slice& rest) noexcept {
  return p == rest.end || *p == ' ';
}

const char* end_of_word(const Slice& rest) noexcept {
  return find_byte(rest.begin, rest.end, rest.text_end, ' ');
}

// Words end at a space, or at the end of the line.
void skip_space(Slice& rest) noexcept { rest.begin += rest.begin < rest.end; }

}  // namespace

MultiSlotParser::MultiSlotParser(const TextOptions& options, std::vector<Field> fields,
                                 const MultiSlotRules& rules)
    : TextParser(options, layout_of(fields), kMaxLineBytes),
      fields_(std::move(fields)),
      rules_(rules) {}

bool MultiSlotParser::parse_line(const Slice& line, Row& row, BrokenLine& broken) const {
  Slice rest = line;
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    if (i > 0) skip_space(rest);
    if (!parse_slot(fields_[i], rest, row, broken)) {
      broken.field = static_cast<int>(i);
      broken.found = quoted({rest.begin, end_of_word(rest)});
      return false;
    }
  }
  skip_space(rest);
  if (rest.begin == rest.end) return true;
  broken.field = -1;
  broken.expected = "the line to end behind " + std::to_string(fields_.size()) + " slots";
  broken.found = quoted(rest.text());
  return false;
}

// Moves the rest of the line past the slot; or to the error, and returns what was expected.
bool MultiSlotParser::parse_slot(const Field& field, Slice& rest, Row& row,
                                 BrokenLine& broken) const {
  const char* p = rest.begin;
  std::uint64_t count = 0;
  if (!parse_digits(p, rest.text_end, count) || !is_at_end_of_word(p, rest)) {
    broken.expected = "a count of values";
    return false;
  }
  if (!field.is_sparse() && count != field.dim) {
    broken.expected = "the count " + std::to_string(field.dim);
    return false;
  }
  rest.begin = p;
  const std::uint64_t* const first_key = row.keys;
  if (field.kind == FieldKind::kKeys ? !parse_keys(count, rest, row)
                                     : !parse_values(field, count, rest, row)) {
    broken.expected = expected_value(field);
    return false;
  }
  if (!field.is_sparse()) return true;
  if (rules_.pad_empty && row.keys == first_key) *row.keys++ = 0;
  *row.counts++ = static_cast<std::uint32_t>(row.keys - first_key);
  return true;
}

// Both move the rest of the line past the values, or to the wrong one.
bool MultiSlotParser::parse_keys(std::uint64_t count, Slice& rest, Row& row) const noexcept {
  for (; count > 0; --count) {
    skip_space(rest);
    const char* p = rest.begin;
    if (!parse_key(p, rest.text_end, *row.keys) || !is_at_end_of_word(p, rest)) return false;
    rest.begin = p;
    row.keys += !rules_.drop_zeros || *row.keys != 0;
  }
  return true;
}

bool MultiSlotParser::parse_values(const Field& field, std::uint64_t count, Slice& rest,
                                   Row& row) const noexcept {
  for (; count > 0; --count) {
    skip_space(rest);
    const char* p = rest.begin;
    const char* const end = field.is_text() ? end_of_word(rest) : rest.end;
    if (p == end || !parse_value(field, p, end, rest.text_end, row) ||
        !is_at_end_of_word(p, rest)) {
      return false;
    }
    rest.begin = p;
  }
  return true;
}

}  // namespace trireme
