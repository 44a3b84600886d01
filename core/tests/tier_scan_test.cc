// What reads whole buckets of a table with an SSD tier: snapshots and evictions. They keep to the
// budget, need no row to leave memory, end what a fault has left, and pass over damaged pages.
#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using test::Counted;
using test::Keys;
using test::rows_of;

constexpr std::size_t kRoom = std::size_t{1} << 20;

void fill(Counted& counted) {
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
}

// How often each row of a bucket was pushed.
std::map<std::uint64_t, float> counts_of(const Table& table, std::uint32_t bucket) {
  const BucketContent content = table.snapshot(bucket);
  std::map<std::uint64_t, float> counts;
  for (std::size_t i = 0; i < content.keys.size(); ++i) {
    const auto* row = content.rows.data() + i * table.row_bytes();
    float weight;
    std::memcpy(&weight, row, sizeof weight);
    counts[content.keys[i]] = weight;
  }
  CHECK_EQUAL(counts.size(), content.keys.size());
  return counts;
}

// Some keys of a bucket are always pushed together: each snapshot must show all of them alike, and
// the others too.
void test_snapshots_beside_pushes_keep_to_the_budget(std::uint64_t seed) {
  constexpr std::uint32_t kBuckets = 4;
  Counted counted(seed, 60000, kRoom, kBuckets);
  fill(counted);
  const std::uint32_t bucket = bucket_of(counted.keys[0]);
  Keys together;
  std::size_t num_rows = 0;
  for (const std::uint64_t key : counted.keys) {
    if (bucket_of(key) != bucket) continue;
    if (++num_rows % 50 == 0) together.push_back(key);
  }
  std::atomic<bool> has_ended = false;
  std::atomic<std::size_t> bytes_max = 0, num_snapshots = 0;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    while (!has_ended) bytes_max = std::max<std::size_t>(bytes_max, counted.table->bytes());
  });
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        const std::uint32_t other = bucket + kNumBuckets / kBuckets * static_cast<unsigned>(i + t);
        counts_of(*counted.table, other % kNumBuckets);
        const auto counts = counts_of(*counted.table, bucket);
        CHECK_EQUAL(counts.size(), num_rows);
        for (const std::uint64_t key : together) {
          CHECK_EQUAL(counts.at(key), counts.at(together[0]));
        }
        ++num_snapshots;
      }
    });
  }
  // How many pushes come beside the snapshots depends on the machine; enough evict each row.
  const auto num_evicted = [&] { return counted.table->tier()->use().num_evicted; };
  for (int i = 0; num_snapshots < 24 || (num_evicted() <= 60000 && i < 10000); ++i) {
    counted.push(together);
    Keys some(500);
    for (std::uint64_t& key : some) key = counted.keys[counted.random.below(60000)];
    std::erase_if(some, [&](std::uint64_t key) { return std::ranges::count(together, key) > 0; });
    counted.push(some);
  }
  has_ended = true;
  for (std::thread& thread : threads) thread.join();
  std::cout << "at most " << bytes_max << " of " << counted.config.tier.memory_bytes << " bytes"
            << std::endl;
  CHECK(bytes_max <= counted.config.tier.memory_bytes);
  CHECK(num_evicted() > 60000);
}

void test_a_full_device_can_be_read_whole(std::uint64_t seed) {
  Counted counted(seed, 60000, kRoom, 4);
  fill(counted);
  counted.device->set_faults({.capacity_bytes = 1});
  try {  // all that can be is written, and memory is full
    for (int i = 0; i < 100; ++i) fill(counted);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kResourceExhausted);
  }
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      std::size_t num_rows = 0;
      for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
        num_rows += counts_of(*counted.table, bucket).size();
      }
      CHECK_EQUAL(num_rows, counted.keys.size());
      Pool pool(1);
      std::vector<float> weights(counted.keys.size() * 8);
      CHECK_EQUAL(counted.table->lookup(counted.keys, weights.data(), pool), 0U);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A push that fails is repeated. What it then has to do includes the evictions of buckets that have
