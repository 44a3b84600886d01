#include "feed/criteo.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace trireme {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

constexpr std::size_t kNumDense = CriteoParser::kNumDense;
constexpr std::size_t kNumSparse = CriteoParser::kNumSparse;
constexpr std::uint32_t kAllPresent = (1u << kNumSparse) - 1;
constexpr std::uint32_t kBrokenRow = 1u << 31;
constexpr std::size_t kDenseTableSize = 1 << 16;
constexpr std::size_t kTileRows = 8;        // rows whose keys fill one cache line per feature
constexpr std::size_t kMinPieceRows = 128;  // less is not worth a thread's wake-up
constexpr std::ptrdiff_t kReadAhead = 16;   // bytes the fast parser may read past a line's end

// One row of the batch, as both parsers fill it.
struct Row {
  float label;
  std::uint32_t present;
  std::array<float, kNumDense> dense;
  std::array<std::uint64_t, kNumSparse> keys;
};

struct Transform {
  const CriteoOptions& options;
  const std::vector<float>& table;

  float operator()(std::int64_t x) const noexcept {
    if (static_cast<std::uint64_t>(x) < table.size()) return table[static_cast<std::size_t>(x)];
    return compute(options, x);
  }
  static float compute(const CriteoOptions& options, std::int64_t x) noexcept {
    const double value = static_cast<double>(x);
    return static_cast<float>(options.scale *
                              (options.log1p ? std::log1p(std::max(value, 0.0)) : value));
  }
};

constexpr std::uint64_t key_of(std::size_t feature, std::uint64_t category) noexcept {
  return static_cast<std::uint64_t>(feature) << 32 | category;
}

// ---- words of eight bytes -------------------------------------------------------------------

constexpr std::uint64_t repeat(std::uint8_t byte) noexcept { return 0x0101010101010101ULL * byte; }
constexpr std::uint64_t kHighBits = repeat(0x80);
constexpr std::uint64_t kZeros = repeat('0');

