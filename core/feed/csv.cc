#include "feed/csv.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "feed/words.h"

namespace trireme {
namespace {

void check_marks(const CsvMarks& marks) {
  constexpr std::string_view kNotMarks("+-.\r\n\0", 6);
  std::string seen;
  for (const char mark : {marks.delimiter, marks.quote, marks.list_separator}) {
    if (mark == 0 && !seen.empty()) continue;  // only the delimiter is mandatory
    const bool is_alphanumeric =
        (mark >= '0' && mark <= '9') || ((mark | 0x20) >= 'a' && (mark | 0x20) <= 'z');
    if (is_alphanumeric || seen.find(mark) != seen.npos || kNotMarks.find(mark) != kNotMarks.npos) {
      throw Error(ErrorCode::kBadRequest,
                  "CsvParser: expected different marks that are no part of a number, found " +
                      quoted({&mark, 1}));
    }
    seen += mark;
  }
}

// The count of the most frequent number.
std::size_t most_repeated(std::vector<std::size_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::size_t most = 0;
  for (auto begin = numbers.begin(); begin != numbers.end();) {
    const auto end = std::upper_bound(begin, numbers.end(), *begin);
    most = std::max(most, static_cast<std::size_t>(end - begin));
    begin = end;
  }
  return most;
}

bool broken_value(const Field& field, std::string_view text, BrokenLine& broken) {
  broken.expected = expected_value(field);
  broken.found = quoted(text);
  return false;
}

// Parses the whole text as one value.
bool parse_whole(const Field& field, const Slice& value, Row& row, BrokenLine& broken) {
  const char* p = value.begin;
  if (parse_value(field, p, value.end, value.text_end, row) && p == value.end) return true;
  return broken_value(field, value.text(), broken);
}

}  // namespace

CsvParser::CsvParser(const TextOptions& options, std::vector<Field> fields, const CsvMarks& marks)
    : TextParser(options, layout_of(fields), kMaxLineBytes),
      fields_(std::move(fields)),
      marks_(marks) {
  check_marks(marks);
  for (const Field& field : fields_) num_columns_ += num_cells_of(field);
  columns_.resize(num_columns_);
  std::iota(columns_.begin(), columns_.end(), std::size_t{0});
}

std::size_t CsvParser::num_cells_of(const Field& field) const noexcept {
  return field.kind == FieldKind::kDense && marks_.list_separator == 0 ? field.dim : 1;
}

void CsvParser::set_columns(std::vector<std::size_t> columns, std::size_t num_columns) {
  if (columns.size() != columns_.size() ||
      std::any_of(columns.begin(), columns.end(),
                  [&](std::size_t c) { return c >= num_columns; })) {
    throw Error(ErrorCode::kBadRequest, "CsvParser: expected the columns of " +
                                            std::to_string(columns_.size()) + " cells below " +
                                            std::to_string(num_columns) + ", found " +
                                            std::to_string(columns.size()) + " columns");
  }
  set_max_readers(most_repeated(columns));
  columns_ = std::move(columns);
  num_columns_ = num_columns;
}

bool CsvParser::parse_line(const Slice& line, Row& row, BrokenLine& broken) const {
  thread_local std::vector<Slice> cells;
  thread_local std::string copies;
  broken.field = -1;
  if (!split(line, cells, copies, broken)) return false;
  if (cells.size() != num_columns_) {
    broken.expected =
        std::to_string(num_columns_) + " cells separated by " + quoted({&marks_.delimiter, 1});
    broken.found = std::to_string(cells.size()) + " in " + quoted(line.text());
    return false;
  }
  const std::size_t* column = columns_.data();
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    broken.field = static_cast<int>(i);
    for (std::size_t n = num_cells_of(fields_[i]); n > 0; --n) {
      if (!parse_cell(fields_[i], cells[*column++], row, broken)) return false;
    }
  }
  return true;
}

