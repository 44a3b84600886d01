// Shared by all text formats: lines, pieces, broken lines, batches.
//
// A line is an example. It ends with LF or CR LF; the last line of a file may have no end. A format
// defines the meaning of a line (parse_line); a line without a meaning is broken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/pool.h"
#include "feed/columns.h"
#include "feed/rows.h"

namespace trireme {

struct TextOptions {
  std::size_t batch_size = 0;
  bool skip_broken = false;  // count broken lines and continue; else the first one stops the parser
};

struct BrokenLine {
  std::size_t offset = 0;  // of its first byte in the text of the parse() call that reported it
  int field = -1;          // a number that the format defines, or -1 when the line itself is wrong
  std::string expected;    // "an integer ..."
  std::string found;       // the value, quoted, escaped and cut; plain ASCII
};

// A line without its end, or a part of one.
struct Slice {
  const char* begin;
  const char* end;
  const char* text_end;  // up to here the text can be read

  std::string_view text() const noexcept { return {begin, static_cast<std::size_t>(end - begin)}; }
};

// Fills batches of exactly batch_size examples from pieces of text of any size.
//
// Threads: one at a time; the work inside is spread over the pool. The result depends neither on
// the pieces nor on the number of threads.
class TextParser {
 public:
  virtual ~TextParser() = default;
  TextParser(const TextParser&) = delete;
  TextParser& operator=(const TextParser&) = delete;

  // Parses lines of `text`, which starts at the beginning of a line, until the batch is full, the
  // next line begins at `limit` or later, or the rest is not a whole line. `is_end`: no text
  // follows, so that the rest is the last line. Returns how many bytes were consumed; the next call
  // continues there. A call makes progress if it has more than max_line_bytes() or the end of the
  // text. A broken line (unless skipped) ends the batch for good: see broken_line().
  std::size_t parse(std::span<const char> text, std::size_t limit, bool is_end, Pool& pool);

  std::size_t max_line_bytes() const noexcept { return max_line_bytes_; }
  const Layout& layout() const noexcept { return layout_; }
  std::size_t num_examples() const noexcept { return num_examples_; }
  bool is_full() const noexcept { return num_examples_ == options_.batch_size; }

  // The first broken line of the latest parse() call, and how many there were since construction.
  const std::optional<BrokenLine>& broken_line() const noexcept { return broken_line_; }
  std::uint64_t num_broken_lines() const noexcept { return num_broken_lines_; }

  // Returns the examples parsed since the last take(), possibly none.
  Columns take(Pool& pool);

 protected:
  // Errors: kBadRequest for a batch size outside 1..2^24.
  TextParser(const TextOptions& options, Layout layout, std::size_t max_line_bytes);

  // Writes the example of one line. False: the line is broken; sets all of `broken` except the
  // offset. Several threads call this at the same time.
  virtual bool parse_line(const Slice& line, Row& row, BrokenLine& broken) const = 0;

  // The most fields that read the same characters of a line: 1 unless overridden.
  void set_max_readers(std::size_t max_readers) noexcept { max_readers_ = max_readers; }

 private:
  struct Piece {  // the input and results of one task
    std::span<const Slice> lines;
    Rows* rows = nullptr;
    std::size_t num_broken = 0;
    std::optional<BrokenLine> first_broken;
  };

  std::size_t find_lines(std::span<const char> text, std::size_t begin, std::size_t limit,
                         bool is_end);
  bool parse_lines(std::span<const char> text, Pool& pool);
  std::vector<Piece> cut_lines(const Pool& pool);
  void parse_piece(const char* text_begin, Piece& piece) const;
  BrokenLine overlong(std::size_t offset, const char* begin) const;
  std::size_t skip_overlong(std::span<const char> text, std::size_t begin, bool is_end);

  TextOptions options_;
  Layout layout_;
  std::size_t max_line_bytes_;
  std::size_t max_readers_ = 1;
  std::vector<Slice> lines_;       // of the current round
  bool in_overlong_line_ = false;  // skipping to the end of a line that is too long
  std::optional<BrokenLine> broken_line_;
  std::uint64_t num_broken_lines_ = 0;

  // The current batch: the first num_blocks_ blocks, in order. The others are empty.
  std::vector<Rows> blocks_;
  std::size_t num_blocks_ = 0;
  std::size_t num_examples_ = 0;
};

// The bytes in a form for messages: quoted, escaped, cut after 40.
std::string quoted(std::string_view bytes);

}  // namespace trireme