inline std::uint64_t load_word(const char* p) noexcept {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Position 0..7 of the first tab, 8 for none. (The borrow of a true match can mark later bytes
// wrongly, never earlier ones.)
inline unsigned find_tab(std::uint64_t word) noexcept {
  const std::uint64_t x = word ^ repeat('\t');
  const std::uint64_t marks = (x - repeat(1)) & ~x & kHighBits;
  return static_cast<unsigned>(std::countr_zero(marks)) >> 3;  // countr_zero(0) is 64
}

// The first `size` (0..8) characters moved to the end of the word, '0' put before them.
inline std::uint64_t right_align(std::uint64_t word, unsigned size) noexcept {
  if (size == 8) return word;
  return (word << 8 << (56 - 8 * size)) | (kZeros >> (8 * size));
}

// Eight decimal digits, the most significant in the lowest byte. False if one is not a digit.
inline bool parse_decimal(std::uint64_t word, std::uint64_t& value) noexcept {
  if (((word + repeat(0x46)) | (word - kZeros)) & kHighBits) return false;
  std::uint64_t v = word - kZeros;
  v = v * 10 + (v >> 8);  // bytes 0, 2, 4, 6: numbers below 100
  constexpr std::uint64_t kMask = 0x000000FF000000FFULL;
  v = (v & kMask) * (100 + (1000000ULL << 32)) + (v >> 16 & kMask) * (1 + (10000ULL << 32));
  value = v >> 32;
  return true;
}

// Eight hexadecimal digits, likewise. A byte below 0x80 plus (0x80 - c) has its high bit set when
// it is at least c.
inline bool parse_hex(std::uint64_t word, std::uint64_t& value) noexcept {
  const std::uint64_t lower = word | repeat(0x20);
  const std::uint64_t digit = (word + repeat(0x80 - '0')) & ~(word + repeat(0x80 - '9' - 1));
  const std::uint64_t letter = (lower + repeat(0x80 - 'a')) & ~(lower + repeat(0x80 - 'f' - 1));
  if ((((digit | letter) & ~word) & kHighBits) != kHighBits) return false;
  std::uint64_t v = (word & repeat(0x0F)) + ((letter & kHighBits) >> 7) * 9;
  v = (v << 4 | v >> 8) & 0x00FF00FF00FF00FFULL;
  v = (v << 8 | v >> 16) & 0x0000FFFF0000FFFFULL;
  value = (v << 16 | v >> 32) & 0xFFFFFFFFULL;
  return true;
}

// ---- the careful parser ---------------------------------------------------------------------

std::string quoted(std::string_view bytes) {
  constexpr std::size_t kShown = 40;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : bytes.substr(0, kShown)) {
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
  if (bytes.size() > kShown) out += "... (" + std::to_string(bytes.size()) + " bytes)";
  return out;
}

template <class T>
bool parse_all(std::string_view text, T& value, int base) noexcept {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, base);
  return error == std::errc() && stop == end;
}

// What is wrong with one field, or nothing; fills its place in the row.
const char* parse_field(std::string_view text, std::size_t field, const Transform& transform,
                        Row& row) noexcept {
  if (field == 0) {
    if (text != "0" && text != "1") return "the label 0 or 1";
    row.label = text == "1" ? 1.0f : 0.0f;
  } else if (field <= kNumDense) {
    std::int64_t x = 0;
    const std::size_t num_digits = text.size() - (text.starts_with('-') ? 1 : 0);
    if (!text.empty() && (num_digits > 19 || !parse_all(text, x, 10))) {
      return "an integer of 64 bits or nothing";
    }
    row.dense[field - 1] = transform(x);
  } else if (!text.empty()) {
    const std::size_t feature = field - 1 - kNumDense;
    std::uint32_t category = 0;
    if (text.size() > 8 || !parse_all(text, category, 16)) {
      return "1 to 8 hexadecimal digits or nothing";
    }
    row.keys[feature] = key_of(feature, category);
    row.present |= 1u << feature;
  }
  return nullptr;
}

bool parse_carefully(std::string_view line, const Transform& transform, Row& row,
                     BrokenLine& broken) {
  broken.field = -1;
  if (line.size() > CriteoParser::kMaxLineBytes) {
    broken.expected = "a line of at most " + std::to_string(CriteoParser::kMaxLineBytes) + " bytes";
    broken.found = quoted(line.substr(0, 40)) + "...";
    return false;
  }
  if (line.ends_with('\r')) line.remove_suffix(1);
  const std::size_t num_fields =
      static_cast<std::size_t>(std::count(line.begin(), line.end(), '\t')) + 1;
  if (num_fields != CriteoParser::kNumFields) {
    broken.expected = std::to_string(CriteoParser::kNumFields) + " fields separated by tabs";
    broken.found = std::to_string(num_fields) + " in " + quoted(line);
    return false;
  }
  row.present = 0;
  for (std::size_t field = 0; field < num_fields; ++field) {
    const std::string_view text = line.substr(0, line.find('\t'));
    if (const char* expected = parse_field(text, field, transform, row)) {
      broken.field = static_cast<int>(field);
      broken.expected = expected;
      broken.found = quoted(text);
      return false;
    }
    line.remove_prefix(std::min(text.size() + 1, line.size()));
  }
  return true;
}

// ---- the fast parser ------------------------------------------------------------------------
//
// `p` never passes the end of the line: a field is accepted only when all its characters are
// digits, so neither a newline nor what lies behind it can be part of one.

inline bool parse_integer_fast(const char*& p, const Transform& transform, float& out) noexcept {
  const std::uint64_t word = load_word(p);
  const unsigned size = find_tab(word);
  std::uint64_t x;
  if (size == 8 || !parse_decimal(right_align(word, size), x)) {
    std::int64_t value;  // a sign or many digits; from_chars stops at the tab or at what is wrong
    const auto [stop, error] = std::from_chars(p, p + kReadAhead, value);
    if (error != std::errc() || stop - p >= kReadAhead || *stop != '\t') return false;
    out = transform(value);
    p = stop + 1;
    return true;
  }
  out = transform(static_cast<std::int64_t>(x));
  p += size + 1;
  return true;
}

inline bool parse_category_fast(std::uint64_t word, unsigned size, std::size_t feature,
                                Row& row) noexcept {
  std::uint64_t category;
  if (!parse_hex(right_align(word, size), category)) return false;
  row.keys[feature] = key_of(feature, category);
  row.present |= static_cast<std::uint32_t>(size != 0) << feature;
  return true;
}

// False: not one of the usual forms, ask the careful parser. Requires: kReadAhead bytes can be read
// behind `end`.
bool parse_fast(const char* p, const char* end, const Transform& transform, Row& row) noexcept {
  if (end - p > 600 || end - p < 2) return false;
  if (end[-1] == '\r') --end;
  if ((*p != '0' && *p != '1') || p[1] != '\t') return false;
  row.label = *p == '1' ? 1.0f : 0.0f;
  row.present = 0;
  p += 2;
  for (std::size_t i = 0; i < kNumDense; ++i) {
    if (!parse_integer_fast(p, transform, row.dense[i])) return false;
  }
  for (std::size_t feature = 0; feature + 1 < kNumSparse; ++feature) {
    const std::uint64_t word = load_word(p);
    const unsigned size = find_tab(word);
    if (size == 8 && p[8] != '\t') return false;
    if (!parse_category_fast(word, size, feature, row)) return false;
    p += size + 1;
  }
  if (end - p > 8) return false;
  return parse_category_fast(load_word(p), static_cast<unsigned>(end - p), kNumSparse - 1, row);
}

}  // namespace