bool CsvParser::split(const Slice& line, std::vector<Slice>& cells, std::string& copies,
                      BrokenLine& broken) const {
  cells.clear();
  copies.clear();
  const char* p = line.begin;
  while (true) {
    cells.push_back({p, p, line.text_end});
    Slice& cell = cells.back();
    if (marks_.quote != 0 && p < line.end && *p == marks_.quote) {
      const char* const begin = p;
      p = split_quoted(line, p, cell, copies);
      if (p == nullptr || (p < line.end && *p != marks_.delimiter)) {
        broken.expected = p == nullptr ? "a closing quote" : "a delimiter behind the closing quote";
        broken.found = quoted({begin, line.end});
        return false;
      }
    } else {
      cell.end = p = find_byte(p, line.end, line.text_end, marks_.delimiter);
    }
    if (p == line.end) return true;
    ++p;
  }
}

// The cell whose opening quote is at `p`; returns the position after its closing quote, or null.
const char* CsvParser::split_quoted(const Slice& line, const char* p, Slice& cell,
                                    std::string& copies) const {
  const char quote = marks_.quote;
  const char* const begin = p + 1;
  const char* end = find_byte(begin, line.end, line.text_end, quote);
  if (end == line.end) return nullptr;
  if (end + 1 == line.end || end[1] != quote) {
    cell = {begin, end, line.text_end};
    return end + 1;
  }
  // A cell with doubled quotes is copied with single ones. All copies together are shorter than the
  // line, so the memory never moves.
  copies.reserve(line.text().size());
  const std::size_t first = copies.size();
  for (p = begin;; p = end + 2) {
    end = find_byte(p, line.end, line.text_end, quote);
    if (end == line.end) return nullptr;
    copies.append(p, end);
    if (end + 1 == line.end || end[1] != quote) break;
    copies += quote;
  }
  const char* const copies_end = copies.data() + copies.size();
  cell = {copies.data() + first, copies_end, copies_end};
  return end + 1;
}

bool CsvParser::parse_cell(const Field& field, const Slice& cell, Row& row,
                           BrokenLine& broken) const {
  const bool has_list = field.is_sparse() || field.kind == FieldKind::kDense;
  if (has_list && marks_.list_separator != 0) return parse_list(field, cell, row, broken);
  const bool is_empty = cell.begin == cell.end;
  if (is_empty && field.kind == FieldKind::kDense) {
    *row.numbers++ = 0.0F;
    return true;
  }
  if (field.is_sparse()) *row.counts++ = is_empty ? 0 : 1;
  if (is_empty && field.is_sparse()) return true;
  return parse_whole(field, cell, row, broken);
}

bool CsvParser::parse_list(const Field& field, const Slice& cell, Row& row,
                           BrokenLine& broken) const {
  const std::string_view text = cell.text();
  const auto num_values =
      static_cast<std::size_t>(std::count(text.begin(), text.end(), marks_.list_separator)) + 1;
  const bool is_dense = field.kind == FieldKind::kDense;
  if (is_dense && text.empty()) {
    row.numbers = std::fill_n(row.numbers, field.dim, 0.0F);
    return true;
  }
  if (is_dense && num_values != field.dim) {
    broken.expected =
        std::to_string(field.dim) + " values separated by " + quoted({&marks_.list_separator, 1});
    broken.found = std::to_string(num_values) + " in " + quoted(text);
    return false;
  }
  const std::uint64_t* const first_key = row.keys;
  const char* p = cell.begin;
  for (std::size_t i = 0; i < num_values; ++i) {
    const char* const end = find_byte(p, cell.end, cell.text_end, marks_.list_separator);
    if (p < end) {
      if (!parse_whole(field, {p, end, cell.text_end}, row, broken)) return false;
    } else if (is_dense) {
      *row.numbers++ = 0.0F;
    }
    p = end + 1;
  }
  if (!is_dense) *row.counts++ = static_cast<std::uint32_t>(row.keys - first_key);
  return true;
}

}  // namespace trireme
