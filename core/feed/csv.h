// Separated values: a line is cells with a delimiter between them.
//
// A cell that begins with a quote ends at the closing quote. It may contain the delimiter; two
// quotes stand for one. Elsewhere a quote is an ordinary character. The end of a line always ends
// the cell.
//
// Numbers and strings are one cell. A bag is one cell: empty, one value, or several with the list
// separator between them. A dense feature is dim cells, or one with dim values if there is a list
// separator. Empty cells are 0 in dense features. In a list, empty values are 0 in dense features,
// nothing in bags.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "feed/fields.h"
#include "feed/text.h"

namespace trireme {

struct CsvMarks {
  char delimiter = ',';
  char quote = '"';         // 0: none
  char list_separator = 0;  // 0: none
};

// The field of a broken line is the number of a field.
class CsvParser final : public TextParser {
 public:
  static constexpr std::size_t kMaxLineBytes = 1 << 20;

  // Lines have the cells of the fields, in order, unless set_columns() is called. Errors:
  // kBadRequest if two marks are equal, or one could be part of a number or end a line.
  CsvParser(const TextOptions& options, std::vector<Field> fields, const CsvMarks& marks = {});

  // How many cells the fields have together.
  std::size_t num_cells() const noexcept { return columns_.size(); }

  // Lines have `num_columns` cells from now on; columns[i] is where cell i of the fields is.
  // Errors: kBadRequest for another number of them, or one out of range.
  void set_columns(std::vector<std::size_t> columns, std::size_t num_columns);

 private:
  bool parse_line(const Slice& line, Row& row, BrokenLine& broken) const override;
  bool split(const Slice& line, std::vector<Slice>& cells, std::string& copies,
             BrokenLine& broken) const;
  const char* split_quoted(const Slice& line, const char* p, Slice& cell,
                           std::string& copies) const;
  bool parse_cell(const Field& field, const Slice& cell, Row& row, BrokenLine& broken) const;
  bool parse_list(const Field& field, const Slice& cell, Row& row, BrokenLine& broken) const;
  std::size_t num_cells_of(const Field& field) const noexcept;

  std::vector<Field> fields_;
  CsvMarks marks_;
  std::vector<std::size_t> columns_;
  std::size_t num_columns_ = 0;
};

}  // namespace trireme
