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
                          "Examples in memory, column by column, in chunks: columns of numbers, of "
                          "strings, and features of keys, in this order. Any number of readers, or "
                          "one writer.")
      .def(
          "__init__",
          [](ColumnStore* self, const std::vector<std::size_t>& dims, std::size_t num_strings,
             std::size_t num_features, bool has_weights) {
            new (self) ColumnStore({dims, num_strings, num_features, has_weights});
          },
          "dims"_a, "num_strings"_a, "num_features"_a, "has_weights"_a,
          "dims: of the columns of numbers. has_weights: each key has one.")
      .def_prop_ro("num_rows", &ColumnStore::num_rows)
      .def_prop_ro("num_chunks", &ColumnStore::num_chunks)
      .def_prop_ro("num_value_bytes", &ColumnStore::num_value_bytes,
                   "Bytes of the values and weights alone.")
      .def_prop_ro("num_bytes", &ColumnStore::num_bytes, "All memory of the chunks.")
      .def_prop_ro("has_weights", [](const ColumnStore& self) { return self.layout().has_weights; })
      .def("append", &append, "num_rows"_a, "numbers"_a.noconvert(), "strings"_a.noconvert(),
           "keys"_a.noconvert(), "offsets"_a.noconvert(), "weights"_a.noconvert().none(), "pool"_a,
           "Add B rows. numbers: (B, dim) or (B,) float32 each. strings: (bytes uint8, "
           "offsets (B + 1,) int64) each. keys: (N,) int64; offsets: (F*B + 1,) int64, "
           "feature-major. weights: (N,) float32, or None.")
      .def("batch", &batch, "begin"_a, "end"_a, "pool"_a,
           "Rows begin .. end - 1: (numbers, strings, keys, offsets, weights), as append takes "
           "them.")
      .def("shuffle", &shuffle, "seed"_a, "columns"_a, "pool"_a,
           "Permute the rows of these columns (numbers, ascending), all of them the same way.")
      .def("take_chunks", &ColumnStore::take_chunks, "num_chunks"_a,
           "Move the first chunks, or as many as there are, into a store of their own.")
      .def("random_parts", &random_parts, "seed"_a, "num_parts"_a,
           "A random part for each row: (num_rows,) uint32.")
      .def("parts_by_string", &parts_by_string, "column"_a, "num_parts"_a,
           "XXH64(string, seed 0) % num_parts of each row: (num_rows,) uint32.")
      .def("split", &split, "parts"_a.noconvert(), "num_parts"_a, "pool"_a,
           "The rows of each part, in their order, as (M,) uint8 for append_piece.")
      .def("append_piece", &append_piece, "piece"_a.noconvert(),
           "One more chunk, from split() of a store of the same columns.");
  m.def("give_back_memory", &give_back_memory,
        "Give freed memory back to the system, where the C library can.");
}

}  // namespace trireme::bind
