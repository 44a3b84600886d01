// Rows of several buckets as columns (core/table/bucket_columns.h).
#include "table/bucket_columns.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

template <class T>
Result1<T> result(std::vector<T>&& values) {
  auto* const kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Result1<T>(kept->data(), {kept->size()}, owner);
}

// A BucketColumns as NumPy arrays.
struct Columns {
  Result1<std::uint32_t> num_rows;
  Result1<std::uint64_t> keys;
  Result1<std::uint8_t> classes;
  std::vector<Result1<std::uint8_t>> columns;
  Result1<std::int32_t> mark_offsets;
  Result1<std::int64_t> streams;
  Result1<std::uint64_t> sequences;
  Result1<std::int64_t> pending_offsets;
  Result1<std::uint8_t> pending;
  Result1<std::int64_t> removed_offsets;
  Result1<std::uint64_t> removed;
  std::uint32_t removed_since;
  Result1<std::int64_t> place_offsets;
  Result1<std::uint8_t> places;
};

Columns snapshot(const Table& table, std::uint32_t first, std::uint32_t count, std::uint32_t since,
                 std::uint32_t removed_since, const std::vector<std::size_t>& widths, bool stay) {
  BucketColumns found;
  {
    nb::gil_scoped_release release;
    found = snapshot_columns(table, first, count, since, removed_since, widths, stay);
  }
  Columns columns{.num_rows = result(std::move(found.num_rows)),
                  .keys = bind::result(std::move(found.keys)),
                  .classes = bind::result(std::move(found.classes)),
                  .columns = {},
                  .mark_offsets = result(std::move(found.mark_offsets)),
                  .streams = result(std::move(found.streams)),
                  .sequences = result(std::move(found.sequences)),
                  .pending_offsets = result(std::move(found.pending_offsets)),
                  .pending = result(std::move(found.pending)),
                  .removed_offsets = result(std::move(found.removed_offsets)),
                  .removed = result(std::move(found.removed)),
                  .removed_since = found.removed_since,
                  .place_offsets = result(std::move(found.place_offsets)),
                  .places = result(std::move(found.places))};
  for (Array<std::uint8_t>& column : found.columns) {
    columns.columns.push_back(bind::result(std::move(column)));
  }
  return columns;
}

void restore(Table& table, Array1<const std::uint16_t> buckets,
             Array1<const std::uint32_t> num_rows, Array1<const bool> wanted,
             Array1<const std::uint64_t> keys, Array1<const std::uint8_t> classes,
             const std::vector<Array1<const std::uint8_t>>& columns,
             const std::vector<std::size_t>& widths, Array1<const std::int32_t> mark_offsets,
             Array1<const std::int64_t> streams, Array1<const std::uint64_t> sequences,
             Array1<const std::int64_t> removed_offsets, Array1<const std::uint64_t> removed,
             Array1<const std::int64_t> pending_offsets, Array1<const std::uint8_t> pending,
             std::uint32_t removed_at, std::uint32_t removed_since, bool apply,
             Array1<const std::int64_t> place_offsets, Array1<const std::uint8_t> places,
             const std::vector<Tier::Claim*>& claims) {
  std::vector<std::span<const std::uint8_t>> cells;
  for (const auto& column : columns) cells.push_back(as_span(column));
  nb::gil_scoped_release release;
  restore_columns(table,
                  {.buckets = as_span(buckets),
                   .num_rows = as_span(num_rows),
                   .wanted = as_span(wanted),
                   .keys = as_span(keys),
                   .classes = as_span(classes),
                   .columns = cells,
                   .widths = widths,
                   .mark_offsets = as_span(mark_offsets),
                   .streams = as_span(streams),
                   .sequences = as_span(sequences),
                   .removed_offsets = as_span(removed_offsets),
                   .removed = as_span(removed),
                   .pending_offsets = as_span(pending_offsets),
                   .pending = as_span(pending),
                   .place_offsets = as_span(place_offsets),
                   .places = as_span(places),
                   .removed_at = removed_at,
                   .removed_since = removed_since},
                  apply, claims);
}

// A property that returns an array, which owns its memory.
template <class T>
auto part(T Columns::* array) {
  return [array](const Columns& columns) { return columns.*array; };
}

}  // namespace

