// Batch work against plain models, on random batches: unique, occurrences, gather, scatter, bags,
// split, partition, merge.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "feed/bags.h"
#include "feed/distinct.h"
#include "feed/gather.h"
#include "feed/merge.h"
#include "feed/partition.h"
#include "feed/split.h"
#include "feed/unique.h"

using namespace trireme;
using test::Random;

namespace {

// Few distinct values, some of them extreme, so that there are many duplicates.
std::vector<std::uint64_t> random_values(Random& random, std::size_t n) {
  const std::uint64_t distinct = 1 + random.below(n + 1);
  std::vector<std::uint64_t> values(n);
  for (auto& value : values) {
    const std::uint64_t draw = random.below(random.below(distinct) + 1);
    value = draw == 0 ? 0 : draw == 1 ? ~std::uint64_t{0} : mix64(draw);
  }
  return values;
}

std::vector<float> random_floats(Random& random, std::size_t n) {
  std::vector<float> floats(n);
  for (auto& x : floats) x = static_cast<float>(random.below(2001)) / 1000.0F - 1.0F;
  return floats;
}

template <class T>
bool same(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

void check_unique(const std::vector<std::uint64_t>& values, std::optional<std::uint64_t> padding,
                  Pool& pool) {
  std::vector<std::uint64_t> keys;
  std::map<std::uint64_t, std::vector<std::int32_t>> positions;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == padding) continue;
    if (!positions.contains(values[i])) keys.push_back(values[i]);
    positions[values[i]].push_back(static_cast<std::int32_t>(i));
  }
  std::stable_sort(keys.begin(), keys.end(),
                   [](auto a, auto b) { return bucket_of(a) < bucket_of(b); });
  const Unique found = unique(values, padding, pool);
  CHECK(same(found.keys.span(), std::span<const std::uint64_t>(keys)));
  CHECK_EQUAL(found.index.size(), values.size());
  CHECK_EQUAL(found.occurrences.starts.size(), keys.size() + 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == padding) CHECK_EQUAL(found.index[i], -1);
  }
  std::int32_t start = 0;
  for (std::size_t k = 0; k < keys.size(); ++k) {
    CHECK_EQUAL(found.occurrences.starts[k], start);
    for (const std::int32_t position : positions[keys[k]]) {
      CHECK_EQUAL(found.index[static_cast<std::size_t>(position)], static_cast<std::int32_t>(k));
      CHECK_EQUAL(found.occurrences.order[static_cast<std::size_t>(start++)], position);
    }
  }
  CHECK_EQUAL(found.occurrences.starts[keys.size()], start);
  CHECK_EQUAL(found.occurrences.order.size(), static_cast<std::size_t>(start));

  const Occurrences again =
      occurrences(found.index.span(), static_cast<std::int32_t>(keys.size()), pool);
  CHECK(same(again.order.span(), found.occurrences.order.span()));
  CHECK(same(again.starts.span(), found.occurrences.starts.span()));
}

void check_distinct(const std::vector<std::uint64_t>& values, std::size_t num_parts, Pool& pool) {
  std::vector<std::uint64_t> keys = values;
  std::ranges::sort(keys, {}, mix64);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  std::vector<std::span<const std::uint64_t>> parts;
  for (std::size_t p = 0; p < num_parts; ++p) {
    const std::size_t begin = values.size() * p / num_parts;
    const std::size_t end = values.size() * (p + 1) / num_parts;
    parts.emplace_back(values.data() + begin, end - begin);
  }
  const Array<std::uint64_t> found = distinct(parts, pool);
  CHECK(same(found.span(), std::span<const std::uint64_t>(keys)));
}

