// Wide rows in and out of tables and blocks against plain models, and beside other callers, for
// TSan.
#include "table/block.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using Keys = std::vector<std::uint64_t>;
using Bytes = std::vector<std::uint8_t>;

struct Rows {
  Keys keys;
  Bytes classes;
  Bytes wide;

  Table::WidePart part() const { return {.keys = keys, .classes = classes, .rows = wide.data()}; }
};

TableConfig config_of(std::vector<int> dims, bool is_scored) {
  TableConfig config;
  config.dims = std::move(dims);
  config.rule.name = "adam";
  config.rule.bias_correction = "row";
  config.policy.is_scored = is_scored;
  return config;
}

// Random rows of random classes, versions below 100.
Rows random_rows(test::Random& random, const Table& table, Keys keys) {
  Rows rows{.keys = std::move(keys), .classes = {}, .wide = {}};
  const std::size_t row_bytes = table.row_bytes();
  rows.wide.resize(rows.keys.size() * row_bytes);
  for (std::size_t i = 0; i < rows.keys.size(); ++i) {
    const auto row_class =
        static_cast<int>(random.below(static_cast<std::uint64_t>(table.classes().size())));
    rows.classes.push_back(static_cast<std::uint8_t>(row_class));
    const RowLayout& layout = table.classes()[row_class];
    std::uint8_t* row = &rows.wide[i * row_bytes];
    for (std::size_t b = 0; b < row_bytes; ++b) row[b] = static_cast<std::uint8_t>(random.next());
    const auto wide = static_cast<std::size_t>(layout.wide_dim());
    for (int plane = 0; plane < 1 + layout.state_planes(); ++plane) {
      std::uint8_t* floats = row + static_cast<std::size_t>(plane) * wide * sizeof(float);
      std::fill(floats + static_cast<std::size_t>(layout.dim()) * sizeof(float),
                floats + wide * sizeof(float), std::uint8_t{0});
    }
    const auto version = static_cast<std::uint32_t>(random.below(100));
    std::memcpy(row + layout.wide_stamp_offset(), &version, sizeof version);
  }
  return rows;
}

using Model = std::map<std::uint64_t, std::pair<std::uint8_t, Bytes>>;

void put(Model& model, const Rows& rows, std::size_t row_bytes) {
  for (std::size_t i = 0; i < rows.keys.size(); ++i) {
    const auto begin = rows.wide.begin() + static_cast<std::ptrdiff_t>(i * row_bytes);
    model[rows.keys[i]] = {rows.classes[i],
                           Bytes(begin, begin + static_cast<std::ptrdiff_t>(row_bytes))};
  }
}

void check_equal_model(const Table& table, const Model& model, Pool& pool) {
  CHECK_EQUAL(table.num_rows(), model.size());
  Keys keys;
  for (const auto& [key, row] : model) keys.push_back(key);
  Bytes classes(keys.size());
  Bytes wide(keys.size() * table.row_bytes());
  table.read_wide(keys, classes.data(), wide.data(), pool);
  std::size_t i = 0;
  for (const auto& [key, row] : model) {
    CHECK_EQUAL(int{classes[i]}, int{row.first});
    CHECK(std::equal(row.second.begin(), row.second.end(), &wide[i++ * table.row_bytes()]));
  }
}

