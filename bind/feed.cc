// The batch work of the core: unique, gather, scatter, split, merge, and functions on bags.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind.h"
#include "feed/bags.h"
#include "feed/distinct.h"
#include "feed/gather.h"
#include "feed/merge.h"
#include "feed/partition.h"
#include "feed/shows.h"
#include "feed/split.h"
#include "feed/unique.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

using Key = std::optional<std::uint64_t>;
using Keys = Array1<const std::uint64_t>;
using Index = Array1<const std::int32_t>;
using Offsets = std::optional<Array1<const std::int64_t>>;
using Bags = std::optional<Index>;
using Grads = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using Weights = std::optional<Array1<const float>>;
template <class ArrayOrNone>
auto span_or_empty(const ArrayOrNone& array) {
  return array ? as_span(*array) : decltype(as_span(*array)){};
}

// "gather: weights has 3 elements, expected 4"
void expect(const char* who, const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kBadRequest, std::string(who) + ": " + what + " is " +
                                          std::to_string(found) + ", expected " +
                                          std::to_string(expected));
}

void expect_dim(const char* who, std::size_t dim) {
  if (dim == 0)
    throw Error(ErrorCode::kBadRequest, std::string(who) + ": dim is 0, expected at least 1");
}

void expect_int32(const char* who, const char* what, std::size_t found) {
  if (found <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) return;
  throw Error(ErrorCode::kBadRequest, std::string(who) + ": " + what + " is " +
                                          std::to_string(found) + ", expected fewer than 2^31");
}

std::vector<std::span<const std::uint64_t>> spans_of(const std::vector<Keys>& arrays) {
  std::vector<std::span<const std::uint64_t>> spans;
  for (const Keys& keys : arrays) spans.push_back(as_span(keys));
  return spans;
}

nb::tuple bind_unique(Keys values, Pool& pool, Key padding_key) {
  Unique u;
  {
    nb::gil_scoped_release release;
    u = unique(as_span(values), padding_key, pool);
  }
  return nb::make_tuple(result(std::move(u.keys)), result(std::move(u.index)),
                        result(std::move(u.occurrences.order)),
                        result(std::move(u.occurrences.starts)));
}

Result1<std::uint64_t> bind_distinct(const std::vector<Keys>& parts, Pool& pool) {
  const std::vector<std::span<const std::uint64_t>> spans = spans_of(parts);
  Array<std::uint64_t> keys;
  {
    nb::gil_scoped_release release;
    keys = distinct(spans, pool);
  }
  return result(std::move(keys));
}

nb::tuple bind_occurrences(Index index, std::int32_t num_rows, Pool& pool) {
  if (num_rows < 0) {
    throw Error(ErrorCode::kBadRequest,
                "occurrences: num_rows is " + std::to_string(num_rows) + ", expected >= 0");
  }
  Occurrences o;
  {
    nb::gil_scoped_release release;
    o = occurrences(as_span(index), num_rows, pool);
  }
  return nb::make_tuple(result(std::move(o.order)), result(std::move(o.starts)));
}

// Shape of the (B, F, D) side of gather and scatter.
void expect_examples(const char* who, const std::array<std::size_t, 3>& found,
                     std::size_t num_features, std::size_t dim) {
  expect(who, "the second dimension of the (B, F, D) array", found[1], num_features);
  expect(who, "the third dimension of the (B, F, D) array", found[2], dim);
  if (num_features == 0 || dim == 0) {
    throw Error(ErrorCode::kBadRequest, std::string(who) + ": expected F >= 1 and D >= 1, found " +
                                            std::to_string(num_features) + " and " +
                                            std::to_string(dim));
  }
  expect_int32(who, "the number of bags", found[0] * num_features);
}

