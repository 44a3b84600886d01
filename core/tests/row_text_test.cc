// Rows as text: known lines, errors of broken ones, buckets left out, and round trips of random
// rows.
#include "feed/row_text.h"

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "text_parsing.h"

using namespace trireme;
using test::Exact;

namespace {

const std::vector<std::uint8_t> kAll(kNumBuckets, 1);
const RowTextFormat kFormat{.num_head = 3, .num_full = 5, .wide = {1, 2}};

void reads_known_lines() {
  const Exact text("7 0 16777217 0.1 \r\n18446744073709551615\t-1 1e3 2 0.5 -.25\n-1 0 0 0");
  const TextRows rows = parse_rows(text.span(), kFormat, kAll);
  CHECK(!rows.broken);
  CHECK_EQUAL(rows.num_lines, 3u);
  CHECK_EQUAL(rows.keys.size(), 3u);
  CHECK_EQUAL(rows.keys[0], 7u);
  CHECK_EQUAL(rows.keys[1], ~0ULL);
  CHECK_EQUAL(rows.keys[2], ~0ULL);
  CHECK_EQUAL(rows.wide[0], 16777217.0);
  CHECK_EQUAL(rows.wide[1], 0.1);
  CHECK_EQUAL(rows.numbers[3], 0.0F);
  CHECK_EQUAL(rows.numbers[8], 0.5F);
  CHECK_EQUAL(rows.numbers[9], -0.25F);
  CHECK_EQUAL(int{rows.is_full[0]}, 0);
  CHECK_EQUAL(int{rows.is_full[1]}, 1);
  CHECK_EQUAL(parse_rows(Exact("").span(), kFormat, kAll).num_lines, 0u);
}

void names_what_is_wrong() {
  struct Case {
    const char* line;
    const char* expected;
    const char* found;
  };
  for (const auto& [line, expected, found] : {
           Case{"", "a key", "''"},
           Case{"x 0 0 0", "a key", "'x'"},
           Case{"1.5 0 0 0", "a key", "'1.5'"},
           Case{"18446744073709551616 0 0 0", "a key", "'18446744073709551616'"},
           Case{"1 0 nan 0", "a finite number", "'nan'"},
           Case{"1 0 1e309 0", "a finite number", "'1e309'"},
           Case{"1 1e39 0 0", "a finite number", "'1e39'"},
           Case{"1 0 0 0x", "a finite number", "'0x'"},
           Case{"1 0 0", "3 or 5 numbers behind the key", "2"},
           Case{"1 0 0 0 0", "3 or 5 numbers behind the key", "4"},
           Case{"1 0 0 0 0 0 9", "the end of the line", "'9'"},
       }) {
    const std::string before = "5 1 1 1\n";
    const Exact text(before + line + "\n6 1 1 1\n");
    const TextRows rows = parse_rows(text.span(), kFormat, kAll);
    CHECK(rows.broken.has_value());
    CHECK_EQUAL(rows.broken->offset, before.size());
    CHECK_EQUAL(rows.broken->expected, std::string(expected));
    CHECK_EQUAL(rows.broken->found, std::string(found));
    CHECK_EQUAL(rows.num_lines, 2u);
  }
}

void leaves_out_what_is_not_wanted() {
  std::vector<std::uint8_t> wanted(kNumBuckets, 0);
  wanted[bucket_of(8)] = 1;
  const Exact text("7 anything\n8 1 2 3\n9");
  const TextRows rows = parse_rows(text.span(), kFormat, wanted);
  CHECK(!rows.broken);
  CHECK_EQUAL(rows.num_lines, 3u);
  CHECK_EQUAL(rows.keys.size(), 1u);
  CHECK_EQUAL(rows.keys[0], 8u);
  CHECK_EQUAL(rows.numbers[0], 1.0F);
}

void rows_survive(std::uint64_t seed) {
  test::Random random(seed);
  const std::size_t n = 2000;
  Array<std::uint64_t> keys(n);
  Array<float> numbers(n * 5);
  Array<double> wide(n * 2);
  Array<std::uint8_t> is_full(n);
  const auto finite = [&](auto value) { return std::isfinite(value) ? value : 0; };
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = random.next();
    is_full[i] = random.next() % 2;
    for (std::size_t j = 0; j < 5; ++j) {
      const auto bits = static_cast<std::uint32_t>(random.next());
      numbers[i * 5 + j] = j < 3 || is_full[i] ? finite(std::bit_cast<float>(bits)) : 0.0F;
    }
    for (std::size_t j = 0; j < 2; ++j) {
      wide[i * 2 + j] = static_cast<double>(random.next()) / static_cast<double>(random.next() | 1);
    }
  }
  const Array<char> text =
      write_rows(keys.span(), numbers.span(), wide.span(), is_full.span(), kFormat);
  const Exact exact({text.data(), text.size()});
  const TextRows rows = parse_rows(exact.span(), kFormat, kAll);
  CHECK(!rows.broken);
  CHECK_EQUAL(rows.keys.size(), n);
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_EQUAL(rows.keys[i], keys[i]);
    CHECK_EQUAL(int{rows.is_full[i]}, int{is_full[i]});
    for (std::size_t j = 0; j < 5; ++j) {
      const float expected = j == 1 || j == 2 ? 0.0F : numbers[i * 5 + j];
      CHECK_EQUAL(std::bit_cast<int>(rows.numbers[i * 5 + j]), std::bit_cast<int>(expected));
    }
    for (std::size_t j = 0; j < 2; ++j) CHECK_EQUAL(rows.wide[i * 2 + j], wide[i * 2 + j]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  reads_known_lines();
  names_what_is_wrong();
  leaves_out_what_is_not_wanted();
  rows_survive(test::seed_of(argc, argv));
}
