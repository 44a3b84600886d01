// Tables: lookup, update, life of rows.
#include "table.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/array.h"
#include "base/error.h"
#include "base/isa.h"
#include "table/table.h"

namespace trireme::bind {

void expect(const char* who, const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kBadRequest, std::string("Table.") + who + ": expected " + what + " " +
                                          std::to_string(expected) + ", found " +
                                          std::to_string(found));
}

namespace {

using namespace nb::literals;

using Ids = std::vector<std::pair<std::int64_t, std::int64_t>>;

template <class T>
void expect_rows(const char* who, const Table& table, const Keys& keys, const Array2<T>& rows,
                 int row_class) {
  expect(who, "as many rows as keys:", rows.shape(0), keys.size());
  if (row_class < 0 || row_class >= table.classes().num_dims()) return;  // the table refuses it
  expect(who, "rows of dim", rows.shape(1),
         static_cast<std::size_t>(table.classes()[row_class].dim()));
}

std::vector<PushId> push_ids(const Ids& ids) {
  std::vector<PushId> pushes;
  for (const auto& [stream, sequence] : ids)
    pushes.push_back({.stream = stream, .sequence = sequence});
  return pushes;
}

void init_table(Table* self, std::vector<int> dims, std::string dtype, std::string rule,
                bool shared, std::string bias_correction, float initial_accumulator, bool nesterov,
                std::string initializer, float init_a, float init_b, std::uint64_t seed,
                std::string absent, int num_streams_max, std::string simd,
                const PolicyConfig& policy, const AdmissionConfig& admission,
                std::vector<std::shared_ptr<ssd::Device>> ssd, std::size_t memory_bytes,
                std::uint32_t number, std::size_t segment_bytes, std::size_t buffer_bytes,
                std::size_t read_bytes, int timeout_ms) {
  nb::gil_scoped_release release;
  new (self) Table({.dims = std::move(dims),
                    .dtype = std::move(dtype),
                    .rule = {.name = std::move(rule),
                             .shared = shared,
                             .bias_correction = std::move(bias_correction),
                             .initial_accumulator = initial_accumulator,
                             .nesterov = nesterov},
                    .initializer = std::move(initializer),
                    .init_a = init_a,
                    .init_b = init_b,
                    .seed = seed,
                    .absent = std::move(absent),
                    .policy = policy,
                    .admission = admission,
                    .num_streams_max = num_streams_max,
                    .tier = {.devices = std::move(ssd),
                             .memory_bytes = memory_bytes,
                             .number = number,
                             .segment_bytes = segment_bytes,
                             .buffer_bytes = buffer_bytes,
                             .read_bytes = read_bytes,
                             .timeout = std::chrono::milliseconds(timeout_ms)},
                    .simd = std::move(simd)});
}

std::vector<int> dims_of(const Table& table) {
  std::vector<int> dims;
  for (const RowLayout& layout : table.classes().layouts()) dims.push_back(layout.dim());
  return dims;
}

std::optional<int> head_class(const Table& table) {
  const int head = table.classes().head();
  return head >= 0 ? std::optional(head) : std::nullopt;
}

std::size_t lookup(const Table& table, Keys keys, Array2<float> out, Pool& pool, int row_class) {
  expect_rows("lookup", table, keys, out, row_class);
  nb::gil_scoped_release release;
  return table.lookup(as_span(keys), out.data(), pool, row_class);
}

// Gradients of keys of class 0, or of each class.
using Grads = std::variant<Array2<const float>, std::vector<Array2<const float>>>;

std::vector<Table::Gradients> gradients_of(const Table& table, const Keys& keys,
                                           const Grads& grads) {
  std::span<const Array2<const float>> of_classes;
  if (const auto* all = std::get_if<0>(&grads)) {
    of_classes = {all, 1};
  } else {
    of_classes = std::get<1>(grads);
  }
  std::vector<Table::Gradients> parts;
  std::size_t num_keys = 0;
  for (const Array2<const float>& rows : of_classes) {
    const auto row_class = static_cast<int>(parts.size());
    if (row_class < table.classes().num_dims()) {  // else the table refuses it
      expect("update", "rows of dim", rows.shape(1),
             static_cast<std::size_t>(table.classes()[row_class].dim()));
    }
    parts.push_back({.rows = rows.data(), .num_keys = rows.shape(0)});
    num_keys += rows.shape(0);
  }
  expect("update", "as many rows as keys:", num_keys, keys.size());
  return parts;
}

Change change_of(const std::string& name) {
  if (name == "rule") return Change::kRule;
  if (name == "add") return Change::kAdd;
  if (name == "assign") return Change::kAssign;
  throw Error(ErrorCode::kBadRequest,
              "Table.update: expected change rule, add or assign, found " + name);
}

std::size_t update(Table& table, Keys keys, const Grads& grads, const Ids& ids,
                   const RuleValues& values, Pool& pool, std::uint32_t time, std::uint32_t version,
                   const std::optional<Array2<const float>>& show_click,
                   const std::optional<Array1<const std::uint32_t>>& features,
                   const std::optional<Array1<const std::uint32_t>>& counts,
                   const std::string& change_name, const std::vector<Tier::Claim*>& claims) {
  const Change change = change_of(change_name);
  const std::vector<Table::Gradients> parts = gradients_of(table, keys, grads);
  PushColumns columns{.time = time, .version = version};
  if (show_click) {
    expect("update", "a show and a click per key: columns", show_click->shape(1), 2);
    expect("update", "a show and a click per key: rows", show_click->shape(0), keys.size());
    columns.show_click = show_click->data();
  }
  if (features) {
    expect("update", "one feature per key:", features->size(), keys.size());
    columns.features = features->data();
  }
  if (counts) {
    expect("update", "one count per key:", counts->size(), keys.size());
    columns.counts = counts->data();
  }
  const std::vector<PushId> pushes = push_ids(ids);
  nb::gil_scoped_release release;
  return table.update(as_span(keys), parts, pushes, values, pool, columns, change, claims);
}

void advance(Table& table, const Ids& ids) {
  const std::vector<PushId> pushes = push_ids(ids);
  nb::gil_scoped_release release;
  table.advance(pushes);
}

void check_shrink(Table& table, const Array1<const std::uint32_t>& buckets) {
  nb::gil_scoped_release release;
  table.check_shrink({buckets.data(), buckets.size()});
}

nb::tuple shrink(Table& table, std::uint32_t bucket, std::uint32_t time, bool day_over,
                 std::uint32_t version) {
  Table::Shrunk shrunk;
  {
    nb::gil_scoped_release release;
    shrunk = table.shrink(bucket, {.time = time, .day_over = day_over}, version);
  }
  return nb::make_tuple(shrunk.num_expired, shrunk.num_evicted);
}

std::map<std::string, std::uint64_t> counters(const Table& table) {
  const Counters counters = table.counters();
  return {{"admitted", counters.admitted},
          {"rejected", counters.rejected},
          {"expired", counters.expired},
          {"evicted", counters.evicted}};
}

void statistics(const Table& table, Keys keys, Array2<double> out, std::uint32_t time,
                bool day_over, Pool& pool) {
  expect("statistics", "a show and a click per key: columns", out.shape(1), 2);
  expect("statistics", "a show and a click per key: rows", out.shape(0), keys.size());
  nb::gil_scoped_release release;
  table.statistics(as_span(keys), out.data(), {.time = time, .day_over = day_over}, pool);
}

std::size_t settle(Table& table, Keys keys, Array1<const float> delta_scores,
                   const std::vector<Tier::Claim*>& claims) {
  expect("settle", "one delta score per key:", delta_scores.size(), keys.size());
  nb::gil_scoped_release release;
  return table.settle(as_span(keys), delta_scores.data(), claims);
}

std::size_t erase(Table& table, Keys keys, Pool& pool, const std::vector<Tier::Claim*>& claims) {
  nb::gil_scoped_release release;
  return table.erase(as_span(keys), pool, claims);
}

void contains(const Table& table, Keys keys, Array1<bool> out, Pool& pool) {
  expect("contains", "one answer per key:", out.size(), keys.size());
  nb::gil_scoped_release release;
  table.contains(as_span(keys), out.data(), pool);
}

void read_wide(const Table& table, Keys keys, Array1<std::uint8_t> row_classes,
               Array2<std::uint8_t> out, Pool& pool) {
  expect("read_wide", "one class per key:", row_classes.size(), keys.size());
  expect("read_wide", "as many rows as keys:", out.shape(0), keys.size());
  expect("read_wide", "rows of bytes", out.shape(1), table.row_bytes());
  nb::gil_scoped_release release;
  table.read_wide(as_span(keys), row_classes.data(), out.data(), pool);
}

}  // namespace