CriteoParser::CriteoParser(const CriteoOptions& options) : options_(options) {
  if (options.batch_size < 1 || options.batch_size > 1 << 24) {
    throw Error(ErrorCode::kBadRequest, "CriteoParser: expected batch_size 1..2^24, found " +
                                            std::to_string(options.batch_size));
  }
  if (!std::isfinite(options.scale)) {
    throw Error(ErrorCode::kBadRequest,
                "CriteoParser: expected a finite scale, found " + std::to_string(options.scale));
  }
  dense_table_.resize(kDenseTableSize);
  for (std::size_t x = 0; x < kDenseTableSize; ++x) {
    dense_table_[x] = Transform::compute(options_, static_cast<std::int64_t>(x));
  }
}

std::size_t CriteoParser::parse(std::span<const char> text, std::size_t limit, bool is_end,
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
    } else if (text.size() - begin <= kMaxLineBytes) {
      break;  // the rest of this line comes with the next call
    } else {
      ++num_broken_lines_;
      BrokenLine broken{begin, -1, {}, {}};
      Row row{};
      const Transform transform{options_, dense_table_};
      parse_carefully({text.data() + begin, text.size() - begin}, transform, row, broken);
      if (!broken_line_) broken_line_ = std::move(broken);
      if (!options_.skip_broken) return begin;
      begin = skip_overlong(text, begin, is_end);
    }
  }
  return begin;
}

// Bytes up to the end of the line, or all: then the next call goes on skipping.
std::size_t CriteoParser::skip_overlong(std::span<const char> text, std::size_t begin,
                                        bool is_end) {
  const void* newline = std::memchr(text.data() + begin, '\n', text.size() - begin);
  in_overlong_line_ = newline == nullptr && !is_end;
  if (newline == nullptr) return text.size();
  return static_cast<std::size_t>(static_cast<const char*>(newline) - text.data()) + 1;
}

// Lists the whole lines that begin in [begin, limit), as many as the batch has room for; returns
// where the next one begins.
std::size_t CriteoParser::find_lines(std::span<const char> text, std::size_t begin,
                                     std::size_t limit, bool is_end) {
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
    lines_.push_back({p, end});
    begin = std::min(static_cast<std::size_t>(end - text.data()) + 1, text.size());
  }
  return begin;
}

// Parses lines_ into the next rows. False: a broken line ended the batch.
bool CriteoParser::parse_lines(std::span<const char> text, Pool& pool) {
  start_batch();
  const std::size_t num_lines = lines_.size();
  const auto threads = static_cast<std::size_t>(pool.threads());
  const std::size_t even = (num_lines + threads - 1) / threads;
  const std::size_t piece_lines =
      std::max(kMinPieceRows, (even + kTileRows - 1) & ~(kTileRows - 1));
  std::vector<Piece> pieces((num_lines + piece_lines - 1) / piece_lines);
  pool.run(pieces.size(), [&](std::size_t i) {
    const std::size_t first = i * piece_lines;
    parse_piece(text, first, std::min(first + piece_lines, num_lines), pieces[i]);
  });
  std::size_t num_broken = 0;
  for (Piece& piece : pieces) {
    num_broken += piece.num_broken;
    if (piece.first_broken && !broken_line_) broken_line_ = std::move(piece.first_broken);
  }
  num_broken_lines_ += num_broken;
  if (num_broken == 0) {
    num_examples_ += num_lines;
    return true;
  }
  if (!options_.skip_broken) return false;
  remove_broken_rows(num_lines);
  return true;
}

