// The parsers of text: one class for all, and a constructor for each format.
#include "feed/text.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind.h"
#include "columns.h"
#include "feed/criteo.h"
#include "feed/csv.h"
#include "feed/fields.h"
#include "feed/libsvm.h"
#include "feed/multislot.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

std::size_t parse(TextParser& parser, Array1<const std::uint8_t> text, std::size_t limit,
                  bool is_end, Pool& pool) {
  nb::gil_scoped_release release;
  return parser.parse({reinterpret_cast<const char*>(text.data()), text.size()}, limit, is_end,
                      pool);
}

using Broken = std::tuple<std::size_t, int, std::string, std::string>;

std::optional<Broken> broken_line(const TextParser& parser) {
  const auto& broken = parser.broken_line();
  if (!broken) return std::nullopt;
  return Broken(broken->offset, broken->field, broken->expected, broken->found);
}

nb::tuple take(TextParser& parser, Pool& pool) {
  Columns columns;
  {
    nb::gil_scoped_release release;
    columns = parser.take(pool);
  }
  return to_tuple(std::move(columns), parser.layout());
}

TextOptions options_of(std::int64_t batch_size, bool skip_broken) {
  if (batch_size < 1) {
    throw Error(ErrorCode::kBadRequest,
                "TextParser: expected batch_size 1..2^24, found " + std::to_string(batch_size));
  }
  return {static_cast<std::size_t>(batch_size), skip_broken};
}

using FieldTuple = std::tuple<std::string, std::string, std::size_t>;

FieldKind kind_of(const std::string& name) {
  constexpr std::pair<const char*, FieldKind> kKinds[] = {
      {"number", FieldKind::kNumber}, {"amount", FieldKind::kAmount},
      {"dense", FieldKind::kDense},   {"keys", FieldKind::kKeys},
      {"hashes", FieldKind::kHashes}, {"string", FieldKind::kString},
  };
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  throw Error(ErrorCode::kBadRequest, "TextParser: unknown kind of field: " + name);
}

std::vector<Field> fields_of(const std::vector<FieldTuple>& tuples) {
  std::vector<Field> fields;
  for (const auto& [kind, name, dim] : tuples) fields.emplace_back(kind_of(kind), name, dim);
  return fields;
}

char mark_of(const std::string& text) {
  if (text.size() <= 1) return text.empty() ? '\0' : text[0];
  throw Error(ErrorCode::kBadRequest,
              "CsvParser: expected a mark of one ASCII character, found " + quoted(text));
}

}  // namespace

void register_text(nb::module_& m) {
  nb::class_<TextParser>(m, "TextParser",
                         "Parses text into batches of columns. One thread at a time.")
      .def("parse", &parse, "text"_a.noconvert(), "limit"_a, "is_end"_a, "pool"_a,
           R"(Parse lines until the batch is full, or the next line begins at `limit` or later,
or the rest is not a whole line. Return how many bytes were consumed.

text: (N,) uint8, beginning at the start of a line. A call makes progress if it has more than
max_line_bytes or the end of the text.
is_end: no text follows, so the rest is the last line.)")
      .def_prop_ro("max_line_bytes", &TextParser::max_line_bytes,
                   "A line with more bytes is broken.")
      .def_prop_ro("num_examples", &TextParser::num_examples, "Examples in the batch so far.")
      .def_prop_ro("is_full", &TextParser::is_full, "Whether the batch has batch_size examples.")
      .def_prop_ro("broken_line", &broken_line,
                   "The first broken line of the latest parse(), or None: (offset in its text, "
                   "number of the field or -1, what was expected, what was found).")
      .def_prop_ro("num_broken_lines", &TextParser::num_broken_lines,
                   "Broken lines since construction.")
      .def("take", &take, "pool"_a,
           R"(Return the B examples parsed since the last take().

Returns (numbers, strings, keys, offsets, weights).
numbers: a list of (B, dim) float32. strings: a list of (bytes (M,) uint8, offsets (B + 1,) int64).
Both are in the order of their fields.
keys: (N,) int64, feature-major. offsets: (F*B + 1,) int64. weights: (N,) float32, or None.)");

  nb::class_<CriteoParser, TextParser>(m, "CriteoParser", "Criteo's tab-separated text.")
      .def(
          "__init__",
          [](CriteoParser* self, std::int64_t batch_size, bool log1p, double scale,
             bool skip_broken) {
            new (self) CriteoParser(options_of(batch_size, skip_broken), log1p, scale);
          },
          "batch_size"_a, "log1p"_a = true, "scale"_a = 0.125, "skip_broken"_a = false,
          "The dense value of an integer x is scale * log(1 + max(x, 0)), or scale * x without "
          "log1p. Raises BadRequest for a batch_size outside 1 to 2^24.");

  nb::class_<MultiSlotParser, TextParser>(m, "MultiSlotParser", "Fleet's MultiSlot text.")
      .def(
          "__init__",
          [](MultiSlotParser* self, const std::vector<FieldTuple>& fields, std::int64_t batch_size,
             bool drop_zeros, bool pad_empty, bool skip_broken) {
            new (self) MultiSlotParser(options_of(batch_size, skip_broken), fields_of(fields),
                                       {drop_zeros, pad_empty});
          },
          "fields"_a, "batch_size"_a, "drop_zeros"_a = false, "pad_empty"_a = false,
          "skip_broken"_a = false,
          R"(fields: (kind, name, dim) each.

kind: number, amount (a number that is not negative), dense, keys, hashes or string.
dim: 1 except for dense.
Raises BadRequest, naming the value.)");

  nb::class_<CsvParser, TextParser>(m, "CsvParser", "Text cells separated by a delimiter.")
      .def(
          "__init__",
          [](CsvParser* self, const std::vector<FieldTuple>& fields, std::int64_t batch_size,
             const std::string& delimiter, const std::string& quote,
             const std::string& list_separator, bool skip_broken) {
            new (self) CsvParser(options_of(batch_size, skip_broken), fields_of(fields),
                                 {mark_of(delimiter), mark_of(quote), mark_of(list_separator)});
          },
          "fields"_a, "batch_size"_a, "delimiter"_a = ",", "quote"_a = "\"",
          "list_separator"_a = "", "skip_broken"_a = false,
          R"(fields: see MultiSlotParser.

delimiter, quote, list_separator: one ASCII character each, or empty for none.
Raises BadRequest, naming the value.)")
      .def("set_columns", &CsvParser::set_columns, "columns"_a, "num_columns"_a,
           R"(Set the order of the cells of the following lines.

columns: columns[i] is the position in a line of cell i of the fields.
num_columns: cells of a line.
Raises BadRequest, naming the value.)");

  nb::class_<LibsvmParser, TextParser>(m, "LibsvmParser", "A label and index:value pairs.")
      .def(
          "__init__",
          [](LibsvmParser* self, const FieldTuple& indices, std::int64_t batch_size,
             bool skip_broken) {
            new (self) LibsvmParser(options_of(batch_size, skip_broken), fields_of({indices})[0]);
          },
          "indices"_a, "batch_size"_a, "skip_broken"_a = false,
          "indices: one field of kind keys or hashes, see MultiSlotParser.\n"
          "Raises BadRequest, naming the value.");
}

}  // namespace trireme::bind