void distinct_are_sorted(Random& random, Pool& pool) {
  check_distinct({}, 0, pool);
  for (std::size_t n : {0, 1, 2, 100, 5'000, 70'000, 300'000}) {
    std::vector<std::uint64_t> values(n);
    for (auto& value : values) value = random.next();
    check_distinct(values, 1 + random.below(9), pool);  // few repeat
    check_distinct(random_values(random, n), 1 + random.below(9), pool);
    for (auto& value : values) value = random.below(3);
    check_distinct(values, 3, pool);
    for (std::size_t i = 0; i < n; ++i) values[i] = unmix64(~std::uint64_t{0} - i % 999);
    check_distinct(values, 2, pool);  // the last places of the last piece
    for (auto& value : values) value = unmix64(random.below(n));
    check_distinct(values, 2, pool);  // one place for all: without a limit, minutes
  }
}

void unique_equals_a_map(Random& random, Pool& pool) {
  for (std::size_t n : {0, 1, 2, 100, 5000, 70000}) {
    const auto values = random_values(random, n);
    check_unique(values, std::nullopt, pool);
    if (n > 0) check_unique(values, values[random.below(n)], pool);
    check_unique(std::vector<std::uint64_t>(n, 7), 7, pool);
  }
}

// One place for all: without a limit it takes longer than a test may.
void chosen_values_have_one_row_each(Random& random) {
  Pool pool(4);
  std::vector<std::uint64_t> chosen(1'000'000);
  for (auto& key : chosen) key = unmix64(random.below(chosen.size()) << 32);
  check_unique(chosen, chosen[0], pool);
}

void occurrences_refuse_a_wrong_index(Pool& pool) {
  for (std::int32_t wrong : {-2, 3}) {
    try {
      occurrences(std::array{0, 1, wrong}, 3, pool);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("found " + std::to_string(wrong) + " at 2") !=
            std::string::npos);
    }
  }
}

struct RandomBags {
  std::size_t features, examples, rows, dim;
  std::vector<std::int64_t> offsets;  // empty: one position per bag
  std::vector<std::int32_t> index;
  std::vector<float> weights;  // or empty
};

RandomBags random_bags(Random& random, std::size_t dim) {
  RandomBags bags{1 + random.below(5), random.below(200), 1 + random.below(50), dim, {}, {}, {}};
  std::size_t n = bags.features * bags.examples;
  if (random.below(2) == 0) {
    bags.offsets.push_back(static_cast<std::int64_t>(random.below(3)));
    for (std::size_t i = 0; i < n; ++i) {
      bags.offsets.push_back(bags.offsets.back() + static_cast<std::int64_t>(random.below(4)));
    }
    n = static_cast<std::size_t>(bags.offsets.back()) + random.below(3);
  }
  for (std::size_t i = 0; i < n; ++i) {
    bags.index.push_back(static_cast<std::int32_t>(random.below(bags.rows + 1)) - 1);
  }
  if (random.below(2) == 0) bags.weights = random_floats(random, n);
  return bags;
}

// Calls add(bag, position) for every position of every bag.
template <class Add>
void for_each_position(const RandomBags& bags, Add&& add) {
  for (std::size_t bag = 0; bag < bags.features * bags.examples; ++bag) {
    if (bags.offsets.empty()) {
      add(bag, bag);
      continue;
    }
    for (std::int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i)
      add(bag, static_cast<std::size_t>(i));
  }
}

void gather_and_scatter_equal_a_loop(Random& random, Pool& pool) {
  for (std::size_t dim : {1, 2, 3, 4, 5, 8, 9, 16, 17, 63, 64, 65, 130}) {
    const RandomBags bags = random_bags(random, dim);
    const std::size_t num_bags = bags.features * bags.examples;
    const auto rows = random_floats(random, bags.rows * dim);
    const auto grad = random_floats(random, num_bags * dim);
    std::vector<float> out(num_bags * dim, 99), expected_out(num_bags * dim, 0);
    std::vector<float> row_grad(bags.rows * dim, 99), expected_row_grad(bags.rows * dim, 0);
    std::vector<std::int32_t> bag_of_position(bags.index.size(), -1);
    for_each_position(bags, [&](std::size_t bag, std::size_t i) {
      bag_of_position[i] = static_cast<std::int32_t>(bag);
    });
    for (std::size_t i = 0; i < bags.index.size(); ++i) {
      const std::int32_t bag = bag_of_position[i];
      if (bags.index[i] < 0 || bag < 0) continue;
      const float weight = bags.weights.empty() ? 1.0F : bags.weights[i];
      const std::size_t b = static_cast<std::size_t>(bag) % bags.examples;
      const std::size_t f = static_cast<std::size_t>(bag) / bags.examples;
      const std::size_t at = (b * bags.features + f) * dim;
      const std::size_t row = static_cast<std::size_t>(bags.index[i]) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        expected_out[at + d] += rows[row + d] * weight;
        expected_row_grad[row + d] += grad[at + d] * weight;
      }
    }
    gather(rows, dim, {bags.index, bags.offsets, bags.weights, bags.features}, out, pool);
    CHECK(out == expected_out);  // not bit for bit: a sum of one element does not turn -0 into 0

    if (!bags.offsets.empty()) {
      std::vector<std::int32_t> found(bags.index.size());
      bag_of(bags.offsets, found);
      CHECK(found == bag_of_position);
    }
    const Occurrences from = occurrences(bags.index, static_cast<std::int32_t>(bags.rows), pool);
    const auto bags_or_none = bags.offsets.empty() ? std::vector<std::int32_t>() : bag_of_position;
    const RowsOfBags rows_of_bags{from.order.span(), from.starts.span(), bags_or_none,
                                  bags.weights};
    const std::size_t width = bags.features * dim;
    scatter({grad.data(), bags.examples, bags.features, dim, width}, rows_of_bags, row_grad, pool);
    CHECK(row_grad == expected_row_grad);

    std::vector<float> wider(bags.examples * (width + 5), 99);
    for (std::size_t b = 0; b < bags.examples; ++b) {
      std::copy_n(grad.data() + b * width, width, wider.data() + b * (width + 5) + 3);
    }
    scatter({wider.data() + 3, bags.examples, bags.features, dim, width + 5}, rows_of_bags,
            row_grad, pool);
    CHECK(row_grad == expected_row_grad);
  }
}