// Some keys twice, some of the table, some of another class than before.
void written_rows_are_read(test::Random& random, const TableConfig& config, std::size_t num_keys) {
  Pool pool(3);
  Table table(config);
  Model model;
  for (int round = 0; round < 4; ++round) {
    Keys keys = test::distinct_keys(random, num_keys);
    for (const auto& [key, row] : model) {
      if (random.below(3) == 0) keys.push_back(key);
    }
    const std::size_t num_twice = config.dims.size() > 1 ? 0 : num_keys / 10;
    for (std::size_t i = 0; i < num_twice; ++i) keys.push_back(keys[random.below(keys.size())]);
    Rows rows = random_rows(random, table, std::move(keys));
    table.write_wide(std::array{rows.part()}, pool);
    put(model, rows, table.row_bytes());
    check_equal_model(table, model, pool);
    CHECK(table.version() < 100);
  }
  // Other rows stay, and the table's version replaces those of the rows.
  const auto stamp = [&](std::uint8_t* row, std::uint32_t version) {
    std::memcpy(row + table.classes().wide().wide_stamp_offset(), &version, sizeof version);
  };
  Rows rows = random_rows(random, table, test::distinct_keys(random, num_keys));
  table.raise_version(200);
  table.write_wide(std::array{rows.part()}, pool, true);
  for (std::size_t i = 0; i < rows.keys.size(); ++i) stamp(&rows.wide[i * table.row_bytes()], 200);
  put(model, rows, table.row_bytes());
  check_equal_model(table, model, pool);
  CHECK_EQUAL(table.version(), 200U);
  std::size_t num_changed = 0;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    num_changed += table.snapshot(bucket, 100).keys.size();
  }
  CHECK_EQUAL(num_changed, num_keys);

  Table merged(config_of(config.dims, config.policy.is_scored));
  Rows others = random_rows(random, table, test::distinct_keys(random, num_keys));
  std::copy_n(rows.keys.begin(), num_keys / 2, others.keys.begin());
  merged.write_wide(std::array{others.part()}, pool);
  Model of_both;
  put(of_both, others, table.row_bytes());
  merged.raise_version(201);
  merged.merge(table, 0, kNumBuckets / 2, pool);
  merged.merge(table, kNumBuckets / 2, kNumBuckets / 2, pool);
  for (auto [key, row] : model) {
    stamp(row.second.data(), 201);
    of_both[key] = row;
  }
  check_equal_model(merged, of_both, pool);
}

