// Table: statistics, expiry, limits and changes since a version; and all of them by many callers at
// once, for TSan.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "table/table.h"

using namespace trireme;

namespace {

using Keys = std::vector<std::uint64_t>;
constexpr std::uint32_t kDay = kSecondsPerDay;

TableConfig scored(int dim) {
  TableConfig config;
  config.dims = {dim};
  config.rule.name = "adagrad";
  config.policy.is_scored = true;
  config.policy.rates = {.nonclk_coeff = 0.5, .click_coeff = 2.0, .decay_rate = 0.5};
  config.policy.delete_threshold = 0.25;
  config.policy.delete_after_unseen_days = 10;
  return config;
}

Keys random_keys(test::Random& random, std::size_t n) {
  Keys keys(n);
  for (std::uint64_t& key : keys) key = random.next();
  return keys;
}

// Each key is shown once, and clicked if it is odd.
void push(Table& table, const Keys& keys, PushId id, std::uint32_t time, std::uint32_t version,
          Pool& pool) {
  const std::vector<float> grads(keys.size() * static_cast<std::size_t>(table.classes()[0].dim()),
                                 0.5F);
  std::vector<float> show_click;
  for (const std::uint64_t key : keys) {
    show_click.push_back(1.0F);
    show_click.push_back(static_cast<float>(key & 1));
  }
  const bool is_scored = table.is_scored();
  table.update(keys, grads.data(), std::array{id}, RuleValues{.lr = 0.1}, pool,
               {.time = time,
                .version = version,
                .show_click = is_scored ? show_click.data() : nullptr,
                .features = nullptr,
                .counts = nullptr});
}

ShowClick statistics_of(const Table& table, std::uint64_t key, const DataTime& now, Pool& pool) {
  std::array<double, 2> out{};
  table.statistics(std::array{key}, out.data(), now, pool);
  return {.show = out[0], .click = out[1]};
}

void shows_fade_by_data_time_alone() {
  Pool pool(1);
  Table table(scored(3));
  push(table, {7, 8}, {0, 1}, 5 * kDay + 100, 0, pool);
  push(table, {7}, {0, 2}, 6 * kDay - 1, 0, pool);  // the same day
  push(table, {7}, {0, 3}, 7 * kDay, 0, pool);      // two days later: 2 / 4 + 1
  push(table, {7}, {0, 4}, 6 * kDay, 0, pool);      // late: counts as on the newest day
  const ShowClick found = statistics_of(table, 7, {7 * kDay, false}, pool);
  CHECK_EQUAL(found.show, 2.5);
  CHECK_EQUAL(found.click, 2.5);
  CHECK_EQUAL(statistics_of(table, 7, {7 * kDay, true}, pool).show, 1.25);
  CHECK_EQUAL(statistics_of(table, 8, {7 * kDay, false}, pool).show, 0.25);
  CHECK_EQUAL(statistics_of(table, 8, {7 * kDay, false}, pool).click, 0.0);
  CHECK_EQUAL(statistics_of(table, 9, {7 * kDay, false}, pool).show, 0.0);
}

void shrink_removes_what_the_policy_lets_go() {
  Pool pool(1);
  Table table(scored(3));
  push(table, {8}, {0, 1}, 5 * kDay, 3, pool);  // score 0.5, half of it every day
  const std::uint32_t bucket = bucket_of(8);
  CHECK_EQUAL(table.shrink(bucket, {6 * kDay, false}, 3).num_expired, 0U);  // 0.25 is not below
  CHECK_EQUAL(table.shrink(bucket, {6 * kDay, true}, 4).num_expired, 1U);
  CHECK_EQUAL(table.shrink(bucket, {6 * kDay, true}, 4).num_expired, 0U);
  CHECK_EQUAL(table.num_rows(), 0U);
  CHECK_EQUAL(table.counters().expired, 1U);
  CHECK_EQUAL(table.snapshot(bucket, 3).removed.size(), 1U);
  CHECK_EQUAL(table.snapshot(bucket, 4).removed.size(), 0U);
  table.forget_removed(4);
  bool is_refused = false;
  try {
    table.snapshot(bucket, 3);
  } catch (const Error& error) {
    is_refused = error.code() == ErrorCode::kBadRequest;
  }
  CHECK(is_refused);
}

void a_limited_table_stays_small(std::uint64_t seed) {
  test::Random random(seed);
  Pool pool(2);
  TableConfig config = scored(5);
  config.policy = PolicyConfig();
  config.policy.max_rows = 5 * kNumBuckets;
  Table table(config);
  std::size_t bytes = 0;
  for (std::int64_t sequence = 1; sequence <= 70; ++sequence) {
    const Keys keys = random_keys(random, 10'000);
    push(table, keys, {0, sequence}, static_cast<std::uint32_t>(sequence), 0, pool);
    CHECK(table.num_rows() <= 5 * kNumBuckets);
    if (sequence == 40) bytes = table.bytes();
  }
  CHECK(table.num_rows() > 4 * kNumBuckets);
  CHECK_EQUAL(table.counters().admitted - table.counters().evicted, table.num_rows());
  // Removed rows and keys do not increase the memory.
  CHECK(table.bytes() < bytes + bytes / 8);
}

// Against a map from key to the version it last changed with, while lines fill, grow and empty.
void snapshots_hold_what_changed_since(std::uint64_t seed) {
  test::Random random(seed);
  Pool pool(2);
  TableConfig config = scored(2);
  config.policy = PolicyConfig();
  Table table(config);
  std::map<std::uint64_t, std::uint32_t> versions;
  const Keys keys = random_keys(random, 40'000);
  std::uint32_t version = 1;
  for (std::int64_t sequence = 1; sequence <= 60; ++sequence) {
    // Sometimes the version jumps so far that the versions of lines wrap around.
    version += sequence % 20 == 0 ? 50'000 : static_cast<std::uint32_t>(random.below(3));
    Keys some(random.below(2000));
    for (std::uint64_t& key : some) key = keys[random.below(keys.size())];
    push(table, some, {0, sequence}, 0, version, pool);
    for (const std::uint64_t key : some) versions[key] = version;
    if (sequence % 7 == 0) {
      some.resize(some.size() / 2);
      table.erase(some, pool);
      for (const std::uint64_t key : some) versions.erase(key);
    }
    const auto since =
        static_cast<std::uint32_t>(version - std::min<std::uint64_t>(version - 1, random.below(6)));
    std::map<std::uint64_t, std::uint32_t> found;
    for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
      const BucketContent content = table.snapshot(bucket, since);
      for (const std::uint64_t key : content.keys.span()) found[key] = versions[key];
    }
    std::map<std::uint64_t, std::uint32_t> expected;
    for (const auto& [key, of] : versions) {
      if (of > since) expected[key] = of;
    }
    CHECK(found == expected);
  }
}

void rows_are_applied_beside_others() {
  Pool pool(1);
  Table table(scored(2));
  Table other(scored(2));
  push(table, {5}, {0, 1}, kDay, 2, pool);
  const std::uint32_t bucket = bucket_of(5);
  const BucketContent content = table.snapshot(bucket);
  test::Random random(1);
  Keys own = {5};
  while (own.size() < 30) {
    if (const std::uint64_t key = random.next(); bucket_of(key) == bucket) own.push_back(key);
  }
  push(other, own, {0, 1}, 2 * kDay, 1, pool);
  other.apply(bucket,
              {.keys = content.keys.span(),
               .classes = content.classes.span(),
               .rows = content.rows.span(),
               .marks = {},
               .pending = {}},
              std::span(own).last(10));
  CHECK_EQUAL(other.num_rows(), 20U);
  CHECK_EQUAL(statistics_of(other, 5, {kDay, false}, pool).show, 1.0);
  CHECK_EQUAL(other.snapshot(bucket, 1).keys.size(), 1U);
  CHECK_EQUAL(other.snapshot(bucket, 1).removed.size(), 0U);
  CHECK_EQUAL(other.version(), 2U);
}

// ---- many callers ----

// Pushes, exports and shrinks at the same time: rows that stay have counted every push.
void pushes_exports_and_shrinks_go_together(std::uint64_t seed) {
  constexpr std::int64_t kPushes = 60;
  test::Random random(seed);
  const Keys kept = random_keys(random, 300);
  TableConfig config = scored(4);
  config.policy.max_rows = 8 * kNumBuckets;
  config.policy.rates.decay_rate = 1.0;
  Table table(config);
  Pool pool(2);
  std::atomic<std::size_t> num_writing{2};
  const auto write = [&](std::int64_t stream) {
    test::Random own(seed + 1 + static_cast<std::uint64_t>(stream));  // other keys than in `kept`
    for (std::int64_t sequence = 1; sequence <= kPushes; ++sequence) {
      Keys keys = random_keys(own, 1500);  // with old times: the limit removes them first
      push(table, keys, {2 * stream, sequence}, 1, static_cast<std::uint32_t>(sequence), pool);
      push(table, kept, {2 * stream + 1, sequence}, 5 * kDay, 0, pool);
    }
    --num_writing;
  };
  const auto shrink = [&] {
    for (std::uint32_t bucket = 0; num_writing > 0; bucket = (bucket + 1) % kNumBuckets) {
      table.shrink(bucket, {6 * kDay, false}, 0);
    }
  };
  const auto export_since = [&] {
    Pool own(1);
    std::vector<double> out(2 * kept.size());
    std::vector<float> scores(kept.size(), 0.125F);
    while (num_writing > 0) {
      const std::uint32_t since = table.version();
      table.raise_version(since + 1);
      for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += 5) {
        table.snapshot(bucket, since);
      }
      table.statistics(kept, out.data(), {6 * kDay, true}, own);
      table.settle(kept, scores.data());
      table.counters();
    }
  };
  std::vector<std::thread> threads;
  for (std::int64_t stream = 0; stream < 2; ++stream) threads.emplace_back(write, stream);
  threads.emplace_back(shrink);
  threads.emplace_back(export_since);
  for (std::thread& thread : threads) thread.join();
  for (const std::uint64_t key : kept) {
    const ShowClick found = statistics_of(table, key, {5 * kDay, false}, pool);
    CHECK_EQUAL(found.show, 2.0 * kPushes);
    CHECK_EQUAL(found.click, (key & 1) == 1 ? 2.0 * kPushes : 0.0);
  }
  const Counters counters = table.counters();
  CHECK_EQUAL(counters.admitted - counters.evicted - counters.expired, table.num_rows());
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  shows_fade_by_data_time_alone();
  shrink_removes_what_the_policy_lets_go();
  a_limited_table_stays_small(seed);
  snapshots_hold_what_changed_since(seed);
  rows_are_applied_beside_others();
  pushes_exports_and_shrinks_go_together(seed);
  return 0;
}
