// MultiSlotParser: known lines, Fleet's rules, pieces of any size, threads, and random damage.
#include "feed/multislot.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "feed/strings.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

std::vector<Field> fields() {
  return {{FieldKind::kString, "ins_id", 1}, {FieldKind::kNumber, "label", 1},
          {FieldKind::kKeys, "a", 1},        {FieldKind::kHashes, "b", 1},
          {FieldKind::kAmount, "weight", 1}, {FieldKind::kDense, "dense", 3}};
}

test::MakeParser with(const MultiSlotRules& rules) {
  return [rules](const TextOptions& options) {
    return std::make_unique<MultiSlotParser>(options, fields(), rules);
  };
}

Columns parse(const std::string& lines, const MultiSlotRules& rules = {}) {
  Pool pool(1);
  const auto parser = with(rules)({.batch_size = 8});
  const Exact text(lines);
  CHECK_EQUAL(parser->parse(text.span(), text.size, true, pool), text.size);
  CHECK(!parser->broken_line());
  return parser->take(pool);
}

void parses_known_lines() {
  const Columns batch = parse(
      "1 x\xff 1 -1.5 2 0 18446744073709551615 1 word 1 0.25 3 1 2e1 -0.5\n"
      "1 id 1 1 0 3 p q r 1 3 3 .5 5. 1E-2 \r\n");
  CHECK_EQUAL(batch.num_examples, 2u);
  CHECK_EQUAL(batch.strings[0].bytes.size(), 4u);
  CHECK_EQUAL(batch.strings[0].bytes[1], 255);
  CHECK_EQUAL(batch.strings[0].offsets[1], 2);
  CHECK_EQUAL(batch.numbers[0][0], -1.5f);
  CHECK_EQUAL(batch.numbers[1][1], 3.0f);
  const float dense[] = {1, 20, -0.5f, 0.5f, 5, 0.01f};
  CHECK(std::equal(dense, dense + 6, batch.numbers[2].data()));
  const std::int64_t offsets[] = {0, 2, 2, 3, 6};
  CHECK(std::equal(offsets, offsets + 5, batch.offsets.data()));
  CHECK_EQUAL(batch.keys[1], -1);
  CHECK_EQUAL(static_cast<std::uint64_t>(batch.keys[2]), xxh64("word", xxh64("b", 0)));
}

void follows_fleets_rules_if_told() {
  const std::string lines =
      "1 i 1 0 3 0 5 0 1 w 1 0 3 0 0 0\n"
      "1 i 1 0 2 0 0 0 1 0 3 0 0 0\n"
      "1 i 1 0 0 0 1 0 3 0 0 0\n";
  CHECK_EQUAL(parse(lines).keys.size(), 6u);
  const Columns dropped = parse(lines, {.drop_zeros = true});
  CHECK_EQUAL(dropped.keys.size(), 2u);
  CHECK_EQUAL(dropped.keys[0], 5);
  const Columns padded = parse(lines, {.drop_zeros = true, .pad_empty = true});
  const std::int64_t offsets[] = {0, 1, 2, 3, 4, 5, 6};
  CHECK(std::equal(offsets, offsets + 7, padded.offsets.data()));
  CHECK_EQUAL(padded.keys[0], 5);
  CHECK_EQUAL(padded.keys[1] + padded.keys[2] + padded.keys[4] + padded.keys[5], 0);
}

void names_what_is_wrong() {
  struct Case {
    std::string line;
    int field;
    std::string found;
  };
  const std::string good = "1 i 1 0 1 7 1 w 1 0 3 0 0 0";
  const std::vector<Case> cases = {
      {"", 0, "''"},
      {" " + good, 0, "''"},
      {"2 i 1 0", 0, "'2'"},
      {"1  1 0", 0, "''"},
      {"1 i", 1, "''"},
      {"1 i 1 1e39 1 7", 1, "'1e39'"},
      {"1 i 1 nan 1 7", 1, "'nan'"},
      {"1 i 1 0x1 1 7", 1, "'0x1'"},
      {"1 i 1 0 x 7", 2, "'x'"},
      {"1 i 1 0 -1 7", 2, "'-1'"},
      {"1 i 1 0 1 18446744073709551616 1", 2, "'18446744073709551616'"},
      {"1 i 1 0 1 -9223372036854775809 1", 2, "'-9223372036854775809'"},
      {"1 i 1 0 2 7", 2, "''"},
      {"1 i 1 0 2 7\t8 9", 2, "'7\\x098'"},
      {"1 i 1 0 99999999999999999999999 7", 2, "'99999999999999999999999'"},
      {"1 i 1 0 18446744073709551615 7 8", 2, "''"},
      {"1 i 1 0 1 7 1 w 1 -0.5 3 0 0 0", 4, "'-0.5'"},
      {"1 i 1 0 1 7 1 w 1 0 2 0 0", 5, "'2'"},
      {"1 i 1 0 1 7 1 w 1 0 3 0 0", 5, "''"},
      {good + " 1 7", -1, "'1 7'"},
      {good + "  ", -1, "' '"},
      {good + std::string(MultiSlotParser::kMaxLineBytes, '0'), -1, "..."},
  };
  for (const Case& c : cases) test::check_broken(with({}), good, c.line, c.field, c.found);
}

std::string random_line(test::Random& random) {
  auto number = [&] { return std::to_string(random.next() >> random.below(64)); };
  std::string line = "1 id" + number() + " 1 " + number();
  for (const char* prefix : {"", "w"}) {
    const std::uint64_t count = random.below(4) ? random.below(6) : random.below(300);
    line += " " + std::to_string(count);
    for (std::uint64_t i = 0; i < count; ++i) line += " " + (prefix + number());
  }
  return line + " 1 0." + number() + " 3 " + number() + ".5 -" + number() + " 1e-" +
         std::to_string(random.below(60));
}

void pieces_and_threads_change_nothing(std::uint64_t seed) {
  test::Random random(seed);
  for (int round = 0; round < 10; ++round) {
    std::string text;
    const std::uint64_t num_lines = random.below(900);
    for (std::uint64_t i = 0; i < num_lines; ++i) {
      std::string line = random_line(random);
      if (random.below(8) == 0) line = test::damaged(line, random);
      text += line;
      if (i + 1 < num_lines || random.below(2)) text += random.below(5) ? "\n" : "\r\n";
    }
    const MultiSlotRules rules{random.below(2) == 1, random.below(2) == 1};
    test::check_pieces_and_threads(with(rules), text, 1 + random.below(600),
                                   MultiSlotParser::kMaxLineBytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  parses_known_lines();
  follows_fleets_rules_if_told();
  names_what_is_wrong();
  pieces_and_threads_change_nothing(seed);
  return 0;
}
