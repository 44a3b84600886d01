// Tables: lookup and update, life of rows.
#include "table.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
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
                const PolicyConfig& policy, const AdmissionConfig& admission) {
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
                   const std::string& change_name) {
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
  return table.update(as_span(keys), parts, pushes, values, pool, columns, change);
}

void advance(Table& table, const Ids& ids) {
  const std::vector<PushId> pushes = push_ids(ids);
  nb::gil_scoped_release release;
  table.advance(pushes);
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

void settle(Table& table, Keys keys, Array1<const float> delta_scores, Pool& pool) {
  expect("settle", "one delta score per key:", delta_scores.size(), keys.size());
  nb::gil_scoped_release release;
  table.settle(as_span(keys), delta_scores.data(), pool);
}

std::size_t erase(Table& table, Keys keys, Pool& pool) {
  nb::gil_scoped_release release;
  return table.erase(as_span(keys), pool);
}

void contains(const Table& table, Keys keys, Array1<bool> out, Pool& pool) {
  expect("contains", "one answer per key:", out.size(), keys.size());
  nb::gil_scoped_release release;
  table.contains(as_span(keys), out.data(), pool);
}

}  // namespace

void register_table(nb::module_& m) {
  register_rule_values(m);
  register_policies(m);
  nb::class_<Table> table(m, "Table",
                          "Rows of weights and state by 64-bit key. Any thread may call anything.");
  table
      .def("__init__", &init_table, nb::kw_only(), "dims"_a, "dtype"_a = "float32", "rule"_a,
           "shared"_a = false, "bias_correction"_a = "global", "initial_accumulator"_a = 0.0F,
           "nesterov"_a = false, "initializer"_a = "uniform", "init_a"_a, "init_b"_a, "seed"_a,
           "absent"_a = "initial", "num_streams_max"_a = 1024, "simd"_a = "auto",
           "policy"_a = PolicyConfig(), "admission"_a = AdmissionConfig(),
           "dims: weights of a row, per row class.\n"
           "dtype: of the weights, float32, bfloat16 or float16; state is float32. Weights of 16 "
           "bits "
           "are rounded stochastically, by (seed, key, stream, sequence, element).\n"
           "rule: sgd, momentum (nesterov), adagrad (shared: one accumulator per row; "
           "initial_accumulator), adam (shared; bias_correction: global or row), ftrl, count, "
           "fleet_sgd, fleet_adagrad (shared), fleet_adagrad_v2, fleet_adam or "
           "fleet_shared_adam.\n"
           "initializer: uniform in [init_a, init_b), normal (mean init_a, standard deviation "
           "init_b) or constant "
           "(init_a; init_b 0).\n"
           "absent: what a lookup answers for an absent key, initial (weights) or zeros.\n"
           "simd: auto, scalar, avx2 or avx512; the results are the same bits.\n"
           "policy: how long rows live; admission: which keys get one.\n"
           "Errors: BadRequest, naming the value.")
      .def_prop_ro(
          "dim", [](const Table& t) { return t.classes()[0].dim(); }, "Of row class 0.")
      .def_prop_ro("dims", &dims_of,
                   "Weights of a row, per row class; the heads' class is the last.")
      .def_prop_ro(
          "class_bytes", [](const Table& t) { return t.classes().row_bytes(); },
          "Bytes of a row in memory, without the index, per row class.")
      .def_prop_ro("head_class", &head_class, "The class of rows with a head alone; None: no row.")
      .def_prop_ro("state_floats", &Table::state_floats, "Of a wide row.")
      .def_prop_ro("state_planes", &Table::state_planes,
                   "Planes that state begins with: a float for every weight. What is left is of "
                   "the row.")
      .def_prop_ro("is_scored", &Table::is_scored, "Whether rows count shows and clicks.")
      .def_prop_ro("row_bytes", &Table::row_bytes,
                   "Bytes of a wide row: weights, state, statistics.")
      .def_prop_ro("version", &Table::version, "What changes are stamped with.")
      .def_prop_ro("removed_known_since", &Table::removed_known_since,
                   nb::call_guard<nb::gil_scoped_release>(),
                   "The lowest version since which the removed keys of every bucket are known.")
      .def("raise_version", &Table::raise_version, "version"_a,
           "Stamp every change from now on with this version, or a later one.")
      .def_prop_ro("counters", &counters,
                   "What has become of keys since the table was made: admitted, rejected, expired, "
                   "evicted.")
      .def_prop_ro("rows", &Table::num_rows, nb::call_guard<nb::gil_scoped_release>(),
                   "Number of rows.")
      .def_prop_ro("bytes", &Table::bytes, nb::call_guard<nb::gil_scoped_release>(),
                   "Bytes of memory taken from the system.")
      .def_prop_ro("simd", [](const Table& t) { return std::string(isa_name(t.isa())); })
      .def("lookup", &lookup, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "row_class"_a = 0,
           "Write the weights of each key and return how many were absent. Changes nothing.\n"
           "keys: (N,) uint64, duplicates allowed; out: (N, D) float32, D the dim of the class: of "
           "rows of another class the first D weights, zeros behind those they have.")
      .def("update", &update, "keys"_a.noconvert(), "grads"_a.noconvert(), "ids"_a, "values"_a,
           "pool"_a, nb::kw_only(), "time"_a = 0, "version"_a = 0,
           "show_click"_a.noconvert() = nb::none(), "features"_a.noconvert() = nb::none(),
           "counts"_a.noconvert() = nb::none(), "change"_a = "rule",
           "Apply one step of the rule to each key, making rows that are absent and admitted, and "
           "raise all marks to `ids`.\n"
           "keys: (K,) uint64, distinct (a key that occurs twice has the rule applied twice, in "
           "order), those of each row class in turn; grads: (K, D) float32, all of class 0, or a "
           "list "
           "of such an array for each class; ids: [(stream, sequence >= 1)], the pushes that the "
           "gradients are the "
           "sum of.\n"
           "time: data time in seconds, 0 if the data has none; version: the table's is raised to "
           "it; show_click: (K, 2) float32, of scored tables; features: (K,) uint32, of scored "
           "tables; counts: (K,) uint32, occurrences of each key, which a count_filter adds up, 1 "
           "without them.\n"
           "change: \"rule\"; or grads are not gradients: \"add\" them to the weights, clipped to "
           "values' bounds, or \"assign\" them; state stays as it is, in new rows that which the "
           "rule begins with.\n"
           "Keys of buckets that have all of `ids` already are left out, and keys that are not "
           "admitted. Returns the number of keys applied.\n"
           "Errors: BadRequest (nothing changed); ResourceExhausted (repeat with the same ids).")
      .def("advance", &advance, "ids"_a,
           "An update without keys: raise the marks of every bucket to `ids`.")
      .def("shrink", &shrink, "bucket"_a, "time"_a, "day_over"_a, "version"_a,
           nb::sig("def shrink(self, bucket: int, time: int, day_over: bool, version: int) -> "
                   "tuple[int, int]"),
           "Remove the rows of a bucket that the policy lets go at a data time, at the end of its "
           "day if day_over: (expired, evicted).")
      .def("forget_removed", &Table::forget_removed, "version"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Forget which keys were removed with a version up to this one.")
      .def("statistics", &statistics, "keys"_a.noconvert(), "out"_a.noconvert(), "time"_a,
           "day_over"_a, "pool"_a,
           "Write show and click of each key as they are at a data time, 0 if absent. keys: (N,) "
           "uint64; out: (N, 2) float64.")
      .def("settle", &settle, "keys"_a.noconvert(), "delta_scores"_a.noconvert(), "pool"_a,
           "Subtract what an export has used up from delta scores. keys: (N,) uint64; "
           "delta_scores: (N,) float32.")
      .def("erase", &erase, "keys"_a.noconvert(), "pool"_a,
           "Remove rows; return how many there were. keys: (N,) uint64.")
      .def("contains", &contains, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "Write whether each key has a row. keys: (N,) uint64; out: (N,) bool.");
  register_buckets(m, table);
}

}  // namespace trireme::bind
