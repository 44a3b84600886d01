// Rows outside of a table: wide rows in and out, and those of a block.
#include "table/block.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "table.h"
#include "table/slot_index.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

using Slots = Array1<const std::int32_t>;
using Floats2 = Array2<float>;

// Keys, row classes, wide rows.
using WidePart = std::tuple<Keys, Array1<const std::uint8_t>, Array2<const std::uint8_t>>;

Table::WidePart part_of(const char* who, const Table& table, const WidePart& part) {
  const auto& [keys, row_classes, rows] = part;
  expect(who, "one class per key:", row_classes.size(), keys.size());
  expect(who, "as many rows as keys:", rows.shape(0), keys.size());
  expect(who, "rows of bytes", rows.shape(1), table.row_bytes());
  return {.keys = as_span(keys), .classes = as_span(row_classes), .rows = rows.data()};
}

void write_parts(Table& table, const std::vector<WidePart>& parts, Pool& pool, bool is_stamped) {
  std::vector<Table::WidePart> spans;
  for (const WidePart& part : parts) spans.push_back(part_of("write_wide", table, part));
  nb::gil_scoped_release release;
  table.write_wide(spans, pool, is_stamped);
}

void write_wide(Table& table, Keys keys, Array1<const std::uint8_t> row_classes,
                Array2<const std::uint8_t> rows, Pool& pool, bool is_stamped) {
  write_parts(table, {{keys, row_classes, rows}}, pool, is_stamped);
}

void merge(Table& table, const Table& other, std::uint32_t first_bucket, std::uint32_t num_buckets,
           Pool& pool, const std::vector<Tier::Claim*>& claims) {
  nb::gil_scoped_release release;
  table.merge(other, first_bucket, num_buckets, pool, claims);
}

void check_wide(const Table& table, Keys keys, Array1<const std::uint8_t> row_classes,
                Array2<const std::uint8_t> rows, Pool& pool) {
  const Table::WidePart part = part_of("check_wide", table, {keys, row_classes, rows});
  nb::gil_scoped_release release;
  table.check_wide(part, pool);
}

const RowLayout& layout_of(const char* who, const Table& table, int row_class) {
  if (row_class < 0 || row_class >= table.classes().num_dims() ||
      table.classes()[row_class].dtype() != Dtype::kFloat32) {
    throw Error(ErrorCode::kBadRequest, std::string("Table.") + who +
                                            ": expected a row class of float32 weights, found " +
                                            std::to_string(row_class));
  }
  return table.classes()[row_class];
}

// The parts of a block: weights, state, stamps, shows, delta_scores, features. Rows may lie apart.
template <class T, std::size_t kDims>
using Part = nb::ndarray<T, nb::ndim<kDims>, nb::device::cpu>;
using Parts = std::tuple<Part<float, 2>, Part<float, 2>, Part<std::int32_t, 2>, Part<double, 2>,
                         Part<float, 1>, Part<std::int32_t, 1>>;

// T: what an element of all columns is.
template <class T, class Array>
BlockPart<T> part_of(const char* who, const Array& array) {
  const bool has_columns = array.ndim() == 2;
  const std::int64_t num_columns = has_columns ? static_cast<std::int64_t>(array.shape(1)) : 1;
  const std::int64_t step = array.stride(0);
  if (array.size() > 0 &&
      ((num_columns > 1 && array.stride(1) != 1) || (array.shape(0) > 1 && step < num_columns))) {
    throw Error(ErrorCode::kBadRequest, std::string("Table.") + who +
                                            ": expected rows that are contiguous and apart, found"
                                            " others in a part of the block");
  }
  return {.data = reinterpret_cast<T*>(array.data()),
          .step = static_cast<std::size_t>(step) * sizeof(*array.data())};
}

BlockRows rows_of(const char* who, const RowLayout& layout, const Parts& parts) {
  const auto& [weights, state, stamps, shows, delta_scores, features] = parts;
  const std::size_t num_rows = weights.shape(0);
  const std::size_t num_scored = layout.is_scored() ? num_rows : 0;
  expect(who, "weights of dim", weights.shape(1), static_cast<std::size_t>(layout.dim()));
  expect(who, "rows of state:", state.shape(0), num_rows);
  expect(who, "floats of state:", state.shape(1), static_cast<std::size_t>(layout.state_floats()));
  expect(who, "stamps:", stamps.shape(0), num_rows);
  expect(who, "numbers of a stamp:", stamps.shape(1), 2);
  expect(who, "shows:", shows.shape(0), num_scored);
  expect(who, "numbers of shows:", shows.shape(1), 2);
  expect(who, "delta scores:", delta_scores.size(), num_scored);
  expect(who, "features:", features.size(), num_scored);
  const bool is_scored = layout.is_scored();
  return {
      .num_rows = num_rows,
      .weights = part_of<float>(who, weights),
      .state = part_of<float>(who, state),
      .stamps = part_of<Stamp>(who, stamps),
      .shows = is_scored ? part_of<ShowClick>(who, shows) : BlockPart<ShowClick>(),
      .delta_scores = is_scored ? part_of<float>(who, delta_scores) : BlockPart<float>(),
      .features = is_scored ? part_of<std::uint32_t>(who, features) : BlockPart<std::uint32_t>()};
}

