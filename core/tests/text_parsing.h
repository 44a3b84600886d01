// Shared by the tests of the text parsers: text in memory of exactly its size, the whole output of
// a parser as one comparable value, and damaged text.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/pool.h"
#include "check.h"
#include "feed/text.h"

namespace trireme::test {

// A copy in memory of exactly its size, so that the sanitizer detects a read past the end.
struct Exact {
  explicit Exact(std::string_view text) : size(text.size()), data(new char[text.size()]) {
    std::copy(text.begin(), text.end(), data.get());
  }
  std::span<const char> span() const { return {data.get(), size}; }
  std::size_t size;
  std::unique_ptr<char[]> data;
};

using MakeParser = std::function<std::unique_ptr<TextParser>(const TextOptions&)>;

// The bytes of all parts of a batch, concatenated. Checks that its offsets are valid.
inline std::string bytes_of(const Layout& layout, const Columns& columns) {
  std::string out;
  auto add = [&](const auto* data, std::size_t size) {
    if (size > 0) out.append(reinterpret_cast<const char*>(data), size * sizeof *data);
  };
  CHECK_EQUAL(columns.numbers.size(), layout.dims.size());
  for (const Array<float>& numbers : columns.numbers) add(numbers.data(), numbers.size());
  for (const StringColumn& strings : columns.strings) {
    CHECK_EQUAL(strings.offsets.size(), columns.num_examples + 1);
    CHECK_EQUAL(strings.offsets[columns.num_examples],
                static_cast<std::int64_t>(strings.bytes.size()));
    add(strings.bytes.data(), strings.bytes.size());
    add(strings.offsets.data(), strings.offsets.size());
  }
  CHECK_EQUAL(columns.offsets.size(), layout.num_features * columns.num_examples + 1);
  CHECK(std::is_sorted(columns.offsets.span().begin(), columns.offsets.span().end()));
  CHECK_EQUAL(columns.offsets[0], 0);
  CHECK_EQUAL(columns.offsets.span().back(), static_cast<std::int64_t>(columns.keys.size()));
  CHECK_EQUAL(columns.weights.size(), layout.has_weights ? columns.keys.size() : 0);
  add(columns.keys.data(), columns.keys.size());
  add(columns.offsets.data(), columns.offsets.size());
  add(columns.weights.data(), columns.weights.size());
  return out;
}

// The output for a text in pieces of `piece_bytes`, broken lines skipped.
inline std::string parse_all(const MakeParser& make, std::string_view text, std::size_t batch_size,
                             std::size_t piece_bytes, int threads) {
  Pool pool(threads);
  const std::unique_ptr<TextParser> parser = make({.batch_size = batch_size, .skip_broken = true});
  std::string out;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t size = std::min(piece_bytes, text.size() - begin);
    const Exact piece(text.substr(begin, size));
    const std::size_t done = parser->parse(piece.span(), size, begin + size == text.size(), pool);
    CHECK(done > 0 || parser->is_full());
    begin += done;
    if (parser->is_full()) out += bytes_of(parser->layout(), parser->take(pool));
  }
  out += bytes_of(parser->layout(), parser->take(pool));
  return out + std::to_string(parser->num_broken_lines());
}

// Pieces of more than the longest line, and threads, change nothing.
inline void check_pieces_and_threads(const MakeParser& make, const std::string& text,
                                     std::size_t batch_size, std::size_t max_line_bytes) {
  const std::string expected = parse_all(make, text, batch_size, text.size() + 1, 1);
  CHECK(parse_all(make, text, batch_size, text.size() + 1, 3) == expected);
  for (const std::size_t more : {1, 1000, 16000}) {
    CHECK(parse_all(make, text, batch_size, max_line_bytes + more, 2) == expected);
  }
}

// Checks that a broken line among good ones is reported, whatever follows it.
inline void check_broken(const MakeParser& make, const std::string& good, const std::string& line,
                         int field, const std::string& found) {
  Pool pool(1);
  for (const std::string& ending : {std::string(), "\n" + good + "\n"}) {
    const std::unique_ptr<TextParser> parser = make({.batch_size = 8});
    const Exact text(good + "\n" + line + (line.empty() ? "\n" : ending));
    parser->parse(text.span(), text.size, true, pool);
    CHECK(parser->broken_line());
    CHECK_EQUAL(parser->broken_line()->offset, good.size() + 1);
    CHECK_EQUAL(parser->broken_line()->field, field);
    if (parser->broken_line()->found.find(found) == std::string::npos) {
      CHECK_EQUAL(parser->broken_line()->found, found);
    }
  }
}

inline std::string damaged(std::string line, Random& random) {
  if (line.empty()) return line;
  const std::size_t at = random.below(line.size());
  switch (random.below(6)) {
    case 0:
      line[at] = static_cast<char>(random.next());
      break;
    case 1:
      line.erase(at, 1 + random.below(4));
      break;
    case 2:
      line.insert(at, 1, static_cast<char>(random.next()));
      break;
    case 3:
      line.insert(at, 1, "\t ,:\""[random.below(5)]);
      break;
    case 4:
      line.resize(at);
      break;
    default:
      line.insert(at, std::string(random.below(9000), '7'));
      break;
  }
  return line;
}

}  // namespace trireme::test