// it already.
void test_a_push_that_failed_on_its_way_is_ended_by_its_repetition(std::uint64_t seed) {
  PolicyConfig policy;
  policy.max_rows = std::uint64_t{500} * kNumBuckets;
  Counted counted(seed, 60000, kRoom, 64, policy);
  TableConfig config = counted.config;
  config.tier = {};
  Table memory(config);
  std::size_t num_failed = 0;
  for (int i = 0; i < 150; ++i) {
    Keys some(700);
    for (std::uint64_t& key : some) key = counted.keys[counted.random.below(60000)];
    counted.device->set_faults({.num_reads = counted.random.below(300)});
    try {
      counted.push(some);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kUnavailable);
      ++num_failed;
      counted.device->set_faults({});
      --counted.sequence;
      counted.push(some);
    }
    const std::vector<float> grads(some.size() * 8, -1.0F);
    memory.update(some, grads.data(), std::array{PushId{0, counted.sequence}},
                  RuleValues{.lr = 1.0}, counted.pool);
    CHECK_EQUAL(counted.table->num_rows(), memory.num_rows());
  }
  counted.device->set_faults({});
  CHECK(num_failed > 10);
  CHECK(memory.counters().evicted > 1000);
  CHECK_EQUAL(counted.table->counters().evicted, memory.counters().evicted);
  CHECK(rows_of(*counted.table) == rows_of(memory));
}

void test_a_damaged_page_of_a_full_bucket_stops_no_push_of_other_rows(std::uint64_t seed) {
  constexpr std::uint32_t kBuckets = 16;
  constexpr std::size_t kRowsMax = 3000, kPageRows = 90, kPerPush = 100;
  constexpr int kPushes = 30;
  PolicyConfig policy;
  policy.max_rows = kRowsMax * kNumBuckets;
  Counted counted(seed, kBuckets * 4000, kRoom, kBuckets, policy);
  fill(counted);
  const std::vector<std::string> names = counted.device->names();
  for (int i = 0; i < 40; ++i) {
    counted.device->flip_bit(names[counted.random.below(names.size())],
                             counted.random.below((std::uint64_t{256} << 10) * 8));
  }
  std::map<std::uint32_t, int> num_pushed;
  std::size_t num_refused = 0;
  for (std::uint32_t i = 0; i < kBuckets; ++i) {
    const std::uint32_t bucket = i * (kNumBuckets / kBuckets);
    for (int push = 0; push < kPushes; ++push) {
      Keys fresh;
      while (fresh.size() < kPerPush / 10) {
        const std::uint64_t key = counted.random.next();
        if (bucket_of(key) == bucket) fresh.push_back(key);
      }
      try {
        counted.push(fresh);
        ++num_pushed[bucket];
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kCorruption);
        const std::string what = error.what();
        CHECK(what.find("bucket " + std::to_string(bucket) + " ") != std::string::npos);
        CHECK(what.find(".rows at offset ") != std::string::npos);
        ++num_refused;
      }
    }
    CHECK(num_pushed[bucket] > kPushes / 2);
    counted.table->shrink(bucket, {1, false}, 1);
  }
  CHECK(counted.table->counters().evicted > 0);
  CHECK(counted.table->num_rows() <= kBuckets * kRowsMax + 40 * kPageRows);
  std::size_t num_damaged = 0;
  for (std::size_t i = 0; i < counted.keys.size(); i += 5) {
    try {
      CHECK(counted.count_of(counted.keys[i]) <= 1);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kCorruption);
      ++num_damaged;
    }
  }
  std::cout << num_refused << " pushes of damaged pages, " << num_damaged << " lookups"
            << std::endl;
  CHECK(num_damaged > 0 && num_damaged < counted.keys.size() / 5 / 4);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_snapshots_beside_pushes_keep_to_the_budget(seed);
  test_a_full_device_can_be_read_whole(seed);
  test_a_push_that_failed_on_its_way_is_ended_by_its_repetition(seed);
  test_a_damaged_page_of_a_full_bucket_stops_no_push_of_other_rows(seed);
}