// A gradient may be a slice of a wider matrix, but each example's (F, D) must lie in one piece.
BagGrads grads_of(const Grads& grad) {
  const std::size_t batch = grad.shape(0), features = grad.shape(1), dim = grad.shape(2);
  const bool is_dense = (dim == 1 || grad.stride(2) == 1) &&
                        (features == 1 || grad.stride(1) == static_cast<std::int64_t>(dim)) &&
                        (batch <= 1 || grad.stride(0) >= static_cast<std::int64_t>(features * dim));
  if (batch > 0 && !is_dense) {
    throw Error(ErrorCode::kBadRequest,
                "scatter: expected grad strides (>= F * D, D, 1) for shape (" +
                    std::to_string(batch) + ", " + std::to_string(features) + ", " +
                    std::to_string(dim) + "), found (" + std::to_string(grad.stride(0)) + ", " +
                    std::to_string(grad.stride(1)) + ", " + std::to_string(grad.stride(2)) + ")");
  }
  return {grad.data(), batch, features, dim, static_cast<std::size_t>(grad.stride(0))};
}

void bind_gather(Array2<const float> rows, Index index, Offsets offsets, Weights weights,
                 std::size_t num_features, Array3<float> out, Pool& pool) {
  expect_examples("gather", {out.shape(0), out.shape(1), out.shape(2)}, num_features,
                  rows.shape(1));
  expect_int32("gather", "the number of rows", rows.shape(0));
  const std::size_t num_bags = out.shape(0) * num_features;
  if (offsets) expect("gather", "the size of offsets", offsets->size(), num_bags + 1);
  if (!offsets) expect("gather", "the size of index without offsets", index.size(), num_bags);
  if (weights) expect("gather", "the size of weights", weights->size(), index.size());
  const BagsOfRows bags{as_span(index), span_or_empty(offsets), span_or_empty(weights),
                        num_features};
  nb::gil_scoped_release release;
  gather(as_span(rows), rows.shape(1), bags, as_span(out), pool);
}

void bind_scatter(Grads grad, Index order, Index starts, Bags bags, Weights weights,
                  Array2<float> out, Pool& pool) {
  expect_examples("scatter", {grad.shape(0), grad.shape(1), grad.shape(2)}, grad.shape(1),
                  out.shape(1));
  expect("scatter", "the size of starts", starts.size(), out.shape(0) + 1);
  const std::size_t num_positions = bags ? bags->size() : grad.shape(0) * grad.shape(1);
  if (weights) expect("scatter", "the size of weights", weights->size(), num_positions);
  const BagGrads grads = grads_of(grad);
  const RowsOfBags from{as_span(order), as_span(starts), span_or_empty(bags),
                        span_or_empty(weights)};
  nb::gil_scoped_release release;
  scatter(grads, from, as_span(out), pool);
}

void bind_sum_shows(const std::optional<Array2<const float>>& examples, Index order, Index starts,
                    Bags bags, std::size_t num_examples, Array1<const std::uint32_t> features,
                    Array2<float> show_click, Array1<std::uint32_t> feature, Pool& pool) {
  if (examples) {
    expect("sum_shows", "the number of examples", examples->shape(0), num_examples);
    expect("sum_shows", "the second dimension of examples", examples->shape(1), 2);
  }
  expect("sum_shows", "the size of starts", starts.size(), feature.size() + 1);
  expect("sum_shows", "the number of rows of show_click", show_click.shape(0), feature.size());
  expect("sum_shows", "the second dimension of show_click", show_click.shape(1), 2);
  expect_int32("sum_shows", "the number of bags", num_examples * features.size());
  const ExampleShows shows{span_or_empty(examples), num_examples, as_span(features)};
  const RowsOfBags from{as_span(order), as_span(starts), span_or_empty(bags), {}};
  nb::gil_scoped_release release;
  sum_shows(shows, from, as_span(show_click), as_span(feature), pool);
}

void bind_bag_of(Array1<const std::int64_t> offsets, std::size_t n, Array1<std::int32_t> out) {
  expect("bag_of", "the size of out", out.size(), n);
  expect_int32("bag_of", "the number of bags", offsets.size());
  nb::gil_scoped_release release;
  bag_of(as_span(offsets), as_span(out));
}

