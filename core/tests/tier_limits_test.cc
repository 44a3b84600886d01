// A table with an SSD tier at its limits: many callers, full and damaged devices, small budgets.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "fake_device.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using test::Counted;
using test::Keys;
using test::keys_of_buckets;
using test::own_bytes;
using test::rows_of;
using test::RowsByKey;
using test::tier_config;

// Counts how often each key was pushed by several threads, while others look up, take snapshots and
// shrink.
void test_many_callers(std::uint64_t seed) {
  constexpr int kNumPushers = 3, kNumPushes = 20;
  test::Random random(seed);
  const Keys keys = keys_of_buckets(random, 64, 40000);
  TableConfig config;
  config.dims = {8};
  config.rule.name = "sgd";
  config.initializer = "constant";
  config.absent = "zeros";
  const std::size_t own = own_bytes(config);
  config.tier = tier_config(std::make_shared<ssd::FakeDevice>(seed), own + (std::size_t{1} << 20));
  Table table(config);
  std::vector<std::vector<int>> counts(kNumPushers, std::vector<int>(keys.size()));
  std::vector<std::thread> threads;
  std::atomic<int> num_left = kNumPushers;
  for (int t = 0; t < kNumPushers; ++t) {
    threads.emplace_back([&, t] {
      test::Random own_random(seed * 100 + static_cast<std::uint64_t>(t));
      Pool pool(1);
      for (std::int64_t push = 1; push <= kNumPushes; ++push) {
        Keys some(1000);
        for (std::uint64_t& key : some) {
          const std::size_t i = own_random.below(own_random.below(2) == 0 ? 1000 : keys.size());
          key = keys[i];
          ++counts[static_cast<std::size_t>(t)][i];
        }
        const std::vector<float> grads(some.size() * 8, -1.0F);
        table.update(some, grads.data(), std::array{PushId{t, push}}, RuleValues{.lr = 1.0}, pool);
      }
      --num_left;
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      test::Random own_random(seed * 100 + 50 + static_cast<std::uint64_t>(t));
      Pool pool(2);
      std::vector<float> weights(500 * 8);
      while (num_left > 0) {
        Keys some(500);
        for (std::uint64_t& key : some) key = keys[own_random.below(keys.size())];
        table.lookup(some, weights.data(), pool);
        for (std::size_t i = 0; i < weights.size(); i += 8) {
          for (std::size_t j = 1; j < 8; ++j) CHECK_EQUAL(weights[i + j], weights[i]);
        }
        table.snapshot(bucket_of(some[0]));
        table.shrink(bucket_of(some[1]), {1, false}, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Pool pool(1);
  std::vector<float> weights(keys.size() * 8);
  table.lookup(keys, weights.data(), pool);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    int count = 0;
    for (const std::vector<int>& of_one : counts) count += of_one[i];
    CHECK_EQUAL(weights[i * 8], static_cast<float>(count));
  }
  CHECK(table.tier()->use().num_misses > 0);
  CHECK(table.bytes() <= config.tier.memory_bytes);
}

void test_a_full_device_refuses_pushes_and_answers_lookups(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  counted.device->set_faults({.capacity_bytes = std::size_t{1} << 20});
  std::size_t num_pushed = 0;
  std::optional<Error> refused;
  while (!refused && num_pushed + 1000 <= counted.keys.size()) {
    const auto some = std::span(counted.keys).subspan(num_pushed, 1000);
    try {
      counted.push(some);
      num_pushed += 1000;
    } catch (const Error& error) {
      refused = error;
    }
  }
  CHECK(refused && refused->code() == ErrorCode::kResourceExhausted);
  CHECK(num_pushed > 10000);
  const std::span<const std::uint64_t> all = counted.keys;
  for (const float n : counted.counts_of(all.first(num_pushed))) CHECK_EQUAL(n, 1);
  // With space again, the same push ends what it began.
  counted.device->set_faults({});
  --counted.sequence;
  counted.push(all.subspan(num_pushed, 1000));
  for (const float n : counted.counts_of(all.first(num_pushed + 1000))) CHECK_EQUAL(n, 1);
  CHECK_EQUAL(counted.table->num_rows(), num_pushed + 1000);
}

void test_a_settle_that_fails_tells_how_many_rows_are_settled(std::uint64_t seed) {
  test::Random random(seed);
  const Keys keys = keys_of_buckets(random, 64, 40000);
  const auto device = std::make_shared<ssd::FakeDevice>(seed);
  TableConfig config;
  config.dims = {8};
  config.rule.name = "sgd";
  config.policy.is_scored = true;
  config.tier = tier_config(device, own_bytes(config) + (std::size_t{1} << 20));
  Table table(config);
  Pool pool(2);
  for (std::size_t i = 0; i < keys.size(); i += 1000) {
    const std::vector<float> grads(1000 * 8, 1.0F), show_click(2 * 1000, 1.0F);
    table.update(std::span(keys).subspan(i, 1000), grads.data(),
                 std::array{PushId{0, static_cast<std::int64_t>(i) + 1}}, RuleValues{}, pool,
                 {.show_click = show_click.data()});
  }
  const std::vector<float> scores(keys.size(), 0.25F);
  const RowsByKey before = rows_of(table);
  std::size_t num_settled = 0, num_partial = 0, num_refused = 0;
  while (num_settled < keys.size()) {
    device->set_faults({.num_reads = random.below(4) == 0 ? 0 : random.below(100)});
    const std::size_t n = std::min<std::size_t>(2000, keys.size() - num_settled);
    try {
      const std::size_t done = table.settle(std::span(keys).subspan(num_settled, n), scores.data());
      CHECK(done > 0 && done <= n);
      num_settled += done;
      num_partial += done < n ? 1U : 0U;
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kUnavailable);
      ++num_refused;
    }
  }
  device->set_faults({});
  CHECK(num_partial > 0 && num_refused > 0);
  const RowLayout& layout = table.classes()[0];
  for (auto& [key, row] : rows_of(table)) {
    std::vector<std::uint8_t> expected = before.at(key);
    layout.score(reinterpret_cast<std::byte*>(expected.data())).delta_score -= 0.25F;
    CHECK(row == expected);
  }
}

void test_a_damaged_page_is_an_error_of_its_rows_alone(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  const std::vector<std::string> names = counted.device->names();
  CHECK(!names.empty());
  const std::uint64_t num_bits = (std::uint64_t{256} << 10) * 8;
  for (int i = 0; i < 20; ++i) {
    counted.device->flip_bit(names[counted.random.below(names.size())],
                             counted.random.below(num_bits));
  }
  std::size_t num_damaged = 0;
  for (const std::uint64_t key : counted.keys) {
    try {
      CHECK_EQUAL(counted.count_of(key), 1);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kCorruption);
      const std::string what = error.what();
      CHECK(what.find("bucket " + std::to_string(bucket_of(key)) + " ") != std::string::npos);
      CHECK(what.find(".rows at offset ") != std::string::npos);
      ++num_damaged;
    }
  }
  CHECK(num_damaged > 0 && num_damaged <= 20 * 100);
}

// Whoever reads at a place where no page is yet, of an older segment with that number, must not
// take what was there for the page that comes to lie there.
void test_a_page_that_is_not_there_yet_is_not_a_damaged_one() {
  ssd::PageLog log({std::make_shared<ssd::FakeDevice>(1)},
                   {.segment_pages = 8, .buffer_pages = 4, .num_buffers = 2});
  std::vector<std::byte> page(ssd::kBlockBytes);
  ssd::PageHeader header{};
  header.num_rows = 1;
  header.row_bytes = 8;
  ssd::seal(page, header);
  ssd::PageLog::Room room = log.reserve(1);
  CHECK_EQUAL(log.append(room, page), 0U);
  const ssd::PagesRead read = log.read({0, 5});
  CHECK(read.find(0)->generation == log.generation(0) && read.find(0)->error == 0);
  CHECK(read.find(5)->generation == 0 && read.find(5)->error == 0);
}

// A flush ends the buffer that is filling. What is left of it may have been promised, and until a
// write has ended there is no other.
void test_a_flush_takes_no_room_that_was_promised() {
  const auto device = std::make_shared<ssd::FakeDevice>(1);
  ssd::PageLog log({device}, {.segment_pages = 64,
                              .buffer_pages = 4,
                              .num_buffers = 2,
                              .timeout = std::chrono::milliseconds(50)});
  std::vector<std::byte> page(ssd::kBlockBytes);
  ssd::PageHeader header{};
  header.num_rows = 1;
  header.row_bytes = 8;
  ssd::seal(page, header);
  device->set_faults({.stuck = 1});
  ssd::PageLog::Room first = log.reserve(4);
  for (int i = 0; i < 3; ++i) log.append(first, page);
  ssd::PageLog::Room second = log.reserve(4);
  bool is_late = false;
  try {
    log.flush();
  } catch (const Error& error) {
    is_late = error.code() == ErrorCode::kDeadlineExceeded;
  }
  CHECK(is_late);
  log.append(first, page);
  for (int i = 0; i < 4; ++i) log.append(second, page);
  device->set_faults({});
  log.flush();
  CHECK_EQUAL(log.use().pages_written, 8U);
}

void test_a_smaller_budget_holds_when_it_has_been_set(std::uint64_t seed) {
  Counted counted(seed, 40000, std::size_t{8} << 20);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  const std::size_t budget = counted.config.tier.memory_bytes - (std::size_t{7} << 20);
  CHECK(counted.table->bytes() > budget);
  counted.table->set_memory(budget);
  CHECK(counted.table->bytes() <= budget);
  for (const float n : counted.counts_of(counted.keys)) CHECK_EQUAL(n, 1);
}

// Most buckets have few rows, and those that leave memory are of other buckets than the few that
// have enough rows for a page worth writing.
void test_a_smaller_budget_holds_where_few_buckets_have_many_rows(std::uint64_t seed) {
  Counted counted(seed, 20000, std::size_t{4} << 20, kNumBuckets);
  std::ranges::sort(counted.keys, {}, [](std::uint64_t key) { return bucket_of(key); });
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  const std::size_t held = counted.table->bytes();
  for (const std::size_t share : {32, 16, 8}) {
    const std::size_t budget = held - (std::size_t{1} << 20) / share;
    counted.table->set_memory(budget);
    CHECK(counted.table->bytes() <= budget);
  }
  for (const float n : counted.counts_of(counted.keys)) CHECK_EQUAL(n, 1);
}

// No row class has as much memory as is to be given up, and no bucket rows enough for a page.
void test_a_smaller_budget_holds_where_many_row_classes_share_it(std::uint64_t seed) {
  constexpr int kNumClasses = 16, kNumKeys = 1000;
  test::Random random(seed);
  TableConfig config;
  for (int i = 0; i < kNumClasses; ++i) config.dims.push_back(8 + i);
  config.rule.name = "sgd";
  config.initializer = "constant";
  config.absent = "zeros";
  config.tier = tier_config(std::make_shared<ssd::FakeDevice>(seed),
                            own_bytes(config) + (std::size_t{4} << 20));
  Table table(config);
  Pool pool(1);
  const Keys keys = keys_of_buckets(random, kNumBuckets, kNumClasses * kNumKeys);
  std::vector<std::vector<float>> rows;
  std::vector<Table::Gradients> grads;
  for (const int dim : config.dims) {
    rows.emplace_back(static_cast<std::size_t>(dim) * kNumKeys, -1.0F);
    grads.push_back({rows.back().data(), kNumKeys});
  }
  table.update(keys, grads, std::array{PushId{0, 1}}, RuleValues{.lr = 1.0}, pool);
  const std::size_t held = table.bytes();
  for (const std::size_t share : {2, 1}) {
    const std::size_t budget = held - (std::size_t{1} << 20) / share;
    table.set_memory(budget);
    CHECK(table.bytes() <= budget);
  }
  std::vector<float> weights(keys.size() * 8);
  CHECK_EQUAL(table.lookup(keys, weights.data(), pool), 0U);
  for (const float weight : weights) CHECK_EQUAL(weight, 1);
}

void test_a_budget_that_the_tier_alone_exceeds_is_refused() {
  TableConfig config;
  config.dims = {8};
  config.rule.name = "sgd";
  config.tier = tier_config(std::make_shared<ssd::FakeDevice>(1), 1000);
  bool is_refused = false;
  try {
    const Table table(config);
  } catch (const Error& error) {
    is_refused = error.code() == ErrorCode::kBadRequest;
  }
  CHECK(is_refused);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_a_budget_that_the_tier_alone_exceeds_is_refused();
  test_a_page_that_is_not_there_yet_is_not_a_damaged_one();
  test_a_flush_takes_no_room_that_was_promised();
  test_a_settle_that_fails_tells_how_many_rows_are_settled(seed);
  test_a_smaller_budget_holds_when_it_has_been_set(seed);
  test_a_smaller_budget_holds_where_few_buckets_have_many_rows(seed);
  test_a_smaller_budget_holds_where_many_row_classes_share_it(seed);
  test_many_callers(seed);
  test_a_full_device_refuses_pushes_and_answers_lookups(seed);
  test_a_damaged_page_is_an_error_of_its_rows_alone(seed);
}