void split_rows(const Table& table, Array2<const std::uint8_t> wide, const Parts& block,
                Slots slots, Pool& pool, int row_class) {
  const RowLayout& layout = layout_of("split_wide", table, row_class);
  expect("split_wide", "as many rows as slots:", wide.shape(0), slots.size());
  expect("split_wide", "rows of bytes", wide.shape(1), table.row_bytes());
  const BlockRows rows = rows_of("split_wide", layout, block);
  nb::gil_scoped_release release;
  split_wide(layout, wide.data(), as_span(slots), rows, pool);
}

void join_rows(const Table& table, const Parts& block, Slots slots, Array2<std::uint8_t> out,
               Pool& pool, int row_class) {
  const RowLayout& layout = layout_of("join_wide", table, row_class);
  expect("join_wide", "as many rows as slots:", out.shape(0), slots.size());
  expect("join_wide", "rows of bytes", out.shape(1), table.row_bytes());
  const BlockRows rows = rows_of("join_wide", layout, block);
  nb::gil_scoped_release release;
  join_wide(layout, rows, as_span(slots), out.data(), pool);
}

void weights_of(const Table& table, const Parts& block, Slots slots, Floats2 out, Pool& pool,
                int row_class) {
  const RowLayout& layout = layout_of("block_weights", table, row_class);
  expect("block_weights", "as many rows as slots:", out.shape(0), slots.size());
  expect("block_weights", "rows of dim", out.shape(1), static_cast<std::size_t>(layout.dim()));
  const BlockRows rows = rows_of("block_weights", layout, block);
  nb::gil_scoped_release release;
  block_weights(layout, rows, as_span(slots), out.data(), pool);
}

void update(const Table& table, const Parts& block, Slots slots, Array2<const float> grads,
            const RuleValues& values, Pool& pool, int row_class, std::uint32_t time,
            std::uint32_t version, const std::optional<Array2<const float>>& show_click,
            const std::optional<Array1<const std::int32_t>>& features) {
  const RowLayout& layout = layout_of("update_block", table, row_class);
  expect("update_block", "as many gradients as slots:", grads.shape(0), slots.size());
  expect("update_block", "gradients of dim", grads.shape(1),
         static_cast<std::size_t>(layout.dim()));
  expect("update_block", "0 or 1 columns of shows, as the table is scored:", show_click ? 1 : 0,
         layout.is_scored() ? 1 : 0);
  const BlockRows rows = rows_of("update_block", layout, block);
  StatisticsPush push{.rates = table.score_rates(),
                      .version = version,
                      .time = time,
                      .show_click = nullptr,
                      .features = nullptr};
  if (show_click) {
    expect("update_block", "a show and a click per slot: columns", show_click->shape(1), 2);
    expect("update_block", "a show and a click per slot: rows", show_click->shape(0), slots.size());
    push.show_click = show_click->data();
  }
  if (features) {
    expect("update_block", "one feature per slot:", features->size(), slots.size());
    push.features = reinterpret_cast<const std::uint32_t*>(features->data());
  }
  nb::gil_scoped_release release;
  const auto step = table.make_step(values, row_class);
  update_block(layout, rows, as_span(slots), grads.data(), *step, push, pool);
}