void large_batches_are_the_same_for_any_number_of_threads(Random& random) {
  constexpr std::size_t kFeatures = 7, kExamples = 3001, kDim = 9;
  const auto values = random_values(random, kFeatures * kExamples);
  const auto weights = random_floats(random, values.size());
  const auto grad = random_floats(random, values.size() * kDim);
  std::vector<std::vector<float>> outs, row_grads, merged;
  for (int threads : {1, 2, 5}) {
    Pool pool(threads);
    const Unique u = unique(values, std::nullopt, pool);
    std::vector<float> out(grad.size()), row_grad(u.keys.size() * kDim);
    scatter({grad.data(), kExamples, kFeatures, kDim, kFeatures * kDim},
            {u.occurrences.order.span(), u.occurrences.starts.span(), {}, weights}, row_grad, pool);
    gather(row_grad, kDim, {u.index.span(), {}, weights, kFeatures}, out, pool);
    const std::array parts{GradPart{u.keys.span(), row_grad, 1.0F},
                           GradPart{u.keys.span(), row_grad, 0.3F}};
    const Merged sum = merge(parts, kDim, pool);
    outs.push_back(out);
    row_grads.push_back(row_grad);
    merged.emplace_back(sum.grads.span().begin(), sum.grads.span().end());
  }
  for (std::size_t i : {1, 2}) {
    CHECK(outs[i] == outs[0]);
    CHECK(row_grads[i] == row_grads[0]);
    CHECK(merged[i] == merged[0]);
  }
}

void wrong_numbers_are_errors_that_name_them(Pool& pool) {
  const std::vector<float> rows(6), grad(8);
  std::vector<float> out(8), row_grad(6);
  std::vector<std::int32_t> positions(4);
  const std::array<std::int32_t, 4> index{0, 1, 2, -1}, high{0, 3, 1, 1}, low{0, -2, 1, 1};
  const std::array<std::int64_t, 3> falling{0, 2, 1}, beyond{0, 2, 5};
  gather(rows, 2, {index, {}, {}, 2}, out, pool);
  test::check_refused([&] { gather(rows, 2, {high, {}, {}, 2}, out, pool); }, "found 3 at 1");
  test::check_refused([&] { gather(rows, 2, {low, {}, {}, 2}, out, pool); }, "found -2 at 1");
  test::check_refused(
      [&] { gather(rows, 2, {index, falling, {}, 2}, std::span(out).first(4), pool); }, "found 1");
  test::check_refused([&] { bag_of(beyond, positions); },
                      "expected offsets[2] from 2 to 4, found 5");
  test::check_refused([&] { bag_of({}, positions); }, "found 0");
  const BagGrads grads{grad.data(), 2, 2, 2, 4};
  const std::array<std::int32_t, 4> order{0, 1, 2, 3}, starts{0, 1, 3, 4}, bags{0, 1, 4, 3};
  const std::array<std::int32_t, 4> far_starts{0, 1, 3, 9}, back_starts{0, 3, 1, 4},
      far_order{0, 1, 4, 3};
  scatter(grads, {order, starts, {}, {}}, row_grad, pool);
  test::check_refused([&] { scatter(grads, {order, far_starts, {}, {}}, row_grad, pool); },
                      "expected starts[3] of 3 to 4, found 9");
  test::check_refused([&] { scatter(grads, {order, back_starts, {}, {}}, row_grad, pool); },
                      "expected starts[2] of 3 to 4, found 1");
  test::check_refused([&] { scatter(grads, {far_order, starts, {}, {}}, row_grad, pool); },
                      "expected order[2] of 0 to 3, found 4");
  test::check_refused([&] { scatter(grads, {order, starts, bags, {}}, row_grad, pool); },
                      "expected bags[2] of -1 to 3, found 4");
}

