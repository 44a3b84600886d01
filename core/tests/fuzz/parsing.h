// What is done with one input of the fuzzer, and with each file of the corpus.
//
// The first byte of an input chooses the options of the format, the rest is text. The parser
// must make the same of it in one piece and in two, and stay within its memory (the sanitizers
// watch). tests/property/test_fuzz_corpus.py compares the same inputs with plain Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "../text_parsing.h"
#include "feed/criteo.h"
#include "feed/csv.h"
#include "feed/libsvm.h"
#include "feed/multislot.h"

namespace trireme::test {

inline std::unique_ptr<TextParser> make_parser(std::string_view format, std::uint8_t choice,
                                               const TextOptions& options) {
  if (format == "criteo") return std::make_unique<CriteoParser>(options);
  if (format == "libsvm") {
    const FieldKind kind = choice % 2 ? FieldKind::kHashes : FieldKind::kKeys;
    return std::make_unique<LibsvmParser>(options, Field(kind, "features", 1));
  }
  const std::vector<Field> fields = {
      {FieldKind::kString, "ins_id", 1}, {FieldKind::kNumber, "label", 1},
      {FieldKind::kKeys, "a", 1},        {FieldKind::kHashes, "b", 1},
      {FieldKind::kAmount, "weight", 1}, {FieldKind::kDense, "dense", 2}};
  if (format == "multislot") {
    const MultiSlotRules rules{choice % 2 == 1, choice / 2 % 2 == 1};
    return std::make_unique<MultiSlotParser>(options, fields, rules);
  }
  CHECK(format == "csv");
  constexpr CsvMarks kMarks[] = {{',', '"', '|'}, {',', '"', 0}, {'\t', 0, ';'}, {';', '\'', 0}};
  return std::make_unique<CsvParser>(options, fields, kMarks[choice % 4]);
}

// Everything that comes out of a text given in two pieces, cut where a line begins.
inline std::string parse_in_two(TextParser& parser, std::string_view text, std::size_t cut) {
  Pool pool(1);
  std::string out;
  for (const std::string_view part : {text.substr(0, cut), text.substr(cut)}) {
    const Exact piece(part);
    std::size_t begin = 0;
    while (begin < piece.size) {
      const std::size_t done = parser.parse(piece.span().subspan(begin), piece.size - begin,
                                            part.end() == text.end(), pool);
      CHECK(done > 0);
      begin += done;
      if (parser.is_full()) out += bytes_of(parser.layout(), parser.take(pool));
    }
  }
  out += bytes_of(parser.layout(), parser.take(pool));
  return out + std::to_string(parser.num_broken_lines());
}

inline void check_input(std::string_view format, std::string_view input) {
  if (input.empty()) return;
  const auto choice = static_cast<std::uint8_t>(input[0]);
  const std::string_view text = input.substr(1);
  const std::size_t batch_size = 1 + choice / 4 % 4;
  const MakeParser make = [&](const TextOptions& options) {
    return make_parser(format, choice, options);
  };
  const std::string expected = parse_all(make, text, batch_size, text.size() + 1, 1);
  const std::size_t cut = text.find('\n', text.size() / 2);
  if (cut != text.npos) {
    const auto parser = make({.batch_size = batch_size, .skip_broken = true});
    CHECK(parse_in_two(*parser, text, cut + 1) == expected);
  }
  Pool pool(1);
  const auto parser = make({.batch_size = text.size() + 1});
  const Exact exact(text);
  parser->parse(exact.span(), text.size(), true, pool);
  if (!parser->broken_line()) return;
  const BrokenLine& broken = *parser->broken_line();
  CHECK(broken.offset <= text.size());
  CHECK(!broken.expected.empty());
  for (const char c : broken.found) CHECK(c >= 0x20 && c < 0x7F);
}

}  // namespace trireme::test