void register_table(nb::module_& m) {
  register_claim(m);
  register_rule_values(m);
  register_policies(m);
  nb::class_<Table> table(
      m, "Table", nb::is_weak_referenceable(),
      "Rows of weights, state and statistics by 64-bit key, in memory. Any thread "
      "may call any function at any time.");
  table
      .def("__init__", &init_table, nb::kw_only(), "dims"_a, "dtype"_a = "float32", "rule"_a,
           "shared"_a = false, "bias_correction"_a = "global", "initial_accumulator"_a = 0.0F,
           "nesterov"_a = false, "initializer"_a = "uniform", "init_a"_a, "init_b"_a, "seed"_a,
           "absent"_a = "initial", "num_streams_max"_a = 1024, "simd"_a = "auto",
           "policy"_a = PolicyConfig(), "admission"_a = AdmissionConfig(),
           "ssd"_a = std::vector<std::shared_ptr<ssd::Device>>(), "memory_bytes"_a = 0,
           "number"_a = 0, "segment_bytes"_a = std::size_t{64} << 20,
           "buffer_bytes"_a = std::size_t{1} << 20, "read_bytes"_a = std::size_t{16} << 20,
           "timeout_ms"_a = 30000,
           R"(dims: weights of a row, per row class.

dtype: of the weights, float32, bfloat16 or float16. State is always float32. 16-bit weights are
rounded stochastically; (seed, key, stream, sequence, element) determines the rounding.
rule: sgd, momentum, adagrad, adam, ftrl, count, fleet_sgd, fleet_adagrad, fleet_adagrad_v2,
fleet_adam or fleet_shared_adam.
shared: one state for the row instead of one per weight (adagrad, adam, fleet_adagrad).
bias_correction: of adam, global or row. initial_accumulator: of adagrad. nesterov: of momentum.
initializer: uniform in [init_a, init_b); normal with mean init_a and standard deviation init_b; or
constant init_a, with init_b 0.
seed: the initial weights of a key depend on it and the key alone.
absent: what a lookup writes for an absent key, initial (weights) or zeros.
num_streams_max: streams are numbered from 0 to num_streams_max - 1.
simd: auto, scalar, avx2 or avx512. All give the same bits.
policy: how long rows live. admission: which keys get a row.
ssd: devices for rows that are used seldom; none: all rows are in memory. The others are for such a
table: memory_bytes that it takes at most; its number, which its pages have; bytes of a file on the
devices, and of what is written at once; how long to wait for a device.
Raises BadRequest, naming the value.)")
      .def_prop_ro(
          "dim", [](const Table& t) { return t.classes()[0].dim(); },
          "Weights of a row of row class 0.")
      .def_prop_ro("dims", &dims_of,
                   "Weights of a row, per row class. The class of the heads is the last.")
      .def_prop_ro(
          "class_bytes", [](const Table& t) { return t.classes().row_bytes(); },
          "Bytes of a row in memory without the index, per row class.")
      .def_prop_ro("head_class", &head_class,
                   "The class of the rows that are only a head; None if the table has no heads.")
      .def_prop_ro("state_floats", &Table::state_floats, "Floats of state of a wide row.")
      .def_prop_ro("state_planes", &Table::state_planes,
                   "Planes at the beginning of the state: one float per weight each. The rest of "
                   "the state belongs to the row as a whole.")
      .def_prop_ro("state_counts", &Table::state_counts,
                   "How many of the last floats of state are 32-bit counts of the row's updates.")
      .def_prop_ro("is_scored", &Table::is_scored, "Whether rows count shows and clicks.")
      .def_prop_ro("row_bytes", &Table::row_bytes,
                   "Bytes of a wide row: weights, state, statistics.")
      .def_prop_ro("version", &Table::version, "The version that changes are stamped with.")
      .def_prop_ro("num_changes", &Table::num_changes,
                   "A count that rises whenever rows may have changed, or may be about to.")
      .def_prop_ro("removed_known_since", &Table::removed_known_since,
                   nb::call_guard<nb::gil_scoped_release>(),
                   "The lowest version since which the removed keys of every bucket are known.")
      .def("raise_version", &Table::raise_version, "version"_a,
           "Stamp all later changes with at least this version.")
      .def_prop_ro("counters", &counters,
                   "Numbers of keys admitted, rejected, expired and evicted since construction.")
      .def_prop_ro("rows", &Table::num_rows, nb::call_guard<nb::gil_scoped_release>(),
                   "Number of rows.")
      .def_prop_ro("bytes", &Table::bytes, nb::call_guard<nb::gil_scoped_release>(),
                   "Bytes of memory taken from the system.")
      .def_prop_ro(
          "simd", [](const Table& t) { return std::string(isa_name(t.isa())); },
          "The instruction set in use.")
      .def("lookup", &lookup, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "row_class"_a = 0,
           R"(Write the weights of each key and return how many keys are absent. Changes nothing.

keys: (N,) uint64, duplicates allowed. out: (N, D) float32, where D is the dim of row_class.
A row of a narrower class is padded with zeros, a row of a wider class is cut.
Raises BadRequest for another shape.)")
      .def("update", &update, "keys"_a.noconvert(), "grads"_a.noconvert(), "ids"_a, "values"_a,
           "pool"_a, nb::kw_only(), "time"_a = 0, "version"_a = 0,
           "show_click"_a.noconvert() = nb::none(), "features"_a.noconvert() = nb::none(),
           "counts"_a.noconvert() = nb::none(), "change"_a = "rule", "claims"_a = nb::make_tuple(),
           R"(Apply one step of the rule to each key and raise the marks of all buckets to `ids`.

Absent keys that are admitted get a row first. Keys that are not admitted are skipped, and so are
keys of buckets that already have one of `ids`. Returns the number of keys applied.

keys: (K,) uint64, distinct, those of row class 0 first, then those of class 1, and so on. The rule
is applied twice to a key that occurs twice, in order.
grads: (K, D) float32 if all keys are of class 0, or a list of such an array per row class.
ids: [(stream, sequence >= 1)], the pushes whose sum the gradients are.
values: the numbers of the step.
time: data time in seconds, 0 if the data has none.
version: the table's version is raised to it.
show_click: (K, 2) float32, for scored tables only.
features: (K,) uint32, for scored tables only.
counts: (K,) uint32, occurrences of each key for a count_filter; None for 1.
change: rule; or add: grads are added to the weights, then clipped to the bounds in values; or
assign: grads replace the weights. add and assign leave the state unchanged; the state of a new row
is the rule's initial state.
claims: that together have all keys; with them nothing waits for a device, or fails for want of room.
Raises BadRequest, and nothing has changed; or ResourceExhausted, and a repetition with the same ids
finishes the update.)")
      .def("advance", &advance, "ids"_a,
           "Raise the marks of every bucket to `ids`, as an update without keys.")
      .def("check_shrink", &check_shrink, "buckets"_a,
           R"(Whether there is room now to shrink these buckets, one after the other.

buckets: (N,) uint32. Raises ResourceExhausted: the rows on SSD of one find none in memory together;
Unavailable, DeadlineExceeded: a disk.)")
      .def("shrink", &shrink, "bucket"_a, "time"_a, "day_over"_a, "version"_a,
           nb::sig("def shrink(self, bucket: int, time: int, day_over: bool, version: int) -> "
                   "tuple[int, int]"),
           R"(Remove the expired rows of a bucket, and rows beyond its limit.

time: data time in seconds. day_over: the day has ended, so statistics decay by one more day.
version: stamps the removals.
Returns (number expired, number evicted).)")
      .def("forget_removed", &Table::forget_removed, "version"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Forget which keys were removed with this version or an earlier one.")
      .def("statistics", &statistics, "keys"_a.noconvert(), "out"_a.noconvert(), "time"_a,
           "day_over"_a, "pool"_a,
           R"(Write the show and click of each key at a data time, 0 for absent keys.

keys: (N,) uint64. out: (N, 2) float64. time, day_over: see `shrink`.
Raises BadRequest if the table is not scored.)")
      .def("settle", &settle, "keys"_a.noconvert(), "delta_scores"_a.noconvert(),
           "claims"_a = nb::make_tuple(),
           R"(Subtract the amounts that an export has consumed from the delta scores of rows.

keys: (N,) uint64, fastest in the order of buckets. delta_scores: (N,) float32. claims: see `update`.
Returns for how many of the keys, the first, it has done so: fewer than N if a row on SSD cannot be
brought into memory; a call with the others raises why. Raises, nothing done: BadRequest if the
table is not scored; ResourceExhausted, Unavailable, DeadlineExceeded, Corruption: the first row.)")
      .def("erase", &erase, "keys"_a.noconvert(), "pool"_a, "claims"_a = nb::make_tuple(),
           R"(Remove rows, and counts of keys that have none yet; return how many rows existed.

keys: (N,) uint64. claims: see `update`. Raises ResourceExhausted, Unavailable, DeadlineExceeded,
Corruption: rows on SSD; a repetition removes the rest.)")
      .def("contains", &contains, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "Write whether each key has a row. keys: (N,) uint64. out: (N,) bool.")
      .def("read_wide", &read_wide, "keys"_a.noconvert(), "row_classes"_a.noconvert(),
           "out"_a.noconvert(), "pool"_a,
           R"(Write the row class and the wide row of each key; 255 and zeros where it has none.

keys: (N,) uint64. row_classes: (N,) uint8. out: (N, row_bytes) uint8.)");
  register_block(m, table);
  register_buckets(m, table);
  register_tier(m, table);
}

}  // namespace trireme::bind
