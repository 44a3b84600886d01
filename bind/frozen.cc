// Frozen rows: their writer, their reader, and the table over them.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind.h"
#include "frozen/rows.h"
#include "frozen/table.h"
#include "frozen/writer.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

using Keys = Array1<const std::uint64_t>;
using Bytes = Array1<const std::uint8_t>;

void expect(const char* who, const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kBadRequest, std::string(who) + ": expected " + what + " " +
                                          std::to_string(expected) + ", found " +
                                          std::to_string(found));
}

constexpr const char* kEncodings[] = {"float32", "float16", "int8"};

Encoding encoding_named(const std::string& name) {
  for (std::uint32_t i = 0; i < std::size(kEncodings); ++i) {
    if (name == kEncodings[i]) return static_cast<Encoding>(i);
  }
  throw Error(ErrorCode::kBadRequest,
              "FrozenWriter: expected float32, float16 or int8, found " + name);
}

Result1<std::uint8_t> add(FrozenWriter& writer, Keys keys, Array2<const std::uint8_t> values) {
  expect("FrozenWriter.add", "as many values as keys:", values.shape(0), keys.size());
  expect("FrozenWriter.add", "bytes per value:", values.shape(1), writer.value_bytes());
  Array<std::uint8_t> out;
  {
    nb::gil_scoped_release release;
    out = writer.add(as_span(keys), as_span(values));
  }
  return result(std::move(out));
}

void init_rows(FrozenRows* self, const std::vector<std::string>& names,
               const std::vector<Bytes>& arrays) {
  expect("FrozenRows", "as many arrays as names:", arrays.size(), names.size());
  std::vector<FrozenFile> files(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) files[i] = {names[i], as_span(arrays[i])};
  new (self) FrozenRows(files);
}

nb::tuple content(const FrozenRows& rows, std::uint32_t bucket) {
  FrozenRows::Content content;
  {
    nb::gil_scoped_release release;
    content = rows.content(bucket);
  }
  const std::size_t n = content.keys.size();
  std::uint8_t* data = content.values.release();
  nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>, nb::c_contig> values(
      data, {n, rows.row_bytes() - sizeof(std::uint64_t)}, owner_of(data));
  return nb::make_tuple(result(std::move(content.keys)), values);
}

void init_table(FrozenTable* self, FrozenTable::Layers layers, std::string initializer,
                float init_a, float init_b, std::uint64_t seed, int initial_weights,
                std::string dtype, std::string simd) {
  for (const auto& layer : layers) {
    if (layer == nullptr) {
      throw Error(ErrorCode::kBadRequest, "FrozenTable: expected FrozenRows, found None");
    }
  }
  new (self) FrozenTable(std::move(layers), {.initializer = std::move(initializer),
                                             .init_a = init_a,
                                             .init_b = init_b,
                                             .seed = seed,
                                             .initial_weights = initial_weights,
                                             .dtype = std::move(dtype),
                                             .simd = std::move(simd)});
}

std::size_t lookup(const FrozenTable& table, Keys keys, Array2<float> out, Pool& pool) {
  expect("FrozenTable.lookup", "as many rows as keys:", out.shape(0), keys.size());
  expect("FrozenTable.lookup", "rows of width", out.shape(1),
         static_cast<std::size_t>(table.width()));
  nb::gil_scoped_release release;
  return table.lookup(as_span(keys), out.data(), pool);
}

}  // namespace

void register_frozen(nb::module_& m) {
  nb::class_<FrozenWriter>(m, "FrozenWriter",
                           "Writes frozen rows (docs/format/export.md) bucket by bucket, in pieces "
                           "that the caller appends to a file.")
      .def(
          "__init__",
          [](FrozenWriter* self, const std::string& encoding, int dim, int statistics,
             bool has_flags, std::uint32_t first_bucket) {
            new (self)
                FrozenWriter(encoding_named(encoding), statistics, dim, has_flags, first_bucket);
          },
          nb::kw_only(), "encoding"_a, "dim"_a, "statistics"_a = 0, "has_flags"_a = false,
          "first_bucket"_a = 0,
          R"(encoding: of the weights, float32, float16 or int8.

dim: weights of a row. statistics: float32 numbers before the weights.
has_flags: eight bytes before each row state whether its key was removed.
Raises BadRequest, naming the value.)")
      .def_prop_ro("value_bytes", &FrozenWriter::value_bytes, "Bytes of a row without its key.")
      .def("add", &add, "keys"_a.noconvert(), "values"_a.noconvert(),
           R"(Return the bytes of the next bucket.

keys: (n,) uint64, distinct, in any order.
values: (n, value_bytes) uint8: the flags if there are any, statistics, encoded weights, and zeros
up to a multiple of eight bytes.
Raises BadRequest for a key of another bucket, or a key that occurs twice.)")
      .def(
          "finish", [](const FrozenWriter& writer) { return result(writer.finish()); },
          "Return the bytes that end the file.");

  nb::class_<FrozenRows>(m, "FrozenRows",
                         "Frozen rows, read in place from memory or mapped files. Any thread may "
                         "read.")
      .def("__init__", &init_rows, "names"_a, "arrays"_a, nb::keep_alive<1, 3>(),
           R"(names: of the files, for messages.

arrays: the files' bytes, (n,) uint8 each, aligned to 8. They are not copied; do not change them.
Raises BadRequest without files, Corruption for damaged bytes, naming the file.)")
      .def_prop_ro(
          "encoding",
          [](const FrozenRows& rows) {
            return kEncodings[static_cast<std::uint32_t>(rows.encoding())];
          },
          "float32, float16 or int8.")
      .def_prop_ro("dim", &FrozenRows::dim, "Weights of a row.")
      .def_prop_ro("statistics", &FrozenRows::statistics, "float32 numbers before the weights.")
      .def_prop_ro("has_flags", &FrozenRows::has_flags, "Whether rows can state a removed key.")
      .def_prop_ro("rows", &FrozenRows::num_rows, "Number of rows, removed keys included.")
      .def_prop_ro("num_buckets", &FrozenRows::num_buckets, "Number of buckets in the files.")
      .def("content", &content, "bucket"_a,
           R"(Return (keys (n,) uint64, values (n, value_bytes) uint8) of a bucket.

They have the form that FrozenWriter.add takes.
Raises BadRequest for a bucket outside 0 to NUM_BUCKETS - 1.)");

  nb::class_<FrozenTable>(m, "FrozenTable",
                          "A read-only table over layers of frozen rows. Any thread may read.")
      .def("__init__", &init_table, "layers"_a, nb::kw_only(), "initializer"_a = "uniform",
           "init_a"_a, "init_b"_a, "seed"_a, "initial_weights"_a, "dtype"_a = "float32",
           "simd"_a = "auto", nb::keep_alive<1, 2>(),
           R"(layers: FrozenRows, newest first. The last one contains every bucket.

initializer, init_a, init_b, seed, simd: see Table.
initial_weights: an absent key has this many initial weights, rounded to dtype (float32, bfloat16 or
float16), then zeros.
Raises BadRequest, naming the value.)")
      .def_prop_ro("width", &FrozenTable::width, "Floats that a lookup writes per key.")
      .def("lookup", &lookup, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           R"(Write the statistics and weights of each key and return how many keys are absent.

keys: (N,) uint64, duplicates allowed. out: (N, width) float32; statistics of absent keys are 0.
Raises BadRequest for another shape.)");
}

}  // namespace trireme::bind