void register_slots(nb::module_& m) {
  nb::class_<SlotIndex>(m, "SlotIndex",
                        "Which slot of a block the row of each key has. Any threads may find; "
                        "assign and remove run alone.")
      .def(
          "__init__",
          [](SlotIndex* self, Array1<std::uint64_t> keys, Pool& pool) {
            new (self) SlotIndex({keys.data(), keys.size()}, pool);
          },
          "keys"_a.noconvert(), "pool"_a, nb::keep_alive<1, 2>(),
          "keys: (num_slots,) uint64, memory in which the index keeps the key of each slot.")
      .def_prop_ro("num_keys", &SlotIndex::num_keys, "Keys that have a slot.")
      .def(
          "assign",
          [](SlotIndex& index, Keys keys, const std::optional<Slots>& slots, Pool& pool) {
            nb::gil_scoped_release release;
            slots ? index.assign(as_span(keys), as_span(*slots), pool)
                  : index.assign(as_span(keys), pool);
          },
          "keys"_a.noconvert(), "slots"_a.noconvert().none(), "pool"_a,
          R"(Give keys slots that no key has.

keys: (n,) uint64. slots: (n,) int32; None: key i gets slot i. Raises BadRequest: a slot that there
is not, nothing changed; a key that has a slot, some of the others have theirs.)")
      .def(
          "remove",
          [](SlotIndex& index, Keys keys) {
            nb::gil_scoped_release release;
            index.remove(as_span(keys));
          },
          "keys"_a.noconvert(), "Forget keys, (n,) uint64; those without a slot are ignored.")
      .def(
          "find",
          [](const SlotIndex& index, Keys keys, Array1<std::int32_t> out, Pool& pool) {
            expect("find", "one slot per key:", out.size(), keys.size());
            nb::gil_scoped_release release;
            index.find(as_span(keys), out.data(), pool);
          },
          "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
          "Write the slot of each key, -1 if it has none. keys: (n,) uint64. out: (n,) int32.");
}

}  // namespace

void register_block(nb::module_& m, nb::class_<Table>& table) {
  register_slots(m);
  table
      .def("check_wide", &check_wide, "keys"_a.noconvert(), "row_classes"_a.noconvert(),
           "rows"_a.noconvert(), "pool"_a,
           "Raise the BadRequest that write_wide would raise for these rows, if any.")
      .def("merge", &merge, "other"_a, "first_bucket"_a, "num_buckets"_a, "pool"_a,
           "claims"_a = nb::make_tuple(),
           R"(Insert or replace all rows of some buckets of another table, as write_wide, stamped.

claims: that together have all keys; see `update`.
Raises BadRequest: the table itself, or one with rows of another form.)")
      .def(
          "copy", &Table::copy, "other"_a, "first_bucket"_a, "num_buckets"_a, "pool"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          R"(Replace some buckets, with their marks, removals and pending counts, by those of another table.

Raises BadRequest: the table itself, or one with rows of another form. ResourceExhausted: a
repetition finishes the call.)")
      .def(
          "write_wide", &write_wide, "keys"_a.noconvert(), "row_classes"_a.noconvert(),
          "rows"_a.noconvert(), "pool"_a, "is_stamped"_a = false,
          R"(Insert or replace the wide rows of keys. Of a key that occurs twice the last one stays, if both are
of one class.

keys: (N,) uint64. row_classes: (N,) uint8. rows: (N, row_bytes) uint8. is_stamped: as changes are,
with the table's version in place of their own. Marks, removals and pending counts stay.
Raises BadRequest for a class or row that does not fit, and nothing has changed; or
ResourceExhausted, and a repetition finishes the call.)")
      .def("write_wide_parts", &write_parts, "parts"_a.noconvert(), "pool"_a,
           "is_stamped"_a = false,
           "write_wide of several parts, each its arguments (keys, row_classes, rows).")
      .def("split_wide", &split_rows, "rows"_a.noconvert(), "block"_a.noconvert(),
           "slots"_a.noconvert(), "pool"_a, "row_class"_a,
           R"(Write wide rows, (n, row_bytes) uint8, to slots of a block.

block: (U, D) and (U, S) float32 weights and state, (U, 2) int32 stamps; of a scored table (U, 2)
float64 shows, (U,) float32 delta scores, (U,) int32 features, else of length 0; in the next three
too. Their rows may lie apart, as in an array of wide rows. slots: (n,) int32, distinct. Of
row_class of the table, whose own rows do not matter.
Raises BadRequest: another slot or shape, or rows of a wider class; nothing has changed.)")
      .def("join_wide", &join_rows, "block"_a.noconvert(), "slots"_a.noconvert(),
           "out"_a.noconvert(), "pool"_a, "row_class"_a,
           "Write the rows of slots as wide rows, (n, row_bytes) uint8. See split_wide.")
      .def("block_weights", &weights_of, "block"_a.noconvert(), "slots"_a.noconvert(),
           "out"_a.noconvert(), "pool"_a, "row_class"_a,
           "Write the weights of slots, (n, D) float32, which may be equal. See split_wide.")
      .def("update_block", &update, "block"_a.noconvert(), "slots"_a.noconvert(),
           "grads"_a.noconvert(), "values"_a, "pool"_a, "row_class"_a, nb::kw_only(), "time"_a,
           "version"_a, "show_click"_a.noconvert(), "features"_a.noconvert(),
           R"(Apply a step of the rule to the rows of slots, and count it in their statistics.

grads: (n, D) float32. show_click: (n, 2) float32, or None where the table is not scored. features:
(n,) int32, bits of uint32, or None. See split_wide, and update for the others.)");
}

}  // namespace trireme::bind
