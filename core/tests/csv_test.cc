// CsvParser: known lines, columns by number, pieces of any size, threads, and random damage.
#include "feed/csv.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "feed/strings.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

std::vector<Field> fields() {
  return {{FieldKind::kString, "id", 1},
          {FieldKind::kNumber, "label", 1},
          {FieldKind::kKeys, "a", 1},
          {FieldKind::kHashes, "b", 1},
          {FieldKind::kDense, "dense", 2}};
}

test::MakeParser with(const CsvMarks& marks) {
  return [marks](const TextOptions& options) {
    return std::make_unique<CsvParser>(options, fields(), marks);
  };
}

void parses_known_lines() {
  Pool pool(1);
  const auto parser = with({})({.batch_size = 8});
  const Exact text(
      "x,1,,,,\n\"a,\"\"b\",0.5,18446744073709551615,\"w\",1,\r\n\"\",0,7,\"q\"\"\",,2");
  CHECK_EQUAL(parser->parse(text.span(), text.size, true, pool), text.size);
  CHECK(!parser->broken_line());
  const Columns batch = parser->take(pool);
  CHECK_EQUAL(std::string(batch.strings[0].bytes.data(),
                          batch.strings[0].bytes.data() + batch.strings[0].bytes.size()),
              "xa,\"b");
  CHECK_EQUAL(batch.numbers[0][1], 0.5f);
  const float dense[] = {0, 0, 1, 0, 0, 2};
  CHECK(std::equal(dense, dense + 6, batch.numbers[1].data()));
  const std::int64_t offsets[] = {0, 0, 1, 2, 2, 3, 4};
  CHECK(std::equal(offsets, offsets + 7, batch.offsets.data()));
  CHECK_EQUAL(batch.keys[0], -1);
  CHECK_EQUAL(static_cast<std::uint64_t>(batch.keys[2]), xxh64("w", xxh64("b", 0)));
  CHECK_EQUAL(static_cast<std::uint64_t>(batch.keys[3]), xxh64("q\"", xxh64("b", 0)));
}

void takes_columns_from_anywhere() {
  Pool pool(1);
  CsvParser parser({.batch_size = 8}, fields());
  CHECK_EQUAL(parser.num_cells(), 6u);
  parser.set_columns({7, 0, 1, 1, 6, 5}, 8);
  const Exact text("3,4,,,,5,6,id\n");
  parser.parse(text.span(), text.size, true, pool);
  CHECK(!parser.broken_line());
  const Columns batch = parser.take(pool);
  CHECK_EQUAL(batch.strings[0].bytes.size(), 2u);
  CHECK_EQUAL(batch.numbers[0][0], 3.0f);
  CHECK_EQUAL(batch.numbers[1][0], 6.0f);
  CHECK_EQUAL(batch.numbers[1][1], 5.0f);
  CHECK_EQUAL(batch.keys[0], 4);
  for (const std::size_t num_columns : {6, 7}) {
    bool refused = false;
    try {
      parser.set_columns({7, 0, 1, 1, 6, 5}, num_columns);
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kBadRequest;
    }
    CHECK(refused);
  }
}

void names_what_is_wrong() {
  struct Case {
    std::string line;
    int field;
    std::string found;
  };
  const std::string good = "x,1,7,w,1,2";
  const std::vector<Case> cases = {
      {"", -1, "1 in ''"},
      {good + ",", -1, "7 in"},
      {"x,1,7,w,1", -1, "5 in"},
      {"\"x,1,7,w,1,2", -1, "'\"x,1"},
      {"\"x\"\",1,7,w,1,2", -1, "'\"x"},
      {"\"x\"y,1,7,w,1,2", -1, "'\"x\"y,1"},
      {"x,,7,w,1,2", 1, "''"},
      {"x,1e999,7,w,1,2", 1, "'1e999'"},
      {"x,1,7|8,w,1,2", 2, "'7|8'"},
      {"x,1,7,w,1 ,2", 4, "'1 '"},
      {"x,1,7,w,1,\"2\"\"\"", 4, "'2\"'"},
  };
  for (const Case& c : cases) test::check_broken(with({}), good, c.line, c.field, c.found);
  const CsvMarks lists{.list_separator = '|'};
  test::check_broken(with(lists), "x,1,7|8,w,1|2", "x,1,7|x,w,1|2", 2, "'x'");
  test::check_broken(with(lists), "x,1,7|8,w,1|2", "x,1,7,w,1|2|3", 4, "3 in '1|2|3'");
}

void refuses_marks_that_make_no_sense() {
  for (const CsvMarks& marks :
       {CsvMarks{'\0', '"', 0}, CsvMarks{',', ',', 0}, CsvMarks{',', '"', ','},
        CsvMarks{'e', '"', 0}, CsvMarks{'\n', 0, 0}, CsvMarks{',', '-', 0}}) {
    bool refused = false;
    try {
      with(marks)({.batch_size = 1});
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::kBadRequest;
    }
    CHECK(refused);
  }
}

std::string random_line(test::Random& random, const CsvMarks& marks) {
  auto number = [&] { return std::to_string(random.next() >> random.below(64)); };
  auto list = [&](std::uint64_t count) {
    std::string out;
    for (std::uint64_t i = 0; i < count; ++i) out += (i > 0 ? "|" : "") + number();
    return out;
  };
  std::string line = random.below(2) ? "id" + number() : "\"a,\"\"" + number() + "\"";
  line += "," + number() + ".5," + list(marks.list_separator ? random.below(50) : random.below(2));
  line += ",\"w" + std::string(random.below(4), '"') + "\"";
  return line + "," + (marks.list_separator ? list(2) : number() + "," + number());
}

void pieces_and_threads_change_nothing(std::uint64_t seed) {
  test::Random random(seed);
  for (int round = 0; round < 10; ++round) {
    const CsvMarks marks{.list_separator = random.below(2) ? '|' : '\0'};
    std::string text;
    const std::uint64_t num_lines = random.below(2000);
    for (std::uint64_t i = 0; i < num_lines; ++i) {
      std::string line = random_line(random, marks);
      text += random.below(8) == 0 ? test::damaged(line, random) : line;
      if (i + 1 < num_lines || random.below(2)) text += random.below(5) ? "\n" : "\r\n";
    }
    test::check_pieces_and_threads(with(marks), text, 1 + random.below(600),
                                   CsvParser::kMaxLineBytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  parses_known_lines();
  takes_columns_from_anywhere();
  names_what_is_wrong();
  refuses_marks_that_make_no_sense();
  pieces_and_threads_change_nothing(seed);
  return 0;
}
