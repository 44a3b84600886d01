// CriteoParser: known lines, pieces of any size, threads, and random damage (for the sanitizers).
#include "feed/criteo.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace trireme;

namespace {

std::string line_of(const std::string& label, const std::string& integer,
                    const std::string& category) {
  std::string line = label;
  for (int i = 0; i < 13; ++i) line += "\t" + integer;
  for (int i = 0; i < 26; ++i) line += "\t" + category;
  return line;
}

// A copy in memory of exactly its size, so that the sanitizer sees a read past the end.
struct Exact {
  explicit Exact(const std::string& text) : size(text.size()), data(new char[text.size()]) {
    std::copy(text.begin(), text.end(), data.get());
  }
  std::span<const char> span() const { return {data.get(), size}; }
  std::size_t size;
  std::unique_ptr<char[]> data;
};

void parses_a_known_line() {
  Pool pool(1);
  CriteoParser parser({.batch_size = 4});
  const Exact text(line_of("1", "7", "00ff00Aa") + "\n" + line_of("0", "-3", "") + "\r\n" +
                   line_of("0", "", "5"));
  CHECK_EQUAL(parser.parse(text.span(), text.size, true, pool), text.size);
  CHECK_EQUAL(parser.num_examples(), 3u);
  CHECK(!parser.broken_line());
  const CriteoBatch batch = parser.take();
  CHECK_EQUAL(batch.num_values, 52u);
  CHECK_EQUAL(batch.labels[0], 1.0f);
  CHECK_EQUAL(batch.labels[1], 0.0f);
  for (std::size_t i = 0; i < 13; ++i) {
    CHECK_EQUAL(batch.dense[i], static_cast<float>(std::log1p(7.0) * 0.125));
    CHECK_EQUAL(batch.dense[13 + i], 0.0f);
    CHECK_EQUAL(batch.dense[26 + i], 0.0f);
  }
  for (std::int64_t f = 0; f < 26; ++f) {
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f)], 2 * f);
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f + 1)], 2 * f + 1);
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f + 2)], 2 * f + 1);
    CHECK_EQUAL(batch.values[static_cast<std::size_t>(2 * f)], (f << 32) + 0x00ff00aa);
    CHECK_EQUAL(batch.values[static_cast<std::size_t>(2 * f + 1)], (f << 32) + 5);
  }
}

void names_what_is_wrong() {
  struct Case {
    std::string line;
    int field;
    std::string found;
  };
  const std::string good = line_of("1", "7", "ab");
  const std::vector<Case> cases = {
      {"", -1, "1 in ''"},
      {good + "\t", -1, "41 in"},
      {good.substr(0, good.size() - 3), -1, "39 in"},
      {line_of("", "7", "ab"), 0, "''"},
      {line_of("2", "7", "ab"), 0, "'2'"},
      {line_of("1", "1x", "ab"), 1, "'1x'"},
      {line_of("1", "+1", "ab"), 1, "'+1'"},
      {line_of("1", "-", "ab"), 1, "'-'"},
      {line_of("1", "9223372036854775808", "ab"), 1, "'9223372036854775808'"},
      {line_of("1", "00000000000000000001", "ab"), 1, "'00000000000000000001'"},
      {line_of("1", "7", "123456789"), 14, "'123456789'"},
      {line_of("1", "7", "0x1"), 14, "'0x1'"},
      {line_of("1", "7", std::string("a\0b", 3)), 14, "'a\\x00b'"},
      {line_of("1", "7", "12345\r7"), 14, "'12345\\x0d7'"},
      {good + "\r\r", 39, "'ab\\x0d'"},
      {line_of("1", "7", std::string(100, '\xff')), 14, "... (100 bytes)"},
      {std::string(5000, 'a'), -1, "aaaa'..."},
  };
  Pool pool(1);
  for (const Case& c : cases) {
    for (const std::string& ending : {std::string(), "\n" + good + "\n"}) {
      CriteoParser parser({.batch_size = 8});
      const Exact text(good + "\n" + c.line + (c.line.empty() ? "\n" : ending));
      parser.parse(text.span(), text.size, true, pool);
      CHECK(parser.broken_line());
      CHECK_EQUAL(parser.broken_line()->offset, good.size() + 1);
      CHECK_EQUAL(parser.broken_line()->field, c.field);
      if (parser.broken_line()->found.find(c.found) == std::string::npos) {
        CHECK_EQUAL(parser.broken_line()->found, c.found);
      }
    }
  }
}