bool bind_is_one_per_bag(Array1<const std::int64_t> offsets) {
  nb::gil_scoped_release release;
  return is_one_per_bag(as_span(offsets));
}

void bind_mean_weights(Index index, Array1<const std::int64_t> offsets, Array1<float> out) {
  nb::gil_scoped_release release;
  mean_weights(as_span(index), as_span(offsets), as_span(out));
}

void bind_salt(Keys values, Offsets offsets, Keys salts, Array1<std::uint64_t> out,
               Key padding_key) {
  nb::gil_scoped_release release;
  salt(as_span(values), span_or_empty(offsets), as_span(salts), padding_key, as_span(out));
}

nb::tuple bind_split(Keys keys, Array1<const std::uint16_t> owners, std::uint16_t num_owners,
                     Pool& pool) {
  Split s;
  {
    nb::gil_scoped_release release;
    s = split(as_span(keys), as_span(owners), num_owners, pool);
  }
  return nb::make_tuple(result(std::move(s.order)), result(std::move(s.counts)));
}

nb::tuple bind_partition(Keys keys, const std::vector<Keys>& sets) {
  const std::vector<std::span<const std::uint64_t>> spans = spans_of(sets);
  Partition p;
  {
    nb::gil_scoped_release release;
    p = partition(as_span(keys), spans);
  }
  return nb::make_tuple(result(std::move(p.others.keys)), result(std::move(p.others.places)),
                        result(std::move(p.shared.keys)), result(std::move(p.shared.places)));
}

void bind_put_rows(Array2<const float> rows, Index places, Array2<float> out) {
  expect("put_rows", "the number of places", places.size(), rows.shape(0));
  expect("put_rows", "the number of columns of out", out.shape(1), rows.shape(1));
  nb::gil_scoped_release release;
  put_rows(as_span(rows), as_span(places), rows.shape(1), as_span(out));
}

struct PartArrays {
  Keys keys;
  Array2<const float> grads;
  float scale;
};

PartArrays part_of(nb::handle item) {
  PartArrays part;
  nb::tuple fields;
  if (!nb::try_cast(item, fields, false) || fields.size() != 3 ||
      !nb::try_cast(fields[0], part.keys, false) || !nb::try_cast(fields[1], part.grads, false) ||
      !nb::try_cast(fields[2], part.scale)) {
    throw nb::type_error(
        "merge: expected parts of (keys (K,) uint64, grads (K, D) float32, scale float)");
  }
  return part;
}

nb::tuple bind_merge(nb::list parts, Pool& pool) {
  std::vector<PartArrays> arrays;
  for (nb::handle item : parts) arrays.push_back(part_of(item));
  if (arrays.empty())
    throw Error(ErrorCode::kBadRequest, "merge: expected at least 1 part, found 0");
  const std::size_t dim = arrays[0].grads.shape(1);
  expect_dim("merge", dim);
  std::vector<GradPart> spans;
  for (const PartArrays& part : arrays) {
    expect("merge", "the number of gradients of a part", part.grads.shape(0), part.keys.size());
    expect("merge", "the dim of a part", part.grads.shape(1), dim);
    spans.push_back({as_span(part.keys), as_span(part.grads), part.scale});
  }
  if (spans.size() == 1 && spans[0].scale == 1.0F) {
    Array<std::int32_t> index(spans[0].keys.size());
    std::iota(index.data(), index.data() + index.size(), 0);
    return nb::make_tuple(parts[0][0], parts[0][1], result(std::move(index)));
  }
  Merged merged;
  {
    nb::gil_scoped_release release;
    merged = merge(spans, dim, pool);
  }
  return nb::make_tuple(result(std::move(merged.keys)), result(std::move(merged.grads), dim),
                        result(std::move(merged.index)));
}

}  // namespace

