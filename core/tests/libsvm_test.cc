// LibsvmParser: known lines, pieces of any size, threads, and random damage.
#include "feed/libsvm.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "feed/strings.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

test::MakeParser with(FieldKind kind) {
  return [kind](const TextOptions& options) {
    return std::make_unique<LibsvmParser>(options, Field(kind, "x", 1));
  };
}

void parses_known_lines() {
  Pool pool(1);
  for (const FieldKind kind : {FieldKind::kKeys, FieldKind::kHashes}) {
    const auto parser = with(kind)({.batch_size = 8});
    const Exact text("1 5:0.5 7:-1e1\n\t-1 \r\n0.25#1:1\n0  9:3 \t8:1 # 1:1");
    CHECK_EQUAL(parser->parse(text.span(), text.size, true, pool), text.size);
    CHECK(!parser->broken_line());
    const Columns batch = parser->take(pool);
    CHECK_EQUAL(batch.num_examples, 4u);
    const float weights[] = {0.5f, -10, 3, 1};
    CHECK(std::equal(weights, weights + 4, batch.weights.data()));
    const std::int64_t offsets[] = {0, 2, 2, 2, 4};
    CHECK(std::equal(offsets, offsets + 5, batch.offsets.data()));
    const bool is_hashed = kind == FieldKind::kHashes;
    CHECK_EQUAL(static_cast<std::uint64_t>(batch.keys[1]),
                is_hashed ? xxh64("7", xxh64("x", 0)) : 7);
  }
}

void names_what_is_wrong() {
  const FieldKind keys = FieldKind::kKeys;
  const std::string good = "1 5:0.5";
  test::check_broken(with(keys), good, "", 0, "''");
  test::check_broken(with(keys), good, "# 1 5:0.5", 0, "''");
  test::check_broken(with(keys), good, "5:0.5", 0, "'5:0.5'");
  for (const std::string pair :
       {"qid:1", "5", "5:", ":5", "5:1:1", "5:1e39", "1.5:1", "18446744073709551616:1"}) {
    test::check_broken(with(keys), good, "1 5:1 " + pair + " 6:1", 1, "'" + pair + "'");
  }
  test::check_broken(with(keys), good, "1 5:1\v 6:1", 1, "'5:1\\x0b'");
  test::check_broken(with(FieldKind::kHashes), good, "1 qid:1 5", 1, "'5'");
}

void pieces_and_threads_change_nothing(std::uint64_t seed) {
  test::Random random(seed);
  for (int round = 0; round < 10; ++round) {
    std::string text;
    const std::uint64_t num_lines = random.below(900);
    for (std::uint64_t i = 0; i < num_lines; ++i) {
      std::string line = std::to_string(random.below(2));
      for (std::uint64_t n = random.below(100); n > 0; --n) {
        line += ' ' + std::to_string(random.next() >> random.below(64)) + ":0." +
                std::to_string(random.below(1000));
      }
      text += random.below(8) == 0 ? test::damaged(line, random) : line;
      if (i + 1 < num_lines || random.below(2)) text += random.below(5) ? "\n" : "\r\n";
    }
    const FieldKind kind = random.below(2) ? FieldKind::kKeys : FieldKind::kHashes;
    test::check_pieces_and_threads(with(kind), text, 1 + random.below(600),
                                   LibsvmParser::kMaxLineBytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  parses_known_lines();
  names_what_is_wrong();
  pieces_and_threads_change_nothing(seed);
  return 0;
}
