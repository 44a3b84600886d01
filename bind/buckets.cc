// The content of a table's buckets, and their marks.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/array.h"
#include "table.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

Result1<std::uint64_t> marks(const Table& table, std::int64_t stream) {
  Array<std::uint64_t> found(kNumBuckets);
  {
    nb::gil_scoped_release release;
    table.marks(stream, found.span());
  }
  return result(std::move(found));
}

void set_marks(Table& table, std::int64_t stream, Array1<const std::uint64_t> marks) {
  expect("set_marks", "one mark per bucket:", marks.size(), kNumBuckets);
  nb::gil_scoped_release release;
  table.set_marks(stream, as_span(marks));
}

// A BucketContent as NumPy arrays.
struct Snapshot {
  Result1<std::uint64_t> keys;
  Result1<std::uint8_t> classes;
  Result2<std::uint8_t> rows;
  std::map<std::int64_t, std::uint64_t> marks;
  Result1<std::uint8_t> pending;
  Result1<std::uint64_t> removed;
};

// A property that returns an array, which owns its memory.
constexpr auto kShared = nb::rv_policy::automatic;
template <class T>
auto part(T Snapshot::* array) {
  return [array](const Snapshot& snapshot) { return snapshot.*array; };
}

Snapshot snapshot(const Table& table, std::uint32_t bucket, std::uint32_t since) {
  BucketContent content;
  {
    nb::gil_scoped_release release;
    content = table.snapshot(bucket, since);
  }
  return {.keys = result(std::move(content.keys)),
          .classes = result(std::move(content.classes)),
          .rows = result(std::move(content.rows), table.row_bytes()),
          .marks = {content.marks.begin(), content.marks.end()},
          .pending = result(std::move(content.pending)),
          .removed = result(std::move(content.removed))};
}

Table::BucketView view_of(const char* who, const Table& table, const Keys& keys,
                          const Array1<const std::uint8_t>& classes,
                          const Array2<const std::uint8_t>& rows) {
  expect(who, "rows of width", rows.shape(1), table.row_bytes());
  expect(who, "as many rows as keys:", rows.shape(0), keys.size());
  return {.keys = as_span(keys),
          .classes = as_span(classes),
          .rows = as_span(rows),
          .marks = {},
          .pending = std::nullopt};
}

void apply(Table& table, std::uint32_t bucket, Keys keys, Array1<const std::uint8_t> classes,
           Array2<const std::uint8_t> rows, Keys removed,
           const std::optional<Array1<const std::uint8_t>>& pending) {
  Table::BucketView content = view_of("apply", table, keys, classes, rows);
  if (pending) content.pending = as_span(*pending);
  nb::gil_scoped_release release;
  table.apply(bucket, content, as_span(removed));
}

void restore(Table& table, std::uint32_t bucket, Keys keys, Array1<const std::uint8_t> classes,
             Array2<const std::uint8_t> rows,
             const std::map<std::int64_t, std::uint64_t>& marks_of_streams,
             const std::optional<Array1<const std::uint8_t>>& pending) {
  Table::BucketView content = view_of("restore", table, keys, classes, rows);
  if (pending) content.pending = as_span(*pending);
  const std::vector<std::pair<std::int64_t, std::uint64_t>> marks_given(marks_of_streams.begin(),
                                                                        marks_of_streams.end());
  content.marks = marks_given;
  nb::gil_scoped_release release;
  table.restore(bucket, content);
}

}  // namespace

void register_buckets(nb::module_& m, nb::class_<Table>& table) {
  nb::class_<Snapshot>(m, "Snapshot", "The content of one bucket at one moment.")
      .def_prop_ro("keys", part(&Snapshot::keys), kShared, "(n,) uint64.")
      .def_prop_ro("classes", part(&Snapshot::classes), kShared,
                   "Row class of each row: (n,) uint8.")
      .def_prop_ro("rows", part(&Snapshot::rows), kShared, "Wide rows: (n, row_bytes) uint8.")
      .def_ro("marks", &Snapshot::marks, "{stream: last sequence applied}.")
      .def_prop_ro("pending", part(&Snapshot::pending), kShared,
                   "Opaque bytes: the admission counts of keys without a row: (m,) uint8.")
      .def_prop_ro(
          "removed", part(&Snapshot::removed), kShared,
          "Keys removed since the version asked for: (r,) uint64. Some may have rows again.");

  table
      .def("marks", &marks, "stream"_a,
           R"(Return the last sequence of a stream that each bucket has applied, 0 for none.

Returns (4096,) uint64. Raises BadRequest for a stream outside 0 to num_streams_max - 1.)")
      .def("set_marks", &set_marks, "stream"_a, "marks"_a.noconvert(),
           R"(Set the marks of a stream.

marks: (4096,) uint64. Raises BadRequest for a stream outside 0 to num_streams_max - 1.)")
      .def("snapshot", &snapshot, "bucket"_a, "since"_a = 0,
           R"(Return the content of a bucket at one moment.

since: 0 for all rows; otherwise the rows changed and the keys removed after this version.
Raises BadRequest for another bucket, or if some of those removed keys were forgotten.)")
      .def("restore", &restore, "bucket"_a, "keys"_a.noconvert(), "classes"_a.noconvert(),
           "rows"_a.noconvert(), "marks"_a, "pending"_a.noconvert() = nb::none(),
           R"(Replace the rows, marks and admission counts of a bucket.

The arguments are those of a Snapshot. The marks of streams that `marks` lacks become 0.
Raises BadRequest or ResourceExhausted, and the bucket is unchanged.)")
      .def("apply", &apply, "bucket"_a, "keys"_a.noconvert(), "classes"_a.noconvert(),
           "rows"_a.noconvert(), "removed"_a.noconvert(), "pending"_a.noconvert() = nb::none(),
           R"(Remove keys of a bucket, then insert or replace rows.

keys: (n,) uint64. classes: (n,) uint8. rows: (n, row_bytes) uint8. removed: (r,) uint64.
pending: (m,) uint8; None leaves the admission counts unchanged.
Other rows and all marks stay.
Raises BadRequest or ResourceExhausted, and the bucket is unchanged.)")
      .def("expect", &Table::expect, "num_rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Announce that about num_rows rows will be restored, so that memory is allocated for "
           "them at once. The number need not be exact.");
}

}  // namespace trireme::bind