void register_feed(nb::module_& m) {
  m.def(
      "distinct", &bind_distinct, "parts"_a.noconvert(), "pool"_a,
      "Return the distinct keys of several arrays, (K,) uint64, in the order of their hashes, and "
      "so of their buckets. parts: list of (N_i,) uint64.");
  m.def("unique", &bind_unique, "values"_a.noconvert(), "pool"_a, "padding_key"_a = nb::none(),
        R"(Return the distinct keys of a batch and where each occurs.

values: (N,) uint64. padding_key: values equal to it get no row.
Returns (keys (K,) uint64, index (N,) int32, order (M,) int32, starts (K + 1,) int32).
keys are ordered by bucket, and within a bucket by first occurrence. index[i] is the row of
values[i], -1 for padding. Row k occurs at the positions order[starts[k]:starts[k + 1]], ascending.
The result does not depend on the number of threads.
Raises BadRequest for 2^31 values or more.)");

  m.def("occurrences", &bind_occurrences, "index"_a.noconvert(), "num_rows"_a, "pool"_a,
        R"(Return the positions of each row in an index.

index: (N,) int32, each -1 (no row) to num_rows - 1.
Returns (order (M,) int32, starts (num_rows + 1,) int32). Row k occurs at the positions
order[starts[k]:starts[k + 1]], ascending.
Raises BadRequest, naming an element of index that is out of range.)");

  m.def("gather", &bind_gather, "rows"_a.noconvert(), "index"_a.noconvert(),
        "offsets"_a.noconvert().none(), "weights"_a.noconvert().none(), "num_features"_a,
        "out"_a.noconvert(), "pool"_a,
        R"(Sum the rows of each bag.

out[b, f] is the sum of weights[i] * rows[index[i]] over the positions i of bag f*B + b.

rows: (K, D) float32. index: (N,) int32; -1 adds nothing.
offsets: (F*B + 1,) int64, feature-major. Bag g has the positions offsets[g] to offsets[g + 1] - 1;
the first offset need not be 0. None: N = F*B, one position per bag.
weights: (N,) float32, or None for 1.
out: (B, F, D) float32, overwritten; 0 for an empty bag.
Raises BadRequest if sizes do not agree, or if an offset or a row is out of range.)");

  m.def("scatter", &bind_scatter, "grad"_a.noconvert(), "order"_a.noconvert(),
        "starts"_a.noconvert(), "bags"_a.noconvert().none(), "weights"_a.noconvert().none(),
        "out"_a.noconvert(), "pool"_a,
        R"(Compute the gradient of the rows of `gather` from the gradient of its output.

out[k] is the sum of weights[p] * grad[b, f] over the occurrences p of row k, in order, where the
bag of p is f*B + b. The bits are the same for any number of threads.

grad: (B, F, D) float32. A slice of a wider matrix, with strides (>= F * D, D, 1), is not copied.
order: (M,) int32 and starts: (K + 1,) int32, from `unique`.
bags: (N,) int32, from `bag_of`, or None: position p is bag p.
weights: (N,) float32, or None for 1.
out: (K, D) float32, overwritten.
Raises BadRequest if sizes do not agree, or if a value is out of range.)");

  m.def("sum_shows", &bind_sum_shows, "examples"_a.noconvert().none(), "order"_a.noconvert(),
        "starts"_a.noconvert(), "bags"_a.noconvert().none(), "num_examples"_a,
        "features"_a.noconvert(), "show_click"_a.noconvert(), "feature"_a.noconvert(), "pool"_a,
        R"(Count how often each row was shown and clicked, and find the feature that it came from.

show_click[k] is the sum of the shows and clicks of the examples in which row k occurs, once per
occurrence. feature[k] is the feature of the first occurrence. Positions without a bag do not count;
a row that has no other position gets feature 0. The bits are the same for any number of threads.

examples: (B, 2) float32, show and click of each, or None: each example is one show and no click.
order: (M,) int32 and starts: (K + 1,) int32, from `unique`.
bags: (N,) int32, from `bag_of`, or None: position p is bag p.
num_examples: B. features: (F,) uint32, the number to write for each feature.
show_click: (K, 2) float32. feature: (K,) uint32. Both are overwritten.
Raises BadRequest if sizes do not agree, or if a value is out of range.)");

  m.def("bag_of", &bind_bag_of, "offsets"_a.noconvert(), "n"_a, "out"_a.noconvert(),
        R"(Write the bag of each position, -1 outside all bags.

offsets: (G + 1,) int64. out: (n,) int32.
Raises BadRequest, naming an offset that is smaller than the one before or greater than n.)");

  m.def("is_one_per_bag", &bind_is_one_per_bag, "offsets"_a.noconvert(),
        "Return whether every bag i consists of position i alone. offsets: (G + 1,) int64.");

  m.def("mean_weights", &bind_mean_weights, "index"_a.noconvert(), "offsets"_a.noconvert(),
        "out"_a.noconvert(),
        R"(Write the weights that make the sum over a bag its mean.

out[i] is 1 / (number of positions with a row in the bag of i), 0 for a position without row or bag.
index: (N,) int32, -1 for padding. offsets: (G + 1,) int64. out: (N,) float32.
Raises BadRequest if sizes do not agree, or for wrong offsets.)");

  m.def("salt", &bind_salt, "values"_a.noconvert(), "offsets"_a.noconvert().none(),
        "salts"_a.noconvert(), "out"_a.noconvert(), "padding_key"_a = nb::none(),
        R"(Map the values of each feature to keys, with a different mapping for each feature.

out is mix64(value ^ salts[f]), a bijection for each feature f. Values equal to padding_key and
values outside all bags are copied. The one value that would map to padding_key maps to
mix64(padding_key ^ salts[f]) instead.
values, out: (N,) uint64. salts: (F,) uint64.
offsets: (F*B + 1,) int64, or None: each feature has the same number of values.
Raises BadRequest if sizes do not agree, or for wrong offsets.)");

  m.def("split", &bind_split, "keys"_a.noconvert(), "owners"_a.noconvert(), "num_owners"_a,
        "pool"_a,
        R"(Group keys by the owner of their bucket.

keys: (K,) uint64. owners: (4096,) uint16, the owner of each bucket, below num_owners.
Returns (order (K,) int32, counts (num_owners,) int64). order has the positions of the keys of owner
0, ascending, then those of owner 1, and so on; counts has the number of keys of each owner.
Raises BadRequest, naming an owner that is out of range.)");

  m.def("partition", &bind_partition, "keys"_a.noconvert(), "sets"_a,
        R"(Divide keys into those that are in none of the sets, and the others.

keys: (K,) uint64. sets: list of (S_i,) uint64. All are in the order of their buckets, as `unique`
returns them.
Returns (keys (A,) uint64, places (A,) int32) of those in none of the sets, then (keys (B,) uint64,
places (B,) int32) of the others. Both keep the order of the keys; places are where they were.
Raises BadRequest for keys in another order, and for 2^31 keys or more.)");

  m.def("put_rows", &bind_put_rows, "rows"_a.noconvert(), "places"_a.noconvert(),
        "out"_a.noconvert(),
        R"(Copy row i of rows to row places[i] of out.

rows: (A, D) float32. places: (A,) int32, from `partition`. out: (K, D) float32.
Raises BadRequest if sizes do not agree, or naming a place that is not a row of out.)");

  m.def("merge", &bind_merge, "parts"_a, "pool"_a,
        R"(Add several sparse gradients to one.

parts: list of (keys (K_i,) uint64, grads (K_i, D) float32, scale float).
Returns (keys (K,) uint64, grads (K, D) float32, index (sum of K_i,) int32). keys is the union of
the parts' keys, in the order of `unique`. grads is the sum of scale * gradient for each key, in the
order of the parts. index is the row of each key of the parts, one part after the other.
The bits are the same for any number of threads. A single part with scale 1 is returned unchanged.
Raises BadRequest without parts or if sizes do not agree, TypeError for parts of another form.)");
}

}  // namespace trireme::bind