void register_bucket_columns(nb::module_& m) {
  constexpr auto kShared = nb::rv_policy::automatic;
  nb::class_<Columns>(m, "BucketColumns",
                      "The n rows of m consecutive buckets, as columns. Entry i of an offsets "
                      "array is where bucket i begins; the last entry is the end.")
      .def_prop_ro("num_rows", part(&Columns::num_rows), kShared, "Rows per bucket: (m,) uint32.")
      .def_prop_ro("keys", part(&Columns::keys), kShared, "(n,) uint64.")
      .def_prop_ro("classes", part(&Columns::classes), kShared, "Row classes: (n,) uint8.")
      .def_prop_ro("columns", part(&Columns::columns), kShared,
                   "List of the columns' bytes: (n * width,) uint8 each.")
      .def_prop_ro("mark_offsets", part(&Columns::mark_offsets), kShared,
                   "Offsets in streams and sequences: (m + 1,) int32.")
      .def_prop_ro("streams", part(&Columns::streams), kShared, "Streams of the marks: int64.")
      .def_prop_ro("sequences", part(&Columns::sequences), kShared,
                   "Sequences of the marks: uint64.")
      .def_prop_ro("pending_offsets", part(&Columns::pending_offsets), kShared,
                   "Offsets in pending: (m + 1,) int64.")
      .def_prop_ro("pending", part(&Columns::pending), kShared,
                   "Opaque bytes: the admission counts of keys without a row: uint8.")
      .def_prop_ro("removed_offsets", part(&Columns::removed_offsets), kShared,
                   "Offsets in removed: (m + 1,) int64.")
      .def_prop_ro("removed", part(&Columns::removed), kShared, "Removed keys: uint64.")
      .def_ro("removed_since", &Columns::removed_since,
              "The removed keys of all buckets are known since this version.")
      .def_prop_ro("place_offsets", part(&Columns::place_offsets), kShared,
                   "Offsets in places: (m + 1,) int64.")
      .def_prop_ro("places", part(&Columns::places), kShared,
                   "Opaque bytes: where the rows are that stay on SSD: uint8.");
  m.def(
      "snapshot_columns", &snapshot, "table"_a, "first"_a, "count"_a, "since"_a, "removed_since"_a,
      "widths"_a, "stay"_a = false,
      R"(Return buckets first to first + count - 1 as columns. Each bucket is copied at one moment.

since: see Table.snapshot. removed_since: list the keys removed after this version; 0: none. If
since is 0, those that were forgotten may be missing: see the result's removed_since.
widths: bytes of each column; their sum is Table.row_bytes.
stay: all rows that are in memory, and the places of those on SSD; `since` has no meaning.
Raises BadRequest, ResourceExhausted.)");
  m.def("restore_columns", &restore, "table"_a, nb::kw_only(), "buckets"_a.noconvert(),
        "num_rows"_a.noconvert(), "wanted"_a.noconvert(), "keys"_a.noconvert(),
        "classes"_a.noconvert(), "columns"_a, "widths"_a, "mark_offsets"_a.noconvert(),
        "streams"_a.noconvert(), "sequences"_a.noconvert(), "removed_offsets"_a.noconvert(),
        "removed"_a.noconvert(), "pending_offsets"_a.noconvert(), "pending"_a.noconvert(),
        "removed_at"_a, "removed_since"_a, "apply"_a, "place_offsets"_a.noconvert(),
        "places"_a.noconvert(), "claims"_a = nb::make_tuple(),
        R"(Call Table.restore, or Table.apply if `apply`, for each wanted bucket.

buckets: (m,) uint16. num_rows: (m,) uint32. wanted: (m,) bool.
The other arrays are those of BucketColumns; mark_offsets may be empty: no marks.
removed: if `apply`, the keys to remove. Otherwise the keys removed with a version in
(removed_since, removed_at], which later snapshots list.
place_offsets, places: of BucketColumns, where other rows are on SSD; empty: there are none.
claims: of all keys, if `apply`, see Table.claim; else of Table.claim_buckets.
Raises what Table.restore raises. Corruption: not such places. The buckets before the refused one are already replaced.)");
}

}  // namespace trireme::bind
