// Rows of tables as text (core/feed/row_text.h).
#include "feed/row_text.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;
using Broken = std::tuple<std::size_t, std::string, std::string>;

template <class T>
Result2<T> rows_of(Array<T>&& array, std::size_t rows, std::size_t dim) {
  T* const data = array.release();
  return Result2<T>(data, {rows, dim}, owner_of(data));
}

nb::tuple parse(Array1<const std::uint8_t> text, const RowTextFormat& format,
                Array1<const std::uint8_t> wanted) {
  TextRows rows;
  {
    nb::gil_scoped_release release;
    rows = parse_rows({reinterpret_cast<const char*>(text.data()), text.size()}, format,
                      as_span(wanted));
  }
  std::optional<Broken> broken;
  if (rows.broken) broken = Broken(rows.broken->offset, rows.broken->expected, rows.broken->found);
  const std::size_t n = rows.keys.size();
  return nb::make_tuple(result(std::move(rows.keys)),
                        rows_of(std::move(rows.numbers), n, format.num_full),
                        rows_of(std::move(rows.wide), n, format.wide.size()),
                        result(std::move(rows.is_full)), rows.num_lines, broken);
}

Result1<std::uint8_t> write(Array1<const std::uint64_t> keys, Array2<const float> numbers,
                            Array2<const double> wide, Array1<const std::uint8_t> is_full,
                            const RowTextFormat& format) {
  Array<char> text;
  {
    nb::gil_scoped_release release;
    text = write_rows(as_span(keys), as_span(numbers), as_span(wide), as_span(is_full), format);
  }
  const std::size_t size = text.size();
  char* const data = text.release();
  return Result1<std::uint8_t>(reinterpret_cast<std::uint8_t*>(data), {size}, owner_of(data));
}

}  // namespace

void register_row_text(nb::module_& m) {
  nb::class_<RowTextFormat>(m, "RowTextFormat", "How many numbers follow the key of a row in text.")
      .def(
          "__init__",
          [](RowTextFormat* self, std::size_t num_head, std::size_t num_full,
             std::vector<std::size_t> wide) {
            RowTextFormat format{num_head, num_full, std::move(wide)};
            format.check();
            new (self) RowTextFormat(std::move(format));
          },
          nb::kw_only(), "num_head"_a, "num_full"_a, "wide"_a,
          R"(A row has either num_head or num_full numbers.

wide: the positions of numbers in double precision, ascending, below num_head.
Raises BadRequest, naming the value.)");
  m.def("parse_rows", &parse, "text"_a.noconvert(), "format"_a, "wanted"_a.noconvert(),
        R"(Read rows from whole lines of text.

text: (bytes,) uint8. wanted: (4096,) uint8, 1 for the buckets to keep.
Returns (keys (n,) uint64, numbers (n, num_full) float32, wide (n, W) float64, is_full (n,) uint8,
number of lines, broken). A number that a row lacks is 0. broken is None, or (offset of the first
broken line, what was expected, what was found); lines after it are not read.)");
  m.def("write_rows", &write, "keys"_a.noconvert(), "numbers"_a.noconvert(), "wide"_a.noconvert(),
        "is_full"_a.noconvert(), "format"_a,
        R"(Return rows as text, (bytes,) uint8: the inverse of parse_rows, with its shapes.

Each number has the fewest digits that read back as the same value. The numbers at the positions
`format.wide` are taken from `wide`.)");
}

}  // namespace trireme::bind
