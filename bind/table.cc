// Tables: lookup, update, marks and buckets; the values of update rules.
#include "table/table.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/array.h"
#include "base/dims.h"
#include "base/error.h"
#include "base/isa.h"
#include "bind.h"
#include "store/row.h"

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
void expect_rows(const char* who, const Table& table, const Keys& keys, const Array2<T>& rows) {
  expect(who, "as many rows as keys:", rows.shape(0), keys.size());
  expect(who, "rows of dim", rows.shape(1), static_cast<std::size_t>(table.dim()));
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

void init_table(Table* self, std::vector<int> dims, std::string rule, bool shared,
                std::string bias_correction, float initial_accumulator, bool nesterov,
                std::string initializer, float init_a, float init_b, std::uint64_t seed,
                std::string absent, int num_streams_max, std::string simd) {
  new (self) Table({.dims = std::move(dims),
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
                    .num_streams_max = num_streams_max,
                    .simd = std::move(simd)});
}

std::size_t lookup(const Table& table, Keys keys, Array2<float> out, Pool& pool) {
  expect_rows("lookup", table, keys, out);
  nb::gil_scoped_release release;
  return table.lookup(as_span(keys), out.data(), pool);
}

std::size_t update(Table& table, Keys keys, Array2<const float> grads, const Ids& ids,
                   const RuleValues& values, Pool& pool) {
  expect_rows("update", table, keys, grads);
  const std::vector<PushId> pushes = push_ids(ids);
  nb::gil_scoped_release release;
  return table.update(as_span(keys), grads.data(), pushes, values, pool);
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

nb::tuple snapshot(const Table& table, std::uint32_t bucket) {
  BucketContent content;
  {
    nb::gil_scoped_release release;
    content = table.snapshot(bucket);
  }
  nb::dict marks_of_streams;
  for (const auto& [stream, sequence] : content.marks)
    marks_of_streams[nb::int_(stream)] = sequence;
  const std::size_t n = content.keys.size();
  return nb::make_tuple(to_numpy(std::move(content.keys), n),
                        to_numpy(std::move(content.classes), n),
                        to_numpy(std::move(content.rows), n, table.row_bytes()), marks_of_streams);
}

void restore(Table& table, std::uint32_t bucket, Keys keys, Array1<const std::uint8_t> classes,
             Array2<const std::uint8_t> rows,
             const std::map<std::int64_t, std::uint64_t>& marks_of_streams) {
  expect("restore", "rows of width", rows.shape(1), table.row_bytes());
  expect("restore", "as many rows as keys:", rows.shape(0), keys.size());
  const std::vector<std::pair<std::int64_t, std::uint64_t>> marks_given(marks_of_streams.begin(),
                                                                        marks_of_streams.end());
  nb::gil_scoped_release release;
  table.restore(bucket, {.keys = as_span(keys),
                         .classes = as_span(classes),
                         .rows = as_span(rows),
                         .marks = marks_given});
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

// Where rows are, for the benchmark's bare gather: kept on this side, so that Python cannot make up
// an address.
struct Addresses {
  std::vector<const float*> weights;
  int dim;
  Isa isa;
};

Addresses addresses(const Table& table, Keys keys, Pool& pool) {
  Addresses found{
      .weights = std::vector<const float*>(keys.size()), .dim = table.dim(), .isa = table.isa()};
  nb::gil_scoped_release release;
  table.addresses(as_span(keys), found.weights.data(), pool);
  if (std::find(found.weights.begin(), found.weights.end(), nullptr) != found.weights.end()) {
    throw Error(ErrorCode::kBadRequest,
                "Table.addresses: expected keys with rows, found one without");
  }
  return found;
}

// The fastest way known to read rows at random: nothing in the loop but the fetch of a row that is
// needed later, and the copy of one that has arrived.
template <class Dim>
TRIREME_INLINE void gather_rows(std::span<const float* const> rows, float* out, Dim dim,
                                std::size_t ahead) noexcept {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float* next = rows[std::min(i + ahead, rows.size() - 1)];
    for (int j = 0; j < dim - 1; j += 16) __builtin_prefetch(next + j);
    __builtin_prefetch(next + dim - 1);
    copy_floats(out + i * static_cast<std::size_t>(dim), rows[i], dim);
  }
}

void gather_addresses(const Addresses& from, Array2<float> out, std::size_t ahead) {
  expect("addresses", "as many rows as keys:", out.shape(0), from.weights.size());
  expect("addresses", "rows of dim", out.shape(1), static_cast<std::size_t>(from.dim));
  nb::gil_scoped_release release;
  with_isa(from.isa, [&]() TRIREME_INLINE_LAMBDA {
    with_dim(from.dim, [&](auto dim) TRIREME_INLINE_LAMBDA {
      gather_rows(from.weights, out.data(), dim, ahead);
    });
  });
}

}  // namespace

void register_table(nb::module_& m) {
  nb::class_<RuleValues>(m, "RuleValues",
                         "The numbers of one step of an update rule; they travel with a push.")
      .def(
          "__init__",
          [](RuleValues* self, double lr, double weight_decay, double eps, double beta1,
             double beta2, double l1, double l2, double lower, double upper, std::int64_t step) {
            const RuleValues values{.lr = lr,
                                    .weight_decay = weight_decay,
                                    .eps = eps,
                                    .beta1 = beta1,
                                    .beta2 = beta2,
                                    .l1 = l1,
                                    .l2 = l2,
                                    .lower = lower,
                                    .upper = upper,
                                    .step = step};
            values.check();
            new (self) RuleValues(values);
          },
          nb::kw_only(), "lr"_a, "weight_decay"_a = 0.0, "eps"_a = 1e-10, "beta1"_a = 0.9,
          "beta2"_a = 0.999, "l1"_a = 0.0, "l2"_a = 0.0, "lower"_a = -kInfinity,
          "upper"_a = kInfinity, "step"_a = 1,
          "weight_decay is added to the gradient (g += weight_decay * w); weights are clipped to "
          "[lower, upper] "
          "after the step; step, from 1, drives Adam's global bias correction. Errors: BadRequest.")
      .def_ro("lr", &RuleValues::lr)
      .def_ro("weight_decay", &RuleValues::weight_decay)
      .def_ro("eps", &RuleValues::eps)
      .def_ro("beta1", &RuleValues::beta1)
      .def_ro("beta2", &RuleValues::beta2)
      .def_ro("l1", &RuleValues::l1)
      .def_ro("l2", &RuleValues::l2)
      .def_ro("lower", &RuleValues::lower)
      .def_ro("upper", &RuleValues::upper)
      .def_ro("step", &RuleValues::step);

  nb::class_<Addresses>(m, "Addresses", "Where the rows of some keys are. For benchmarks only.")
      .def("gather", &gather_addresses, "out"_a.noconvert(), "ahead"_a,
           "Copy the weights, fetching `ahead` rows in advance, without looking anything up. out: "
           "(N, D) float32. "
           "No update may run meanwhile.");

  nb::class_<Table>(m, "Table",
                    "Rows of weights and state by 64-bit key. Any thread may call anything.")
      .def("__init__", &init_table, nb::kw_only(), "dims"_a, "rule"_a, "shared"_a = false,
           "bias_correction"_a = "global", "initial_accumulator"_a = 0.0F, "nesterov"_a = false,
           "initializer"_a = "uniform", "init_a"_a, "init_b"_a, "seed"_a, "absent"_a = "initial",
           "num_streams_max"_a = 1024, "simd"_a = "auto",
           "dims: weights of a row, per row class (one class for now).\n"
           "rule: sgd, momentum (nesterov), adagrad (shared: one accumulator per row; "
           "initial_accumulator), adam (shared; bias_correction: global or row), ftrl, count, "
           "fleet_sgd, fleet_adagrad (shared), fleet_adagrad_v2, fleet_adam or "
           "fleet_shared_adam.\n"
           "initializer: uniform in [init_a, init_b), normal (mean init_a, standard deviation "
           "init_b) or constant "
           "(init_a; init_b 0).\n"
           "absent: what a lookup answers for an absent key, initial (weights) or zeros.\n"
           "simd: auto, scalar, avx2 or avx512; the results are the same bits.\n"
           "Errors: BadRequest, naming the value.")
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("state_floats", &Table::state_floats)
      .def_prop_ro("row_bytes", &Table::row_bytes, "Bytes of weights and state of a row.")
      .def_prop_ro("rows", &Table::num_rows, nb::call_guard<nb::gil_scoped_release>(),
                   "Number of rows.")
      .def_prop_ro("bytes", &Table::bytes, nb::call_guard<nb::gil_scoped_release>(),
                   "Bytes of memory taken from the system.")
      .def_prop_ro("simd", [](const Table& t) { return std::string(isa_name(t.isa())); })
      .def("lookup", &lookup, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "Write the weights of each key and return how many were absent. Changes nothing.\n"
           "keys: (N,) uint64, duplicates allowed; out: (N, D) float32.")
      .def("update", &update, "keys"_a.noconvert(), "grads"_a.noconvert(), "ids"_a, "values"_a,
           "pool"_a,
           "Apply one step of the rule to each key, making absent rows, and raise all marks to "
           "`ids`.\n"
           "keys: (K,) uint64, distinct (a key that occurs twice has the rule applied twice, in "
           "order); grads: "
           "(K, D) float32; ids: [(stream, sequence >= 1)], the pushes that the gradients are the "
           "sum of.\n"
           "Keys of buckets that have all of `ids` already are left out. Returns the number of "
           "keys applied.\n"
           "Errors: BadRequest (nothing changed); ResourceExhausted (repeat with the same ids).")
      .def("advance", &advance, "ids"_a,
           "An update without keys: raise the marks of every bucket to `ids`.")
      .def("marks", &marks, "stream"_a,
           "The last sequence of a stream that each bucket has, 0 for none: (4096,) uint64.")
      .def("set_marks", &set_marks, "stream"_a, "marks"_a.noconvert(),
           "Set the marks of a stream. marks: (4096,) uint64.")
      .def("snapshot", &snapshot, "bucket"_a,
           "The content of a bucket at one moment: (keys (n,) uint64, classes (n,) uint8, rows (n, "
           "row_bytes) uint8 "
           "of weights and state, marks {stream: sequence}).")
      .def("restore", &restore, "bucket"_a, "keys"_a.noconvert(), "classes"_a.noconvert(),
           "rows"_a.noconvert(), "marks"_a,
           "Replace rows and marks of a bucket by what snapshot returned; marks of other streams "
           "become 0.\n"
           "Errors: BadRequest or ResourceExhausted; the bucket is then as it was.")
      .def("clear_bucket", &Table::clear_bucket, "bucket"_a,
           nb::call_guard<nb::gil_scoped_release>(), "Forget rows and marks of a bucket.")
      .def("erase", &erase, "keys"_a.noconvert(), "pool"_a,
           "Remove rows; return how many there were. keys: (N,) uint64.")
      .def("contains", &contains, "keys"_a.noconvert(), "out"_a.noconvert(), "pool"_a,
           "Write whether each key has a row. keys: (N,) uint64; out: (N,) bool.")
      .def("addresses", &addresses, "keys"_a.noconvert(), "pool"_a, nb::keep_alive<0, 1>(),
           "Where the rows of keys are; for benchmarks. keys: (N,) uint64, all with rows.");
}

}  // namespace trireme::bind