void CriteoParser::parse_piece(std::span<const char> text, std::size_t first_line,
                               std::size_t last_line, Piece& piece) {
  const Transform transform{options_, dense_table_};
  const char* const readable_end = text.data() + text.size();
  // Keys collect in a tile before they go to their 26 places: the places lie a multiple of the
  // batch size apart, and writing them one by one would fight for the same cache sets.
  std::uint64_t tile[kNumSparse][kTileRows];
  Row row{};
  for (std::size_t begin = first_line; begin < last_line; begin += kTileRows) {
    const std::size_t num_rows = std::min(kTileRows, last_line - begin);
    for (std::size_t i = 0; i < num_rows; ++i) {
      const Line line = lines_[begin + i];
      const std::size_t b = num_examples_ + begin + i;
      const bool is_roomy = readable_end - line.end >= kReadAhead;
      if (!is_roomy || !parse_fast(line.begin, line.end, transform, row)) {
        BrokenLine broken{static_cast<std::size_t>(line.begin - text.data()), -1, {}, {}};
        const std::string_view bytes(line.begin, static_cast<std::size_t>(line.end - line.begin));
        if (!parse_carefully(bytes, transform, row, broken)) {
          ++piece.num_broken;
          if (!piece.first_broken) piece.first_broken = std::move(broken);
          if (!options_.skip_broken) return;
          row.present = kBrokenRow;
        }
      }
      labels_[b] = row.label;
      present_[b] = row.present;
      std::copy(row.dense.begin(), row.dense.end(), &dense_[b * kNumDense]);
      for (std::size_t f = 0; f < kNumSparse; ++f) tile[f][i] = row.keys[f];
    }
    std::int64_t* const keys = &keys_[num_examples_ + begin];
    for (std::size_t f = 0; f < kNumSparse; ++f) {
      std::memcpy(keys + f * options_.batch_size, tile[f], num_rows * sizeof(std::uint64_t));
    }
  }
}

// Closes the gaps that broken lines left among the newest rows.
void CriteoParser::remove_broken_rows(std::size_t num_lines) {
  std::size_t to = num_examples_;
  for (std::size_t from = num_examples_; from < num_examples_ + num_lines; ++from) {
    if (present_[from] & kBrokenRow) continue;
    labels_[to] = labels_[from];
    present_[to] = present_[from];
    std::copy_n(&dense_[from * kNumDense], kNumDense, &dense_[to * kNumDense]);
    for (std::size_t f = 0; f < kNumSparse; ++f) {
      std::int64_t* const keys = &keys_[f * options_.batch_size];
      keys[to] = keys[from];
    }
    ++to;
  }
  num_examples_ = to;
}

void CriteoParser::start_batch() {
  if (labels_) return;
  const std::size_t size = options_.batch_size;
  labels_ = std::make_unique_for_overwrite<float[]>(size);
  dense_ = std::make_unique_for_overwrite<float[]>(size * kNumDense);
  keys_ = std::make_unique_for_overwrite<std::int64_t[]>(size * kNumSparse);
  present_.resize(size);
}

CriteoBatch CriteoParser::take() {
  start_batch();
  CriteoBatch batch;
  const std::size_t size = num_examples_;
  batch.num_examples = size;
  batch.offsets = std::make_unique_for_overwrite<std::int64_t[]>(size * kNumSparse + 1);
  std::uint32_t in_every_row = kAllPresent;
  for (std::size_t b = 0; b < size; ++b) in_every_row &= present_[b];

  // Moves the keys together, in place: the write position never overtakes the read position.
  std::int64_t* offsets = batch.offsets.get();
  std::int64_t n = 0;
  for (std::size_t f = 0; f < kNumSparse; ++f) {
    const std::int64_t* const keys = &keys_[f * options_.batch_size];
    if (in_every_row >> f & 1) {
      std::memmove(&keys_[static_cast<std::size_t>(n)], keys, size * sizeof(std::int64_t));
      for (std::size_t b = 0; b < size; ++b) *offsets++ = n++;
      continue;
    }
    for (std::size_t b = 0; b < size; ++b) {
      *offsets++ = n;
      keys_[static_cast<std::size_t>(n)] = keys[b];
      n += present_[b] >> f & 1;
    }
  }
  *offsets = n;
  batch.num_values = static_cast<std::size_t>(n);
  batch.labels = std::move(labels_);
  batch.dense = std::move(dense_);
  batch.values = std::move(keys_);
  num_examples_ = 0;
  return batch;
}

}  // namespace trireme
