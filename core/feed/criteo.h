// Criteo's tab-separated text into the columns of batches.
//
// A line is: label, 13 integers, 26 categories, separated by tabs; it ends with LF or CR LF, the
// last one of a file with nothing. The label is 0 or 1. An integer has an optional minus sign and
// 1 to 19 digits that fit 64 bits; empty means 0. A category is 1 to 8 hexadecimal digits; empty
// means none, an empty bag. Its key is (category number 0..25) << 32 | value of the digits.
// Anything else makes the line broken.
//
// Two parsers share the work: a fast one, eight bytes at a time, takes the usual forms and gives up
// on everything else; a careful one decides what it gave up on, and says what is wrong. The careful
// one defines the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/pool.h"

namespace trireme {

struct CriteoOptions {
  std::size_t batch_size = 0;
  bool log1p = true;         // dense value = scale * log(1 + max(x, 0)); else scale * x
  double scale = 0.125;      // both computed in double and rounded once to float
  bool skip_broken = false;  // count broken lines and go on; else the first one stops the parser
};

struct BrokenLine {
  std::size_t offset;    // of its first byte in the text of the parse() call that met it
  int field;             // 0..39, or -1 when the line as a whole is wrong
  std::string expected;  // "an integer ..."
  std::string found;     // the value, quoted, escaped and cut; plain ASCII
};

// One batch of B examples and N ids.
struct CriteoBatch {
  std::size_t num_examples = 0;             // B
  std::size_t num_values = 0;               // N
  std::unique_ptr<float[]> labels;          // (B,)
  std::unique_ptr<float[]> dense;           // (B, 13)
  std::unique_ptr<std::int64_t[]> values;   // (N,) keys, feature-major
  std::unique_ptr<std::int64_t[]> offsets;  // (26*B + 1,)
};

// Fills batches of exactly batch_size examples from pieces of text of any size.
//
// Threads: one at a time; the work inside is spread over the pool. The result does not depend on
// the pieces or on the number of threads.
class CriteoParser {
 public:
  static constexpr std::size_t kNumDense = 13;
  static constexpr std::size_t kNumSparse = 26;
  static constexpr std::size_t kNumFields = 1 + kNumDense + kNumSparse;
  static constexpr std::size_t kMaxLineBytes = 4096;  // no correct line has more than 600

  // Errors: kBadRequest for a batch size outside 1..2^24 or a scale that is not finite.
  explicit CriteoParser(const CriteoOptions& options);

  // Parses lines of `text`, which starts at the beginning of a line, until the batch is full, the
  // next line begins at `limit` or later, or the rest is not a whole line. `is_end`: no text
  // follows, so that the rest is the last line. Returns how many bytes are done with; the next call
  // continues there. To make progress, give more than kMaxLineBytes at a time, or the end.
  // A broken line (unless skipped) ends the batch for good: see broken_line().
  std::size_t parse(std::span<const char> text, std::size_t limit, bool is_end, Pool& pool);

  std::size_t num_examples() const noexcept { return num_examples_; }
  bool is_full() const noexcept { return num_examples_ == options_.batch_size; }

  // The first broken line of the latest parse() call, and how many there were since construction.
  const std::optional<BrokenLine>& broken_line() const noexcept { return broken_line_; }
  std::uint64_t num_broken_lines() const noexcept { return num_broken_lines_; }

  // Hands over the examples parsed since the last take(), possibly none.
  CriteoBatch take();

 private:
  struct Line {
    const char* begin;
    const char* end;  // the newline, or the end of the text
  };
  struct Piece {  // what one task found
    std::size_t num_broken = 0;
    std::optional<BrokenLine> first_broken;
  };

  std::size_t find_lines(std::span<const char> text, std::size_t begin, std::size_t limit,
                         bool is_end);
  bool parse_lines(std::span<const char> text, Pool& pool);
  void parse_piece(std::span<const char> text, std::size_t first_line, std::size_t last_line,
                   Piece& piece);
  std::size_t skip_overlong(std::span<const char> text, std::size_t begin, bool is_end);
  void remove_broken_rows(std::size_t num_lines);
  void start_batch();

  CriteoOptions options_;
  std::vector<float> dense_table_;  // the transform of small integers
  std::vector<Line> lines_;         // of the round at work
  bool in_overlong_line_ = false;   // skipping to the end of a line that is too long
  std::optional<BrokenLine> broken_line_;
  std::uint64_t num_broken_lines_ = 0;

  // The batch at work: row b, feature f has its key at keys_[f * batch_size + b] if bit f of
  // present_[b] is set. Bit 31 marks a broken row until it is removed.
  std::size_t num_examples_ = 0;
  std::unique_ptr<float[]> labels_;
  std::unique_ptr<float[]> dense_;
  std::unique_ptr<std::int64_t[]> keys_;
  std::vector<std::uint32_t> present_;
};

}  // namespace trireme
