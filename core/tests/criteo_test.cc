// CriteoParser: known lines, pieces of any size, threads, and random damage (for the sanitizers).
#include "feed/criteo.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

std::string line_of(const std::string& label, const std::string& integer,
                    const std::string& category) {
  std::string line = label;
  for (int i = 0; i < 13; ++i) line += "\t" + integer;
  for (int i = 0; i < 26; ++i) line += "\t" + category;
  return line;
}

std::unique_ptr<TextParser> make(const TextOptions& options) {
  return std::make_unique<CriteoParser>(options);
}

void parses_a_known_line() {
  Pool pool(1);
  CriteoParser parser({.batch_size = 4});
  const Exact text(line_of("1", "7", "00ff00Aa") + "\n" + line_of("0", "-3", "") + "\r\n" +
                   line_of("0", "", "5"));
  CHECK_EQUAL(parser.parse(text.span(), text.size, true, pool), text.size);
  CHECK_EQUAL(parser.num_examples(), 3u);
  CHECK(!parser.broken_line());
  const Columns batch = parser.take(pool);
  const Array<float>&labels = batch.numbers[0], &dense = batch.numbers[1];
  CHECK_EQUAL(batch.keys.size(), 52u);
  CHECK_EQUAL(labels[0], 1.0f);
  CHECK_EQUAL(labels[1], 0.0f);
  for (std::size_t i = 0; i < 13; ++i) {
    CHECK_EQUAL(dense[i], static_cast<float>(std::log1p(7.0) * 0.125));
    CHECK_EQUAL(dense[13 + i], 0.0f);
    CHECK_EQUAL(dense[26 + i], 0.0f);
  }
  for (std::int64_t f = 0; f < 26; ++f) {
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f)], 2 * f);
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f + 1)], 2 * f + 1);
    CHECK_EQUAL(batch.offsets[static_cast<std::size_t>(3 * f + 2)], 2 * f + 1);
    CHECK_EQUAL(batch.keys[static_cast<std::size_t>(2 * f)], (f << 32) + 0x00ff00aa);
    CHECK_EQUAL(batch.keys[static_cast<std::size_t>(2 * f + 1)], (f << 32) + 5);
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
  for (const Case& c : cases) test::check_broken(make, good, c.line, c.field, c.found);
}

void refuses_options_out_of_range() {
  struct Case {
    std::size_t batch_size;
    double scale;
  };
  for (const Case& c : {Case{0, 1}, Case{(1u << 24) + 1, 1}, Case{1, NAN}}) {
    bool refused = false;
    try {
      CriteoParser parser({.batch_size = c.batch_size}, true, c.scale);
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kBadRequest;
    }
    CHECK(refused);
  }
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
    if (random.below(4) == 0) line = test::damaged(line, random);
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
    test::check_pieces_and_threads(make, text, batch_size, CriteoParser::kMaxLineBytes);
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
