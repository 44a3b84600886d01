#include "feed/text.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "feed/chunks.h"

namespace trireme {
namespace {

constexpr std::size_t kMinPieceBytes = 1 << 15;  // less is not worth a thread's wake-up
constexpr std::size_t kShownBytes = 40;

}  // namespace

std::string quoted(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : bytes.substr(0, kShownBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      out += c;
    } else {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  out += "'";
  if (bytes.size() > kShownBytes) out += "... (" + std::to_string(bytes.size()) + " bytes)";
  return out;
}

TextParser::TextParser(const TextOptions& options, Layout layout, std::size_t max_line_bytes)
    : options_(options), layout_(std::move(layout)), max_line_bytes_(max_line_bytes) {
  if (options.batch_size < 1 || options.batch_size > 1 << 24) {
    throw Error(ErrorCode::kBadRequest, "TextParser: expected batch_size 1..2^24, found " +
                                            std::to_string(options.batch_size));
  }
}

std::size_t TextParser::parse(std::span<const char> text, std::size_t limit, bool is_end,
                              Pool& pool) {
  broken_line_.reset();
  std::size_t begin = 0;
  if (in_overlong_line_) begin = skip_overlong(text, 0, is_end);
  limit = std::min(limit, text.size());
  while (!in_overlong_line_ && begin < limit && !is_full()) {
    const std::size_t end = find_lines(text, begin, limit, is_end);
    if (!lines_.empty()) {
      if (!parse_lines(text, pool)) return begin;
      begin = end;
    } else if (text.size() - begin <= max_line_bytes_) {
      break;  // the rest of this line comes with the next call
    } else {
      ++num_broken_lines_;
      if (!broken_line_) broken_line_ = overlong(begin, text.data() + begin);
      if (!options_.skip_broken) return begin;
      begin = skip_overlong(text, begin, is_end);
    }
  }
  return begin;
}

BrokenLine TextParser::overlong(std::size_t offset, const char* begin) const {
  return {offset, -1, "a line of at most " + std::to_string(max_line_bytes_) + " bytes",
          quoted({begin, kShownBytes}) + "..."};
}

// Bytes up to the end of the line, or all: then the next call continues skipping.
std::size_t TextParser::skip_overlong(std::span<const char> text, std::size_t begin, bool is_end) {
  const void* newline = std::memchr(text.data() + begin, '\n', text.size() - begin);
  in_overlong_line_ = newline == nullptr && !is_end;
  if (newline == nullptr) return text.size();
  return static_cast<std::size_t>(static_cast<const char*>(newline) - text.data()) + 1;
}

// Lists the whole lines that begin in [begin, limit), as many as the batch has room for; returns
// where the next one begins.
std::size_t TextParser::find_lines(std::span<const char> text, std::size_t begin, std::size_t limit,
                                   bool is_end) {
  lines_.clear();
  const std::size_t room = options_.batch_size - num_examples_;
  const char* const text_end = text.data() + text.size();
  while (lines_.size() < room && begin < limit) {
    const char* const p = text.data() + begin;
    const auto* end =
        static_cast<const char*>(std::memchr(p, '\n', static_cast<std::size_t>(text_end - p)));
    if (end == nullptr) {
      if (!is_end) break;
      end = text_end;
    }
    lines_.push_back({p, end, text_end});
    begin = std::min(static_cast<std::size_t>(end - text.data()) + 1, text.size());
  }
  return begin;
}

// Parses lines_ into the batch. False: a broken line ended it.
bool TextParser::parse_lines(std::span<const char> text, Pool& pool) {
  std::vector<Piece> pieces = cut_lines(pool);
  pool.run(pieces.size(), [&](std::size_t i) { parse_piece(text.data(), pieces[i]); });
  std::size_t num_broken = 0;
  for (Piece& piece : pieces) {
    num_broken += piece.num_broken;
    if (piece.first_broken && !broken_line_) broken_line_ = std::move(piece.first_broken);
  }
  num_broken_lines_ += num_broken;
  num_examples_ += lines_.size() - num_broken;
  return num_broken == 0 || options_.skip_broken;
}

// Pieces of about equally many bytes, each with rows of its own. One piece alone continues with the
// latest rows, so that text in many small pieces does not make many blocks.
std::vector<TextParser::Piece> TextParser::cut_lines(const Pool& pool) {
  const char* const begin = lines_.front().begin;
  const auto num_bytes = static_cast<std::size_t>(lines_.back().end - begin);
  const std::size_t parts = num_chunks(num_bytes, kMinPieceBytes, pool, 1);
  std::vector<Piece> pieces;
  std::size_t first = 0;
  for (std::size_t i = 0; i < parts; ++i) {
    const char* const bound = begin + chunk_begin(num_bytes, i + 1, parts);
    const auto last = static_cast<std::size_t>(
        std::partition_point(lines_.begin(), lines_.end(),
                             [&](const Slice& line) { return line.begin < bound; }) -
        lines_.begin());
    const std::size_t end = i + 1 == parts ? lines_.size() : last;
    if (end > first) pieces.emplace_back().lines = std::span(lines_).subspan(first, end - first);
    first = end;
  }
  std::size_t block = pieces.size() == 1 && num_blocks_ > 0 ? num_blocks_ - 1 : num_blocks_;
  num_blocks_ = block + pieces.size();
  while (blocks_.size() < num_blocks_) blocks_.emplace_back(layout_);
  for (Piece& piece : pieces) piece.rows = &blocks_[block++];
  return pieces;
}

void TextParser::parse_piece(const char* text_begin, Piece& piece) const {
  BrokenLine broken;
  for (Slice line : piece.lines) {
    const std::size_t num_bytes = line.text().size();
    const auto offset = static_cast<std::size_t>(line.begin - text_begin);
    // A key has at least one character and one that separates it from the next; several fields may
    // read the same ones; and a feature without any may be given one.
    Row row = piece.rows->start(max_readers_ * (num_bytes / 2 + 1) + layout_.num_features);
    bool is_right = false;
    if (num_bytes > max_line_bytes_) {
      broken = overlong(offset, line.begin);
    } else {
      if (line.text().ends_with('\r')) --line.end;
      is_right = parse_line(line, row, broken);
    }
    if (is_right) {
      piece.rows->commit(row);
      continue;
    }
    broken.offset = offset;
    ++piece.num_broken;
    if (!piece.first_broken) piece.first_broken = std::exchange(broken, {});
    if (!options_.skip_broken) return;
  }
}

Columns TextParser::take(Pool& pool) {
  const std::span<Rows> blocks = std::span(blocks_).first(num_blocks_);
  Columns columns = to_columns(layout_, blocks, pool);
  for (Rows& rows : blocks) rows.clear();
  num_blocks_ = num_examples_ = 0;
  return columns;
}

}  // namespace trireme