void salt_separates_features_and_keeps_padding(Random& random) {
  const auto values = random_values(random, 300);
  const std::array<std::uint64_t, 3> salts{random.next(), random.next(), random.next()};
  std::vector<std::uint64_t> out(300), ragged(300);
  salt(values, {}, salts, 0, out);
  for (std::size_t i = 0; i < 300; ++i) {
    CHECK_EQUAL(out[i], values[i] == 0 ? 0 : mix64(values[i] ^ salts[i / 100]));
  }
  const std::array<std::int64_t, 7> offsets{0, 50, 100, 150, 200, 250, 300};
  salt(values, offsets, salts, 0, ragged);
  CHECK(ragged == out);
  // The value whose image is the padding key takes the padding key's image: still a bijection.
  const std::uint64_t padding = mix64(5 ^ salts[0]);
  const std::array<std::uint64_t, 2> special{5, padding};
  std::array<std::uint64_t, 2> image;
  salt(special, {}, std::span(salts).first(1), padding, image);
  CHECK_EQUAL(image[0], mix64(padding ^ salts[0]));
  CHECK_EQUAL(image[1], padding);
}

void one_per_bag_is_recognized() {
  CHECK(is_one_per_bag(std::array<std::int64_t, 4>{0, 1, 2, 3}));
  CHECK(!is_one_per_bag(std::array<std::int64_t, 4>{0, 1, 1, 3}));
  CHECK(!is_one_per_bag(std::array<std::int64_t, 4>{1, 2, 3, 4}));
}

void mean_weights_ignore_padding() {
  const std::array<std::int32_t, 6> index{3, 0, -1, 2, -1, 1};
  const std::array<std::int64_t, 5> offsets{1, 4, 4, 5, 6};
  std::array<float, 6> out;
  mean_weights(index, offsets, out);
  CHECK((out == std::array<float, 6>{0.0F, 0.5F, 0.0F, 0.5F, 0.0F, 1.0F}));
}

void split_groups_by_owner(Random& random, Pool& pool) {
  std::vector<std::uint16_t> owners(kNumBuckets);
  for (auto& owner : owners) owner = static_cast<std::uint16_t>(random.below(3));
  const auto keys = random_values(random, 50000);
  std::vector<std::int32_t> expected;
  const Split found = split(keys, owners, 3, pool);
  for (std::uint16_t owner = 0; owner < 3; ++owner) {
    const std::size_t before = expected.size();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (owners[bucket_of(keys[i])] == owner) expected.push_back(static_cast<std::int32_t>(i));
    }
    CHECK_EQUAL(found.counts[owner], static_cast<std::int64_t>(expected.size() - before));
  }
  CHECK(same(found.order.span(), std::span<const std::int32_t>(expected)));
  test::check_refused([&] { split(keys, owners, 2, pool); }, "found 2 for bucket");
  test::check_refused([&] { split(keys, std::span(owners).first(9), 3, pool); },
                      "expected 4096 owners, found 9");
}

void partition_finds_shared_keys_and_rows_return_to_their_places(Random& random, Pool& pool) {
  constexpr std::size_t kDim = 3;
  const std::set<std::uint64_t> values{0, ~std::uint64_t{0}, 7, 8, 9};
  const auto in_order = [&](std::vector<std::uint64_t> some) {
    const auto found = unique(some, std::nullopt, pool).keys;
    return std::vector<std::uint64_t>(found.data(), found.data() + found.size());
  };
  auto all = random_values(random, 5000);
  all.insert(all.end(), values.begin(), values.end());
  const auto keys = in_order(all), some = in_order(random_values(random, 4000));
  const auto first = in_order({0, 9});
  const std::vector<std::uint64_t> empty;
  for (const auto& sets : {std::vector<std::span<const std::uint64_t>>{},
                           {empty, empty},
                           {first, some},
                           {keys},
                           {some}}) {
    std::set<std::uint64_t> in_sets;
    for (const auto& set : sets) in_sets.insert(set.begin(), set.end());
    const Partition found = partition(keys, sets);
    CHECK_EQUAL(found.others.keys.size() + found.shared.keys.size(), keys.size());
    const auto rows = random_floats(random, keys.size() * kDim);
    std::vector<float> joined(rows.size(), -1.0F);
    for (const auto* part : {&found.others, &found.shared}) {
      std::vector<float> of_part;
      std::int32_t before = -1;
      for (std::size_t i = 0; i < part->keys.size(); ++i) {
        const auto place = static_cast<std::size_t>(part->places[i]);
        CHECK(part->places[i] > before);
        before = part->places[i];
        CHECK_EQUAL(part->keys[i], keys[place]);
        CHECK_EQUAL(in_sets.contains(keys[place]), part == &found.shared);
        const float* const row = rows.data() + place * kDim;
        of_part.insert(of_part.end(), row, row + kDim);
      }
      put_rows(of_part, part->places.span(), kDim, joined);
    }
    CHECK(joined == rows);
  }
  std::array<float, 2> row{}, out{};
  const std::array<std::int32_t, 1> behind{1}, before{-1};
  test::check_refused([&] { put_rows(row, behind, 2, out); }, "places below 1, found 1");
  test::check_refused([&] { put_rows(row, before, 2, out); }, "found -1");
  std::vector<std::uint64_t> many(5000);  // of few, any order is right
  std::iota(many.begin(), many.end(), 0);
  many = in_order(many);
  const std::vector<std::uint64_t> wrong{many.back(), many.front()};
  const std::vector<std::span<const std::uint64_t>> sets{many}, wrong_sets{wrong, many};
  test::check_refused([&] { partition(wrong, sets); }, "in the order of their buckets");
  test::check_refused([&] { partition(many, wrong_sets); }, "in the order of their buckets");
}

