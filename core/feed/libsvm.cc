#include "feed/libsvm.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "feed/numbers.h"
#include "feed/words.h"

namespace trireme {
namespace {

bool is_blank(char c) noexcept { return c == ' ' || c == '\t'; }

// The next word of the rest of a line, which then begins after the word; empty at the end.
Slice next_word(Slice& rest) noexcept {
  const char* const begin = std::find_if(rest.begin, rest.end, [](char c) { return !is_blank(c); });
  rest.begin = std::find_if(begin, rest.end, is_blank);
  return {begin, rest.begin, rest.text_end};
}

}  // namespace

LibsvmParser::LibsvmParser(const TextOptions& options, Field indices)
    : TextParser(options, {.dims = {1}, .num_strings = 0, .num_features = 1, .has_weights = true},
                 kMaxLineBytes),
      indices_(std::move(indices)) {}

bool LibsvmParser::parse_line(const Slice& line, Row& row, BrokenLine& broken) const {
  Slice rest = line;
  rest.end = find_byte(line.begin, line.end, line.text_end, '#');
  Slice word = next_word(rest);
  const char* p = word.begin;
  if (!parse_float(p, word.text_end, *row.numbers) || p != word.end) {
    broken.field = 0;
    broken.expected = "a finite number";
    broken.found = quoted(word.text());
    return false;
  }
  const std::uint64_t* const first_key = row.keys;
  for (word = next_word(rest); word.begin < word.end; word = next_word(rest)) {
    if (parse_pair(word, row)) continue;
    broken.field = 1;
    broken.expected =
        std::string("index:value with ") + expected_value(indices_) + " and a finite number";
    broken.found = quoted(word.text());
    return false;
  }
  *row.counts = static_cast<std::uint32_t>(row.keys - first_key);
  return true;
}

bool LibsvmParser::parse_pair(const Slice& word, Row& row) const noexcept {
  const char* p = word.begin;
  const std::size_t colon = word.text().rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const char* const end = word.begin + colon;
  if (!parse_value(indices_, p, end, word.text_end, row) || p != end) return false;
  ++p;
  return parse_float(p, word.text_end, *row.weights++) && p == word.end;
}

}  // namespace trireme