void refuses_options_out_of_range() {
  for (const CriteoOptions& options :
       {CriteoOptions{.batch_size = 0}, CriteoOptions{.batch_size = (1u << 24) + 1},
        CriteoOptions{.batch_size = 1, .scale = NAN}}) {
    bool refused = false;
    try {
      CriteoParser parser(options);
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kBadRequest;
    }
    CHECK(refused);
  }
}

// Everything that came out of a text, as one comparable string.
std::string parse_all(const std::string& text, std::size_t batch_size, std::size_t piece_bytes,
                      int threads) {
  Pool pool(threads);
  CriteoParser parser({.batch_size = batch_size, .skip_broken = true});
  std::string out;
  auto flush = [&] {
    const CriteoBatch batch = parser.take();
    auto add = [&](const auto* data, std::size_t size) {
      out.append(reinterpret_cast<const char*>(data), size * sizeof *data);
    };
    add(batch.labels.get(), batch.num_examples);
    add(batch.dense.get(), batch.num_examples * 13);
    add(batch.values.get(), batch.num_values);
    add(batch.offsets.get(), batch.num_examples * 26 + 1);
  };
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t size = std::min(piece_bytes, text.size() - begin);
    const Exact piece(text.substr(begin, size));
    const std::size_t done = parser.parse(piece.span(), size, begin + size == text.size(), pool);
    CHECK(done > 0 || parser.is_full());
    begin += done;
    if (parser.is_full()) flush();
  }
  flush();
  return out + std::to_string(parser.num_broken_lines());
}

std::string random_text(test::Random& random) {
  std::string text;
  const std::uint64_t num_lines = random.below(400);
  for (std::uint64_t i = 0; i < num_lines; ++i) {
    std::string line = random.below(2) ? "1" : "0";
    for (int field = 1; field < 40; ++field) {
      line += '\t';
      if (random.below(8) == 0) continue;
      const std::uint64_t value = random.next() >> (32 + random.below(32));
      char buffer[32];
      const char* format = field < 14 ? "%lld" : (random.below(2) ? "%08llx" : "%llX");
      std::snprintf(buffer, sizeof buffer, format, static_cast<unsigned long long>(value));
      line += random.below(20) == 0 && field < 14 ? "-" + std::string(buffer) : buffer;
    }
    if (random.below(4) == 0) {  // damage
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
          line.insert(at, 1, '\t');
          break;
        case 4:
          line.resize(at);
          break;
        default:
          line.insert(at, std::string(random.below(9000), 'a'));
          break;
      }
    }
    text += line;
    if (i + 1 < num_lines || random.below(2)) text += random.below(5) ? "\n" : "\r\n";
  }
  return text;
}

void pieces_and_threads_change_nothing(std::uint64_t seed) {
  test::Random random(seed);
  for (int round = 0; round < 30; ++round) {
    const std::string text = random_text(random);
    const std::size_t batch_size = 1 + random.below(300);
    const std::string expected = parse_all(text, batch_size, text.size() + 1, 1);
    CHECK(parse_all(text, batch_size, text.size() + 1, 3) == expected);
    for (std::size_t piece_bytes : {4097, 5000, 20000}) {
      CHECK(parse_all(text, batch_size, piece_bytes, 2) == expected);
    }
  }
}

void stops_before_the_limit() {
  Pool pool(1);
  const std::string line = line_of("1", "7", "ab") + "\n";
  const Exact text(line + line + line);
  for (std::size_t limit = 0; limit <= text.size; ++limit) {
    CriteoParser parser({.batch_size = 8});
    const std::size_t expected = (limit + line.size() - 1) / line.size();
    CHECK_EQUAL(parser.parse(text.span(), limit, true, pool), expected * line.size());
    CHECK_EQUAL(parser.num_examples(), expected);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  parses_a_known_line();
  names_what_is_wrong();
  refuses_options_out_of_range();
  stops_before_the_limit();
  pieces_and_threads_change_nothing(seed);
  return 0;
}