void rows_that_do_not_fit_are_refused(test::Random& random) {
  Pool pool(2);
  Table table(config_of({5, 3}, false));
  Rows rows = random_rows(random, table, test::distinct_keys(random, 20'000));
  rows.classes[17'000] = 9;
  test::check_refused([&] { table.write_wide(std::array{rows.part()}, pool); });
  rows.classes[17'000] = 1;
  rows.wide[17'000 * table.row_bytes() + 4 * sizeof(float)] = 1;  // behind its three weights
  test::check_refused([&] { table.write_wide(std::array{rows.part()}, pool); });
  CHECK_EQUAL(table.num_rows(), 0U);
  const Table other(config_of({5, 4}, false));
  test::check_refused([&] { table.merge(other, 0, kNumBuckets, pool); });
  test::check_refused([&] { table.merge(table, 0, kNumBuckets, pool); });
  test::check_refused([&] { table.copy(other, 0, kNumBuckets, pool); });
  test::check_refused([&] { table.copy(Table(config_of({5, 3}, false)), 1, kNumBuckets, pool); });
  test::check_refused([&] { table.merge(Table(config_of({5, 3}, false)), 1, kNumBuckets, pool); });
}

// What belongs to the rows comes with them, and what was there before goes.
void a_copy_has_all_of_a_table(test::Random& random) {
  Pool pool(2);
  Table table(config_of({4}, false)), copy(config_of({4}, false));
  const Rows rows = random_rows(random, table, test::distinct_keys(random, 20'000));
  const Rows others = random_rows(random, table, test::distinct_keys(random, 5'000));
  table.write_wide(std::array{rows.part()}, pool);
  copy.write_wide(std::array{others.part()}, pool);
  table.advance(std::array{PushId{.stream = 3, .sequence = 7}});
  const std::span<const std::uint64_t> removed = std::span(rows.keys).first(4'000);
  table.erase(removed, pool);
  table.raise_version(table.version() + 1);
  const Rows back = random_rows(random, table, Keys(removed.begin(), removed.begin() + 1'000));
  table.write_wide(std::array{back.part()}, pool, true);
  for (int round = 0; round < 2; ++round) {  // a repetition changes nothing
    copy.copy(table, 0, 1000, pool);
    copy.copy(table, 1000, kNumBuckets - 1000, pool);
  }
  CHECK_EQUAL(copy.num_rows(), 17'000U);
  CHECK_EQUAL(copy.version(), table.version());
  std::size_t num_removed = 0;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    const BucketContent of_table = table.snapshot(bucket, 0, 1),
                        of_copy = copy.snapshot(bucket, 0, 1);
    CHECK(of_copy.marks == of_table.marks);
    CHECK_EQUAL(of_copy.removed_since, of_table.removed_since);
    num_removed += of_copy.removed.size();
  }
  CHECK_EQUAL(num_removed, 3'000U);
  Model model;
  const auto put_some = [&](const Rows& all, std::size_t begin) {
    for (std::size_t i = begin; i < all.keys.size(); ++i) {
      Rows one{.keys = {all.keys[i]}, .classes = {all.classes[i]}, .wide = {}};
      const auto first = all.wide.begin() + static_cast<std::ptrdiff_t>(i * table.row_bytes());
      one.wide.assign(first, first + static_cast<std::ptrdiff_t>(table.row_bytes()));
      put(model, one, table.row_bytes());
    }
  };
  put_some(rows, 4'000);
  Rows stamped = back;
  for (std::size_t i = 0; i < stamped.keys.size(); ++i) {
    const std::uint32_t version = table.version();
    std::memcpy(&stamped.wide[i * table.row_bytes() + table.classes().wide().wide_stamp_offset()],
                &version, sizeof version);
  }
  put_some(stamped, 0);
  check_equal_model(copy, model, pool);
}

// ---- blocks ----

struct Block {
  Block(const RowLayout& layout, std::size_t num_rows)
      : weights(num_rows * static_cast<std::size_t>(layout.dim())),
        state(num_rows * static_cast<std::size_t>(layout.state_floats())),
        stamps(num_rows),
        shows(num_rows),
        delta_scores(num_rows),
        features(num_rows) {}
  BlockRows rows() {
    return {.num_rows = stamps.size(),
            .weights = {weights.data(), row_bytes_of(weights)},
            .state = {state.data(), row_bytes_of(state)},
            .stamps = {stamps.data()},
            .shows = {shows.data()},
            .delta_scores = {delta_scores.data()},
            .features = {features.data()}};
  }
  std::size_t row_bytes_of(const std::vector<float>& floats) const {
    return floats.size() / stamps.size() * sizeof(float);
  }
  std::vector<float> weights, state;
  std::vector<Stamp> stamps;
  std::vector<ShowClick> shows;
  std::vector<float> delta_scores;
  std::vector<std::uint32_t> features;
};

std::vector<std::int32_t> random_slots(test::Random& random, std::size_t n, std::size_t of) {
  std::vector<std::int32_t> slots(of);
  std::iota(slots.begin(), slots.end(), 0);
  for (std::size_t i = 0; i < n; ++i) std::swap(slots[i], slots[i + random.below(of - i)]);
  slots.resize(n);
  return slots;
}

void rows_of_a_block_come_back(test::Random& random, int row_class) {
  constexpr std::size_t kRows = 9'000;
  Pool pool(3);
  const Table table(config_of({6, 3}, true));
  const RowLayout& layout = table.classes()[row_class];
  Rows rows = random_rows(random, table, test::distinct_keys(random, kRows));
  for (std::size_t i = 0; i < kRows; ++i) {  // all of one class
    std::uint8_t* row = &rows.wide[i * table.row_bytes()];
    for (int plane = 0; plane < 1 + layout.state_planes(); ++plane) {
      const auto begin = static_cast<std::size_t>(plane * layout.wide_dim() + layout.dim());
      const auto end = static_cast<std::size_t>((plane + 1) * layout.wide_dim());
      std::fill(row + begin * sizeof(float), row + end * sizeof(float), std::uint8_t{0});
    }
  }
  Block block(layout, kRows + 100);
  const auto slots = random_slots(random, kRows, kRows + 100);
  split_wide(layout, rows.wide.data(), slots, block.rows(), pool);
  Bytes joined(rows.wide.size(), 0xFF);
  join_wide(layout, block.rows(), slots, joined.data(), pool);
  CHECK(joined == rows.wide);
  std::vector<float> weights(kRows * static_cast<std::size_t>(layout.dim()));
  block_weights(layout, block.rows(), slots, weights.data(), pool);
  for (std::size_t i = 0; i < kRows; ++i) {
    CHECK(std::memcmp(&weights[i * static_cast<std::size_t>(layout.dim())],
                      &rows.wide[i * table.row_bytes()],
                      static_cast<std::size_t>(layout.dim()) * sizeof(float)) == 0);
  }
  for (const std::int32_t slot : {-1, static_cast<int>(kRows + 100)}) {
    test::check_refused([&] {
      join_wide(layout, block.rows(), std::array{std::int32_t{0}, slot}, joined.data(), pool);
    });
  }
  if (layout.dim() == layout.wide_dim()) return;
  rows.wide[table.row_bytes() + static_cast<std::size_t>(layout.dim()) * sizeof(float)] = 1;
  test::check_refused([&] { split_wide(layout, rows.wide.data(), slots, block.rows(), pool); });
}

// A block and a table that get the same pushes have the same rows.
void updates_equal_those_of_a_table(test::Random& random) {
  constexpr std::size_t kRows = 5'000;
  constexpr int kDim = 5;
  Pool pool(3);
  TableConfig config = config_of({kDim}, true);
  config.policy.rates = {.nonclk_coeff = 0.5, .click_coeff = 2.0, .decay_rate = 0.5};
  Table table(config);
  const RowLayout& layout = table.classes()[0];
  const Keys keys = test::distinct_keys(random, kRows);
  Bytes classes(kRows);
  Bytes wide(kRows * table.row_bytes());
  Block block(layout, kRows);
  const auto all = random_slots(random, kRows, kRows);
  for (std::uint32_t step = 0; step < 5; ++step) {
    const auto of_step = random_slots(random, step == 0 ? kRows : kRows / 2, kRows);
    const std::size_t n = of_step.size();
    std::vector<float> grads(n * kDim);
    std::vector<float> show_click(2 * n);
    std::vector<std::uint32_t> features(n);
    Keys pushed;
    std::vector<std::int32_t> slots;
    for (std::size_t i = 0; i < n; ++i) {
      pushed.push_back(keys[static_cast<std::size_t>(of_step[i])]);
      slots.push_back(all[static_cast<std::size_t>(of_step[i])]);
      features[i] = static_cast<std::uint32_t>(random.below(7));
      show_click[2 * i] = static_cast<float>(1 + random.below(3));
      show_click[2 * i + 1] = static_cast<float>(random.below(2));
    }
    for (float& g : grads) g = static_cast<float>(random.below(1000)) / 500.0F - 1.0F;
    const RuleValues values{.lr = 0.1, .weight_decay = 0.01, .step = step + 1};
    const std::uint32_t time = step * kSecondsPerDay;
    if (step > 0) {
      const StatisticsPush push{.rates = config.policy.rates,
                                .version = step,
                                .time = time,
                                .show_click = show_click.data(),
                                .features = features.data()};
      update_block(layout, block.rows(), slots, grads.data(), *table.make_step(values, 0), push,
                   pool);
    }
    table.update(pushed, grads.data(), std::array{PushId{.stream = 0, .sequence = step + 1}},
                 values, pool,
                 {.time = time,
                  .version = step,
                  .show_click = show_click.data(),
                  .features = features.data(),
                  .counts = nullptr});
    table.read_wide(keys, classes.data(), wide.data(), pool);
    if (step == 0) {  // the block begins with these rows
      split_wide(layout, wide.data(), all, block.rows(), pool);
      continue;
    }
    Bytes joined(wide.size());
    join_wide(layout, block.rows(), all, joined.data(), pool);
    CHECK(joined == wide);
  }
}

// Rows whose parts lie as in wide rows: these are the memory of the block.
void blocks_lie_in_wide_rows(test::Random& random) {
  constexpr std::size_t kRows = 5'000;
  Pool pool(3);
  const Table table(config_of({5}, true));
  const RowLayout& layout = table.classes()[0];
  const std::size_t bytes = table.row_bytes();
  const Rows rows = random_rows(random, table, test::distinct_keys(random, kRows));
  std::vector<double> memory(kRows * bytes / sizeof(double));
  auto* const data = reinterpret_cast<std::uint8_t*>(memory.data());
  const auto part = [&]<class T>(std::size_t offset) {
    return BlockPart<T>{reinterpret_cast<T*>(data + offset), bytes};
  };
  const std::size_t stamp = layout.wide_stamp_offset(), score = stamp + sizeof(Stamp);
  const BlockRows block{
      .num_rows = kRows,
      .weights = part.operator()<float>(0),
      .state = part.operator()<float>(5 * sizeof(float)),
      .stamps = part.operator()<Stamp>(stamp),
      .shows = part.operator()<ShowClick>(score),
      .delta_scores = part.operator()<float>(score + offsetof(Score, delta_score)),
      .features = part.operator()<std::uint32_t>(score + offsetof(Score, feature))};
  std::vector<std::int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  split_wide(layout, rows.wide.data(), slots, block, pool);
  CHECK(std::memcmp(data, rows.wide.data(), rows.wide.size()) == 0);
  Block apart(layout, kRows);
  split_wide(layout, rows.wide.data(), slots, apart.rows(), pool);
  const Bytes zeros(rows.wide.size());
  split_wide(layout, zeros.data(), slots, block, pool);
  split_wide(layout, zeros.data(), slots, apart.rows(), pool);
  std::vector<float> grads(kRows * 5);
  for (float& g : grads) g = static_cast<float>(random.below(1000)) / 500.0F - 1.0F;
  const RuleValues values{.lr = 0.1, .step = 1};
  const std::vector<float> shows(2 * kRows, 1.0F);
  const StatisticsPush push{.rates = table.score_rates(),
                            .version = 7,
                            .time = 5 * 86'400,
                            .show_click = shows.data(),
                            .features = nullptr};
  for (const BlockRows& each : {block, apart.rows()}) {
    update_block(layout, each, slots, grads.data(), *table.make_step(values, 0), push, pool);
  }
  Bytes joined(rows.wide.size());
  join_wide(layout, apart.rows(), slots, joined.data(), pool);
  CHECK(joined != zeros);
  CHECK(std::memcmp(data, joined.data(), joined.size()) == 0);
}

// So many that they are read past the caches, and written in several parts.
void many_rows_come_back(test::Random& random) {
  constexpr std::size_t kRows = 150'000;
  Pool pool(3);
  TableConfig config;
  config.dims = {16};
  config.rule.name = "adagrad";
  Table table(config);
  CHECK(table.classes()[0].is_wide());
  const Rows rows = random_rows(random, table, test::distinct_keys(random, kRows));
  const std::size_t bytes = table.row_bytes(), half = kRows / 2;
  const Table::WidePart all = rows.part();
  for (int repetition = 0; repetition < 2; ++repetition) {  // first they are new
    table.write_wide(
        std::array{Table::WidePart{all.keys.first(half), all.classes.first(half), all.rows},
                   Table::WidePart{all.keys.subspan(half), all.classes.subspan(half),
                                   all.rows + half * bytes}},
        pool);
  }
  Keys keys = rows.keys;
  keys[7] = keys[kRows - 1] + 1;  // absent
  for (const std::size_t shift : {0, 1}) {
    Bytes wide(kRows * bytes + shift), classes(kRows);
    table.read_wide(keys, classes.data(), wide.data() + shift, pool);
    for (std::size_t i = 0; i < kRows; ++i) {
      CHECK_EQUAL(classes[i], i == 7 ? Table::kNoClass : std::uint8_t{0});
      const std::uint8_t* row = wide.data() + shift + i * bytes;
      CHECK(i == 7 ? std::all_of(row, row + bytes, [](std::uint8_t b) { return b == 0; })
                   : std::memcmp(row, all.rows + i * bytes, bytes) == 0);
    }
  }
}

// ---- many callers ----

void rows_are_written_beside_others(test::Random& random) {
  constexpr std::size_t kKeys = 6'000;
  Pool pool(2);
  Table table(config_of({4}, false));
  const Rows rows = random_rows(random, table, test::distinct_keys(random, kKeys));
  Table staged(config_of({4}, false));
  staged.write_wide(std::array{rows.part()}, pool);
  std::atomic<bool> is_done{false};
  std::thread reader([&] {
    std::vector<float> weights(kKeys * 4);
    while (!is_done) table.lookup(rows.keys, weights.data(), pool);
  });
  std::thread pusher([&] {
    const std::vector<float> grads(kKeys * 4, 0.5F);
    for (std::int64_t i = 1; !is_done; ++i) {
      table.update(rows.keys, grads.data(), std::array{PushId{.stream = 0, .sequence = i}},
                   RuleValues{.lr = 0.1}, pool);
    }
  });
  for (int i = 0; i < 10; ++i) {
    table.write_wide(std::array{rows.part()}, pool);
    table.merge(staged, 0, kNumBuckets, pool);
  }
  is_done = true;
  reader.join();
  pusher.join();
  CHECK_EQUAL(table.num_rows(), kKeys);
}

}  // namespace

int main(int argc, char** argv) {
  test::Random random(test::seed_of(argc, argv));
  written_rows_are_read(random, config_of({5}, false), 20'000);
  written_rows_are_read(random, config_of({5, 3, 1}, true), 3'000);
  TableConfig tiered = config_of({8}, true);
  tiered.tier = test::tier_config(std::make_shared<ssd::FakeDevice>(1),
                                  test::own_bytes(tiered) + (std::size_t{1} << 20));
  written_rows_are_read(random, tiered, 3'000);
  rows_that_do_not_fit_are_refused(random);
  a_copy_has_all_of_a_table(random);
  rows_of_a_block_come_back(random, 0);
  rows_of_a_block_come_back(random, 1);
  updates_equal_those_of_a_table(random);
  blocks_lie_in_wide_rows(random);
  many_rows_come_back(random);
  rows_are_written_beside_others(random);
  return 0;
}
