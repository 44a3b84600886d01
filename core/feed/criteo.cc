#include "feed/criteo.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "feed/words.h"

namespace trireme {
namespace {

constexpr std::size_t kDenseTableSize = 1 << 16;
constexpr std::ptrdiff_t kReadAhead = 16;  // bytes the fast parser may read past a line's end
constexpr std::ptrdiff_t kMaxUsualBytes = 600;

template <class T>
bool parse_all(std::string_view text, T& value, int base) noexcept {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, base);
  return error == std::errc() && stop == end;
}

// A key, or none if it is not present.
inline void add_category(std::size_t feature, std::uint64_t category, bool is_present,
                         Row& row) noexcept {
  *row.keys = static_cast<std::uint64_t>(feature) << 32 | category;
  row.keys += is_present;
  *row.counts++ = is_present;
}

inline bool add_category_fast(std::uint64_t word, unsigned size, std::size_t feature,
                              Row& row) noexcept {
  std::uint64_t category;
  if (!parse_hex(right_align(word, size), category)) return false;
  add_category(feature, category, size != 0, row);
  return true;
}

}  // namespace

CriteoParser::CriteoParser(const TextOptions& options, bool log1p, double scale)
    : TextParser(options, layout_of_lines(), kMaxLineBytes), log1p_(log1p), scale_(scale) {
  if (!std::isfinite(scale)) {
    throw Error(ErrorCode::kBadRequest,
                "CriteoParser: expected a finite scale, found " + std::to_string(scale));
  }
  dense_table_.resize(kDenseTableSize);
  for (std::size_t x = 0; x < kDenseTableSize; ++x) {
    dense_table_[x] = compute_dense(static_cast<std::int64_t>(x));
  }
}

Layout CriteoParser::layout_of_lines() {
  return {.dims = {1, kNumDense}, .num_features = kNumSparse};
}

float CriteoParser::dense_of(std::int64_t x) const noexcept {
  if (static_cast<std::uint64_t>(x) < kDenseTableSize) {
    return dense_table_[static_cast<std::size_t>(x)];
  }
  return compute_dense(x);
}

float CriteoParser::compute_dense(std::int64_t x) const noexcept {
  const double value = static_cast<double>(x);
  return static_cast<float>(scale_ * (log1p_ ? std::log1p(std::max(value, 0.0)) : value));
}

bool CriteoParser::parse_line(const Slice& line, Row& row, BrokenLine& broken) const {
  const Row start = row;
  if (line.text_end - line.end >= kReadAhead && parse_fast(line, row)) [[likely]] {
    return true;
  }
  row = start;
  return parse_carefully(line, row, broken);
}

// ---- the careful parser ---------------------------------------------------------------------

// What is wrong with one field, or nothing.
const char* CriteoParser::parse_field(std::string_view text, std::size_t field,
                                      Row& row) const noexcept {
  if (field == 0) {
    if (text != "0" && text != "1") return "the label 0 or 1";
    *row.numbers++ = text == "1" ? 1.0F : 0.0F;
  } else if (field <= kNumDense) {
    std::int64_t x = 0;
    const std::size_t num_digits = text.size() - (text.starts_with('-') ? 1 : 0);
    if (!text.empty() && (num_digits > 19 || !parse_all(text, x, 10))) {
      return "an integer of 64 bits or nothing";
    }
    *row.numbers++ = dense_of(x);
  } else {
    std::uint32_t category = 0;
    if (!text.empty() && (text.size() > 8 || !parse_all(text, category, 16))) {
      return "1 to 8 hexadecimal digits or nothing";
    }
    add_category(field - 1 - kNumDense, category, !text.empty(), row);
  }
  return nullptr;
}

bool CriteoParser::parse_carefully(const Slice& line, Row& row, BrokenLine& broken) const {
  broken.field = -1;
  std::string_view rest = line.text();
  const std::size_t num_fields =
      static_cast<std::size_t>(std::count(rest.begin(), rest.end(), '\t')) + 1;
  if (num_fields != kNumFields) {
    broken.expected = std::to_string(kNumFields) + " fields separated by tabs";
    broken.found = std::to_string(num_fields) + " in " + quoted(rest);
    return false;
  }
  for (std::size_t field = 0; field < num_fields; ++field) {
    const std::string_view text = rest.substr(0, rest.find('\t'));
    if (const char* expected = parse_field(text, field, row)) {
      broken.field = static_cast<int>(field);
      broken.expected = expected;
      broken.found = quoted(text);
      return false;
    }
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
  }
  return true;
}

// ---- the fast parser ------------------------------------------------------------------------
//
// `p` never passes the end of the line: a field is accepted only when all its characters are
// digits, so neither a newline nor what follows it can be part of one.

inline bool CriteoParser::parse_integer_fast(const char*& p, float& out) const noexcept {
  const std::uint64_t word = load_word(p);
  const unsigned size = find_byte(word, '\t');
  if (size < kWordBytes && count_digits(word) >= size) {
    out = dense_of(static_cast<std::int64_t>(decimal_of(right_align(word, size))));
    p += size + 1;
    return true;
  }
  std::int64_t value;  // a sign or many digits; from_chars stops at the first other character
  const auto [stop, error] = std::from_chars(p, p + kReadAhead, value);
  if (error != std::errc() || stop - p >= kReadAhead || *stop != '\t') return false;
  out = dense_of(value);
  p = stop + 1;
  return true;
}

// False: not one of the usual forms; the careful parser decides. Requires: kReadAhead bytes after
// the line can be read.
bool CriteoParser::parse_fast(const Slice& line, Row& row) const noexcept {
  const char* p = line.begin;
  if (line.end - p > kMaxUsualBytes || line.end - p < 2) return false;
  if ((*p != '0' && *p != '1') || p[1] != '\t') return false;
  *row.numbers++ = *p == '1' ? 1.0F : 0.0F;
  p += 2;
  for (std::size_t i = 0; i < kNumDense; ++i) {
    if (!parse_integer_fast(p, *row.numbers++)) return false;
  }
  for (std::size_t feature = 0; feature + 1 < kNumSparse; ++feature) {
    const std::uint64_t word = load_word(p);
    const unsigned size = find_byte(word, '\t');
    if (size == kWordBytes && p[8] != '\t') return false;
    if (!add_category_fast(word, size, feature, row)) return false;
    p += size + 1;
  }
  if (line.end - p > static_cast<std::ptrdiff_t>(kWordBytes)) return false;
  return add_category_fast(load_word(p), static_cast<unsigned>(line.end - p), kNumSparse - 1, row);
}

}  // namespace trireme
