// The column store of a pass.
#include "feed/column_store.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "bind.h"
#include "columns.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

using Numbers = std::vector<nb::ndarray<const float, nb::c_contig, nb::device::cpu>>;
using Strings = std::tuple<Array1<const std::uint8_t>, Array1<const std::int64_t>>;
using Weights = std::optional<Array1<const float>>;

void append(ColumnStore& columns, std::size_t num_rows, const Numbers& numbers,
            const std::vector<Strings>& strings, Array1<const std::int64_t> keys,
            Array1<const std::int64_t> offsets, const Weights& weights, Pool& pool) {
  ColumnSpans rows{num_rows, {}, {}, as_span(keys), as_span(offsets), {}};
  for (const auto& column : numbers) rows.numbers.push_back(as_span(column));
  for (const auto& [data, ends] : strings) rows.strings.push_back({as_span(data), as_span(ends)});
  if (weights) rows.weights = as_span(*weights);
  nb::gil_scoped_release release;
  columns.append(rows, pool);
}

nb::tuple batch(const ColumnStore& columns, std::size_t begin, std::size_t end, Pool& pool) {
  Columns made;
  {
    nb::gil_scoped_release release;
    made = columns.batch(begin, end, pool);
  }
  return to_tuple(std::move(made), columns.layout());
}

void shuffle(ColumnStore& columns, std::uint64_t seed, const std::vector<std::size_t>& chosen,
             Pool& pool) {
  nb::gil_scoped_release release;
  columns.shuffle(seed, chosen, pool);
}

nb::list split(const ColumnStore& columns, Array1<const std::uint32_t> parts,
               std::uint32_t num_parts, Pool& pool) {
  std::vector<Array<std::byte>> pieces;
  {
    nb::gil_scoped_release release;
    pieces = columns.split(as_span(parts), num_parts, pool);
  }
  nb::list results;
  for (Array<std::byte>& piece : pieces) {
    const std::size_t size = piece.size();
    auto* const data = reinterpret_cast<std::uint8_t*>(piece.release());
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::byte*>(p); });
    results.append(Result1<std::uint8_t>(data, {size}, owner));
  }
  return results;
}

void append_piece(ColumnStore& columns, Array1<const std::uint8_t> piece) {
  nb::gil_scoped_release release;
  columns.append_piece(std::as_bytes(as_span(piece)));
}

Result1<std::uint32_t> random_parts(const ColumnStore& columns, std::uint64_t seed,
                                    std::uint32_t num_parts) {
  Array<std::uint32_t> parts;
  {
    nb::gil_scoped_release release;
    parts = columns.random_parts(seed, num_parts);
  }
  return result(std::move(parts));
}

Result1<std::uint32_t> parts_by_string(const ColumnStore& columns, std::size_t column,
                                       std::uint32_t num_parts) {
  Array<std::uint32_t> parts;
  {
    nb::gil_scoped_release release;
    parts = columns.parts_by_string(column, num_parts);
  }
  return result(std::move(parts));
}

// Freed chunks are between others. glibc returns them to the system only on request.
void give_back_memory() {
#ifdef __GLIBC__
  nb::gil_scoped_release release;
  malloc_trim(0);
#endif
}

}  // namespace

void register_column_store(nb::module_& m) {
  nb::class_<ColumnStore>(m, "ColumnStore",
                          R"(Examples in memory, column by column, in chunks.

The columns of numbers come first, then those of strings, then the features with their keys.
Threads: any number of readers, or one writer.)")
      .def(
          "__init__",
          [](ColumnStore* self, const std::vector<std::size_t>& dims, std::size_t num_strings,
             std::size_t num_features, bool has_weights) {
            new (self) ColumnStore({dims, num_strings, num_features, has_weights});
          },
          "dims"_a, "num_strings"_a, "num_features"_a, "has_weights"_a,
          "dims: floats per row of each column of numbers. has_weights: each key has a weight.\n"
          "Raises BadRequest for a dim of 0, for no column, or for more than 2^20 columns.")
      .def_prop_ro("num_rows", &ColumnStore::num_rows, "Number of rows.")
      .def_prop_ro("num_chunks", &ColumnStore::num_chunks, "Number of chunks.")
      .def_prop_ro("num_value_bytes", &ColumnStore::num_value_bytes,
                   "Bytes of the values and weights alone.")
      .def_prop_ro("num_bytes", &ColumnStore::num_bytes, "Bytes of all memory of the chunks.")
      .def_prop_ro(
          "has_weights", [](const ColumnStore& self) { return self.layout().has_weights; },
          "Whether each key has a weight.")
      .def("append", &append, "num_rows"_a, "numbers"_a.noconvert(), "strings"_a.noconvert(),
           "keys"_a.noconvert(), "offsets"_a.noconvert(), "weights"_a.noconvert().none(), "pool"_a,
           R"(Append B rows.

numbers: (B, dim) or (B,) float32 each. strings: (bytes uint8, offsets (B + 1,) int64) each.
keys: (N,) int64. offsets: (F*B + 1,) int64, feature-major. weights: (N,) float32, or None.
Raises BadRequest if sizes or offsets do not agree, ResourceExhausted for a column of 2^32 values or
more. An error leaves the store unchanged.)")
      .def("batch", &batch, "begin"_a, "end"_a, "pool"_a,
           R"(Return rows begin to end - 1 as (numbers, strings, keys, offsets, weights).

They have the form that `append` takes.
Raises BadRequest unless begin <= end <= num_rows.)")
      .def("shuffle", &shuffle, "seed"_a, "columns"_a, "pool"_a,
           R"(Permute the rows of some columns, all in the same way.

seed: together with num_rows it defines the permutation. columns: their numbers, ascending.
Raises ResourceExhausted for 2^32 rows or more.)")
      .def("take_chunks", &ColumnStore::take_chunks, "num_chunks"_a,
           "Move the first chunks, or all if there are fewer, into a new store and return it.")
      .def("random_parts", &random_parts, "seed"_a, "num_parts"_a,
           "Draw a part below num_parts for each row: (num_rows,) uint32.\n"
           "Raises BadRequest for 0 parts.")
      .def("parts_by_string", &parts_by_string, "column"_a, "num_parts"_a,
           "Return XXH64(string, seed 0) % num_parts for each row: (num_rows,) uint32.\n"
           "column: the number of a column of strings. Raises BadRequest for 0 parts, or if there "
           "is no such column.")
      .def("split", &split, "parts"_a.noconvert(), "num_parts"_a, "pool"_a,
           R"(Return the rows of each part as bytes for `append_piece`.

parts: (num_rows,) uint32, the part of each row, below num_parts. The rows keep their order.
Returns a list of num_parts arrays (M,) uint8. Raises BadRequest for wrong parts.)")
      .def("append_piece", &append_piece, "piece"_a.noconvert(),
           R"(Append a chunk that `split` of a store with the same columns returned.

piece: (M,) uint8.
Raises Corruption for other bytes; the store is then unchanged.)");
  m.def("give_back_memory", &give_back_memory,
        "Return freed memory to the system, if the C library can.");
}

}  // namespace trireme::bind
