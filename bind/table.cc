// Tables: lookup, update, marks and buckets. Values of update rules.
#include "table/table.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <limits>
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
#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

using Keys = Array1<const std::uint64_t>;
using Ids = std::vector<std::pair<std::int64_t, std::int64_t>>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void expect(const char* who, const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kBadRequest, std::string("Table.") + who + ": expected " + what + " " +
                                          std::to_string(expected) + ", found " +
                                          std::to_string(found));
}

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

template <class T, class... Shape>
auto to_numpy(Array<T>&& array, Shape... shape) {
  T* data = array.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Shape)>, nb::c_contig>(
      data, {static_cast<std::size_t>(shape)...}, owner);
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

auto marks(const Table& table, std::int64_t stream) {
  Array<std::uint64_t> found(kNumBuckets);
  {
    nb::gil_scoped_release release;
    table.marks(stream, found.span());
  }
  return to_numpy(std::move(found), kNumBuckets);
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
  nb::class_<RuleValues>(m, "RuleValues",
                         "The numbers of one step of an update rule; they travel with a push.")
      .def(
          "__init__",
          [](RuleValues* self, double lr, double weight_decay, double eps, double beta1,
             double beta2, double momentum, double dampening, double beta, double l1, double l2,
             double initial_g2sum, double lower, double upper, std::int64_t step) {
            const RuleValues values{.lr = lr,
                                    .weight_decay = weight_decay,
                                    .eps = eps,
                                    .beta1 = beta1,
                                    .beta2 = beta2,
                                    .momentum = momentum,
                                    .dampening = dampening,
                                    .beta = beta,
                                    .l1 = l1,
                                    .l2 = l2,
                                    .initial_g2sum = initial_g2sum,
                                    .lower = lower,
                                    .upper = upper,
                                    .step = step};
            values.check();
            new (self) RuleValues(values);
          },
          nb::kw_only(), "lr"_a, "weight_decay"_a = 0.0, "eps"_a = 1e-10, "beta1"_a = 0.9,
          "beta2"_a = 0.999, "momentum"_a = 0.0, "dampening"_a = 0.0, "beta"_a = 1.0, "l1"_a = 0.0,
          "l2"_a = 0.0, "initial_g2sum"_a = 3.0, "lower"_a = -kInfinity, "upper"_a = kInfinity,
          "step"_a = 1,
          R"(weight_decay: added to the gradient, g += weight_decay * w.

lower, upper: the weights are clipped to [lower, upper] after the step.
step: the step's number, from 1, for Adam's global bias correction.
Each update rule uses the other numbers that have its names.
Raises BadRequest, naming the value.)")
      .def_ro("lr", &RuleValues::lr)
      .def_ro("weight_decay", &RuleValues::weight_decay)
      .def_ro("eps", &RuleValues::eps)
      .def_ro("beta1", &RuleValues::beta1)
      .def_ro("beta2", &RuleValues::beta2)
      .def_ro("momentum", &RuleValues::momentum)
      .def_ro("dampening", &RuleValues::dampening)
      .def_ro("beta", &RuleValues::beta)
      .def_ro("l1", &RuleValues::l1)
      .def_ro("l2", &RuleValues::l2)
      .def_ro("initial_g2sum", &RuleValues::initial_g2sum)
      .def_ro("lower", &RuleValues::lower)
      .def_ro("upper", &RuleValues::upper)
      .def_ro("step", &RuleValues::step);

  nb::class_<PolicyConfig>(m, "PolicyConfig",
                           "How long rows live: the values of trireme.policy that the core needs.")
      .def(
          "__init__",
          [](PolicyConfig* self, bool is_scored, double nonclk_coeff, double click_coeff,
             double decay_rate, double delete_threshold,
             std::optional<std::uint32_t> delete_after_unseen_days,
             std::optional<double> embedx_threshold, std::optional<std::uint64_t> ttl_s,
             std::optional<std::uint64_t> max_rows, std::optional<std::uint64_t> max_bytes) {
            new (self) PolicyConfig{.is_scored = is_scored,
                                    .rates = {.nonclk_coeff = nonclk_coeff,
                                              .click_coeff = click_coeff,
                                              .decay_rate = decay_rate},
                                    .delete_threshold = delete_threshold,
                                    .delete_after_unseen_days = delete_after_unseen_days,
                                    .ttl_s = ttl_s,
                                    .embedx_threshold = embedx_threshold,
                                    .max_rows = max_rows,
                                    .max_bytes = max_bytes};
          },
          nb::kw_only(), "is_scored"_a = false, "nonclk_coeff"_a = 0.1, "click_coeff"_a = 1.0,
          "decay_rate"_a = 1.0, "delete_threshold"_a = 0.0,
          "delete_after_unseen_days"_a = nb::none(), "embedx_threshold"_a = nb::none(),
          "ttl_s"_a = nb::none(), "max_rows"_a = nb::none(), "max_bytes"_a = nb::none());

  nb::class_<AdmissionConfig>(m, "AdmissionConfig",
                              "Which keys get a row: an admission filter of trireme.policy.")
      .def(
          "__init__",
          [](AdmissionConfig* self, std::string name, std::uint32_t n,
             std::optional<std::uint64_t> sketch_bytes, double p, double threshold) {
            new (self) AdmissionConfig{.name = std::move(name),
                                       .n = n,
                                       .sketch_bytes = sketch_bytes.value_or(0),
                                       .p = p,
                                       .threshold = threshold};
          },
          nb::kw_only(), "name"_a = "", "n"_a = 1, "sketch_bytes"_a = nb::none(), "p"_a = 1.0,
          "threshold"_a = 0.0,
          "name: count_filter (uses n, sketch_bytes), probability (p), score_filter (threshold), "
          "or empty: every key gets a row.");

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

  nb::class_<Table>(m, "Table",
                    "Rows of weights, state and statistics by 64-bit key, in memory. Any thread "
                    "may call any function at any time.")
      .def("__init__", &init_table, nb::kw_only(), "dims"_a, "dtype"_a = "float32", "rule"_a,
           "shared"_a = false, "bias_correction"_a = "global", "initial_accumulator"_a = 0.0F,
           "nesterov"_a = false, "initializer"_a = "uniform", "init_a"_a, "init_b"_a, "seed"_a,
           "absent"_a = "initial", "num_streams_max"_a = 1024, "simd"_a = "auto",
           "policy"_a = PolicyConfig(), "admission"_a = AdmissionConfig(),
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
      .def_prop_ro("is_scored", &Table::is_scored, "Whether rows count shows and clicks.")
      .def_prop_ro("row_bytes", &Table::row_bytes,
                   "Bytes of a wide row: weights, state, statistics.")
      .def_prop_ro("version", &Table::version, "The version that changes are stamped with.")
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
           "counts"_a.noconvert() = nb::none(), "change"_a = "rule",
           R"(Apply one step of the rule to each key and raise the marks of all buckets to `ids`.

Absent keys that are admitted get a row first. Keys that are not admitted are skipped, and so are
keys of buckets that already have all `ids`. Returns the number of keys applied.

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
Raises BadRequest, and nothing has changed; or ResourceExhausted, and a repetition with the same ids
finishes the update.)")
      .def("advance", &advance, "ids"_a,
           "Raise the marks of every bucket to `ids`, as an update without keys.")
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
      .def("settle", &settle, "keys"_a.noconvert(), "delta_scores"_a.noconvert(), "pool"_a,
           R"(Subtract the amounts that an export has consumed from the delta scores of rows.

keys: (N,) uint64. delta_scores: (N,) float32.
Raises BadRequest if the table is not scored.)")
      .def("expect", &Table::expect, "num_rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Announce that about num_rows rows will be restored, so that memory is allocated for "
           "them at once. The number need not be exact.")
      .def("clear_bucket", &Table::clear_bucket, "bucket"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Forget the rows, marks, admission counts and removed keys of a bucket.")
      .def("erase", &erase, "keys"_a.noconvert(), "pool"_a,
           "Remove rows and return how many existed. keys: (N,) uint64.")
      .def("contains", &contains, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "Write whether each key has a row. keys: (N,) uint64. out: (N,) bool.");
}

}  // namespace trireme::bind