// One place for all, in the set or asked for: without a limit it takes longer than a test may.
void chosen_keys_are_partitioned() {
  constexpr std::uint64_t kKeys = 1'000'000;
  std::vector<std::uint64_t> keys, even, odd;
  for (std::uint64_t i = 0; i < kKeys; ++i) {
    keys.push_back(unmix64(i << 24));
    (i % 2 == 0 ? even : odd).push_back(keys.back());
  }
  const std::vector<std::span<const std::uint64_t>> sets{even};
  const Partition actual = partition(keys, sets);
  CHECK(same(actual.shared.keys.span(), std::span<const std::uint64_t>(even)));
  CHECK(same(actual.others.keys.span(), std::span<const std::uint64_t>(odd)));
}

void merge_sums_in_order_of_the_parts(Random& random, Pool& pool) {
  constexpr std::size_t kDim = 3;
  std::vector<std::vector<std::uint64_t>> keys;
  std::vector<std::vector<float>> grads;
  std::vector<GradPart> parts;
  std::map<std::uint64_t, std::vector<float>> expected;
  for (float scale : {1.0F, 0.25F, 1.0F}) {
    const auto values = random_values(random, 1000);
    const std::set<std::uint64_t> distinct(values.begin(), values.end());
    keys.emplace_back(distinct.begin(), distinct.end());
    grads.push_back(random_floats(random, distinct.size() * kDim));
    parts.push_back({keys.back(), grads.back(), scale});
    for (std::size_t i = 0; i < keys.back().size(); ++i) {
      auto& sum = expected.try_emplace(keys.back()[i], kDim, 0.0F).first->second;
      for (std::size_t d = 0; d < kDim; ++d) sum[d] += scale * grads.back()[i * kDim + d];
    }
  }
  parts.push_back({{}, {}, 1.0F});
  const Merged merged = merge(parts, kDim, pool);
  CHECK_EQUAL(merged.keys.size(), expected.size());
  for (std::size_t k = 0; k < merged.keys.size(); ++k) {
    if (k > 0) CHECK(bucket_of(merged.keys[k - 1]) <= bucket_of(merged.keys[k]));
    for (std::size_t d = 0; d < kDim; ++d)
      CHECK_EQUAL(merged.grads[k * kDim + d], expected[merged.keys[k]][d]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Random random(test::seed_of(argc, argv));
  for (int threads : {1, 4}) {
    Pool pool(threads);
    unique_equals_a_map(random, pool);
    distinct_are_sorted(random, pool);
    occurrences_refuse_a_wrong_index(pool);
    for (int round = 0; round < 20; ++round) gather_and_scatter_equal_a_loop(random, pool);
    wrong_numbers_are_errors_that_name_them(pool);
    split_groups_by_owner(random, pool);
    merge_sums_in_order_of_the_parts(random, pool);
    partition_finds_shared_keys_and_rows_return_to_their_places(random, pool);
  }
  chosen_values_have_one_row_each(random);
  chosen_keys_are_partitioned();
  large_batches_are_the_same_for_any_number_of_threads(random);
  salt_separates_features_and_keeps_padding(random);
  one_per_bag_is_recognized();
  mean_weights_ignore_padding();
  return 0;
}
