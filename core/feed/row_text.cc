#include "feed/row_text.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "feed/numbers.h"
#include "feed/words.h"

namespace trireme {
namespace {

constexpr std::size_t kNumbersMax = 1 << 16;
constexpr std::size_t kFloatCharacters = 16;   // "-1.17549435e-38" and a blank
constexpr std::size_t kDoubleCharacters = 26;  // "-2.2250738585072014e-308" and a blank
constexpr std::size_t kKeyCharacters = 21;     // 2^64 - 1 and a line's end

bool is_blank(char c) noexcept { return c == ' ' || c == '\t'; }

void skip_blanks(const char*& p, const char* end) noexcept {
  while (p < end && is_blank(*p)) ++p;
}

// The word at `p`; empty at the end of the line.
std::string_view word_at(const char* p, const char* end) {
  const char* const stop = std::find_if(p, end, is_blank);
  return {p, static_cast<std::size_t>(stop - p)};
}

class Reader {
 public:
  Reader(std::span<const char> text, const RowTextFormat& format)
      : format_(format), text_begin_(text.data()), text_end_(text.data() + text.size()) {
    for (const std::size_t i : format.wide) is_wide_.at(i) = 1;
  }

  void read(std::span<const std::uint8_t> wanted, TextRows& rows) {
    std::size_t n = 0;
    for (const char* p = text_begin_; p < text_end_ && !rows.broken;) {
      const char* const begin = p;
      const char* next = find_byte(p, text_end_, text_end_, '\n');
      const char* const end = next > begin && next[-1] == '\r' ? next - 1 : next;
      std::uint64_t key;
      if (!parse_key(p, text_end_, key) || (p < end && !is_blank(*p)) || p > end) {
        rows.broken = broken(begin, end, begin, "a key");
      } else if (wanted[bucket_of(key)] != 0) {
        rows.keys[n] = key;
        read_numbers(begin, p, end, n, rows);
        n += !rows.broken;
      }
      ++rows.num_lines;
      p = next + 1;
    }
    rows.keys.truncate(n);
    rows.numbers.truncate(n * format_.num_full);
    rows.wide.truncate(n * format_.wide.size());
    rows.is_full.truncate(n);
  }

 private:
  void read_numbers(const char* begin, const char* p, const char* end, std::size_t n,
                    TextRows& rows) const {
    float* const numbers = rows.numbers.data() + n * format_.num_full;
    double* wide = rows.wide.data() + n * format_.wide.size();
    std::size_t count = 0;
    for (skip_blanks(p, end); p < end; skip_blanks(p, end)) {
      const char* const word = p;
      if (count == format_.num_full) {
        rows.broken = broken(begin, end, word, "the end of the line");
        return;
      }
      numbers[count] = 0.0F;
      const bool is_read = is_wide_[count] ? parse_double(p, text_end_, *wide++)
                                           : parse_float(p, text_end_, numbers[count]);
      if (!is_read || p > end || (p < end && !is_blank(*p))) {
        rows.broken = broken(begin, end, word, "a finite number");
        return;
      }
      ++count;
    }
    if (count != format_.num_head && count != format_.num_full) {
      rows.broken = broken(begin, end, end,
                           std::to_string(format_.num_head) + " or " +
                               std::to_string(format_.num_full) + " numbers behind the key");
      rows.broken->found = std::to_string(count);
      return;
    }
    rows.is_full[n] = count == format_.num_full;
    std::fill(numbers + count, numbers + format_.num_full, 0.0F);
  }

  BrokenLine broken(const char* begin, const char* end, const char* at,
                    std::string expected) const {
    return {static_cast<std::size_t>(begin - text_begin_), -1, std::move(expected),
            quoted(word_at(at, end))};
  }

  const RowTextFormat& format_;
  const char* const text_begin_;
  const char* const text_end_;
  std::vector<std::uint8_t> is_wide_ = std::vector<std::uint8_t>(format_.num_full);
};

template <class T>
char* write(char* out, T value) noexcept {
  return std::to_chars(out, out + kDoubleCharacters, value).ptr;
}

}  // namespace

void RowTextFormat::check() const {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::kBadRequest, "RowTextFormat: expected " + what);
  };
  if (num_full > kNumbersMax || num_head > num_full) {
    refuse("num_head <= num_full <= " + std::to_string(kNumbersMax) + ", found " +
           std::to_string(num_head) + " and " + std::to_string(num_full));
  }
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (wide[i] >= num_head || (i > 0 && wide[i] <= wide[i - 1])) {
      refuse("wide numbers in ascending order below " + std::to_string(num_head) + ", found " +
             std::to_string(wide[i]));
    }
  }
}

TextRows parse_rows(std::span<const char> text, const RowTextFormat& format,
                    std::span<const std::uint8_t> wanted) {
  format.check();
  if (wanted.size() != static_cast<std::size_t>(kNumBuckets)) {
    throw Error(ErrorCode::kBadRequest, "parse_rows: expected " + std::to_string(kNumBuckets) +
                                            " buckets, found " + std::to_string(wanted.size()));
  }
  const auto num_lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  TextRows rows{.keys = Array<std::uint64_t>(num_lines),
                .numbers = Array<float>(num_lines * format.num_full),
                .wide = Array<double>(num_lines * format.wide.size()),
                .is_full = Array<std::uint8_t>(num_lines),
                .broken = std::nullopt};
  Reader(text, format).read(wanted, rows);
  return rows;
}

Array<char> write_rows(std::span<const std::uint64_t> keys, std::span<const float> numbers,
                       std::span<const double> wide, std::span<const std::uint8_t> is_full,
                       const RowTextFormat& format) {
  format.check();
  const std::size_t num_wide = format.wide.size();
  if (numbers.size() != keys.size() * format.num_full || wide.size() != keys.size() * num_wide ||
      is_full.size() != keys.size()) {
    throw Error(ErrorCode::kBadRequest, "write_rows: expected " + std::to_string(keys.size()) +
                                            " rows of " + std::to_string(format.num_full) +
                                            " numbers, found " + std::to_string(numbers.size()) +
                                            " numbers and " + std::to_string(is_full.size()) +
                                            " classes");
  }
  std::vector<std::uint8_t> is_wide(format.num_full);
  for (const std::size_t i : format.wide) is_wide[i] = 1;
  Array<char> text(keys.size() * (kKeyCharacters + format.num_full * kFloatCharacters +
                                  num_wide * kDoubleCharacters) +
                   kDoubleCharacters);
  char* out = text.data();
  for (std::size_t n = 0; n < keys.size(); ++n) {
    out = write(out, keys[n]);
    const float* const of_row = numbers.data() + n * format.num_full;
    const double* wide_of_row = wide.data() + n * num_wide;
    const std::size_t count = is_full[n] ? format.num_full : format.num_head;
    for (std::size_t i = 0; i < count; ++i) {
      *out++ = ' ';
      out = is_wide[i] ? write(out, *wide_of_row++) : write(out, of_row[i]);
    }
    *out++ = '\n';
  }
  text.truncate(static_cast<std::size_t>(out - text.data()));
  return text;
}

}  // namespace trireme
