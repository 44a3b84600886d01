// Table: agreement with a map, growth, marks, whole buckets, array bounds; and many callers at
// once, for TSan.
#include "table/table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace trireme;

namespace {

using Keys = std::vector<std::uint64_t>;

// The weights of a key count its updates.
TableConfig counting(int dim) {
  TableConfig config;
  config.dims = {dim};
  config.rule.name = "count";
  config.initializer = "constant";
  return config;
}

Keys random_keys(test::Random& random, std::size_t n) {
  Keys keys = {0, 1, ~std::uint64_t{0}, std::uint64_t{1} << 63};
  while (keys.size() < n) keys.push_back(random.next());
  keys.resize(n);
  return keys;
}

Keys keys_in(std::uint32_t bucket, test::Random& random, std::size_t n) {
  Keys keys;
  while (keys.size() < n) {
    const std::uint64_t key = random.next();
    if (bucket_of(key) == bucket) keys.push_back(key);
  }
  return keys;
}

Keys some_of(const Keys& keys, test::Random& random, std::size_t n) {
  Keys some(n);
  for (std::uint64_t& key : some) key = keys[random.below(keys.size())];
  return some;
}

std::size_t push(Table& table, const Keys& keys, const std::vector<PushId>& ids, Pool& pool) {
  const std::vector<float> grads(keys.size() * static_cast<std::size_t>(table.classes()[0].dim()),
                                 0.5F);
  return table.update(keys, grads.data(), ids, RuleValues{}, pool);
}

// The count of each key; all weights of a row must be the same.
std::vector<float> counts_of(const Table& table, const Keys& keys, Pool& pool) {
  const auto dim = static_cast<std::size_t>(table.classes()[0].dim());
  std::vector<float> weights(keys.size() * dim, -1.0F);
  table.lookup(keys, weights.data(), pool);
  std::vector<float> counts(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    counts[i] = weights[i * dim];
    for (std::size_t j = 1; j < dim; ++j) CHECK_EQUAL(weights[i * dim + j], counts[i]);
  }
  return counts;
}

Table::BucketView view_of(const BucketContent& content) {
  return {.keys = content.keys.span(),
          .classes = content.classes.span(),
          .rows = content.rows.span(),
          .marks = content.marks,
          .pending = content.pending.span()};
}

bool are_equal(const BucketContent& a, const BucketContent& b) {
  return std::ranges::equal(a.keys.span(), b.keys.span()) &&
         std::ranges::equal(a.rows.span(), b.rows.span()) && a.marks == b.marks;
}

void a_table_agrees_with_a_map(std::uint64_t seed) {
  test::Random random(seed);
  Pool pool(2);
  Table table(counting(3));
  std::unordered_map<std::uint64_t, float> map;
  Keys keys = random_keys(random, 300);
  const Keys crowded = keys_in(5, random, 60);
  keys.insert(keys.end(), crowded.begin(), crowded.end());
  std::int64_t sequence = 0;
  for (int operation = 0; operation < 4000; ++operation) {
    const Keys some = some_of(keys, random, random.below(operation % 500 == 0 ? 5000 : 12));
    const std::uint64_t kind = random.below(10);
    if (kind < 5) {
      CHECK_EQUAL(push(table, some, {{0, ++sequence}}, pool), some.size());
      for (const std::uint64_t key : some) ++map[key];
    } else if (kind < 7) {
      std::size_t there = 0;
      for (const std::uint64_t key : some) there += map.erase(key);
      CHECK_EQUAL(table.erase(some, pool), there);
    } else if (kind < 8) {
      table.restore(5, {});
      std::erase_if(map, [](const auto& row) { return bucket_of(row.first) == 5; });
    } else {
      Array<bool> there(some.size());
      table.contains(some, there.data(), pool);
      const std::vector<float> counts = counts_of(table, some, pool);
      for (std::size_t i = 0; i < some.size(); ++i) {
        CHECK_EQUAL(there[i], map.contains(some[i]));
        CHECK_EQUAL(counts[i], there[i] ? map[some[i]] : 0.0F);
      }
    }
    CHECK_EQUAL(table.num_rows(), map.size());
  }
}

void a_growing_table_finds_every_row(std::uint64_t seed) {
  test::Random random(seed);
  Pool pool(2);
  Table table(counting(1));
  const Keys keys = random_keys(random, 150'000);
  const std::array<std::size_t, 4> sizes = {1, 50, 3000, 20'000};
  std::int64_t sequence = 0;
  for (std::size_t begin = 0; begin < keys.size();) {
    const std::size_t n = std::min(sizes[random.below(sizes.size())], keys.size() - begin);
    const Keys part(keys.begin() + static_cast<std::ptrdiff_t>(begin),
                    keys.begin() + static_cast<std::ptrdiff_t>(begin + n));
    CHECK_EQUAL(push(table, part, {{0, ++sequence}}, pool), n);
    begin += n;
  }
  CHECK_EQUAL(table.num_rows(), keys.size());
  for (const float count : counts_of(table, keys, pool)) CHECK_EQUAL(count, 1.0F);
  CHECK_EQUAL(table.erase(keys, pool), keys.size());
  for (const float count : counts_of(table, keys, pool)) CHECK_EQUAL(count, 0.0F);
}

// The factor that an index has after another one.
std::uint32_t next_factor(std::uint32_t factor) {
  return static_cast<std::uint32_t>(mix64(factor)) | 1;
}

// Keys of bucket 0 with one home in an index whose factor is this one, and one tag.
Keys keys_of_one_home(std::uint64_t factor, std::size_t n) {
  std::uint64_t inverse = factor;
  for (int i = 0; i < 6; ++i) inverse *= 2 - factor * inverse;
  Keys keys(n);
  for (std::size_t i = 0; i < n; ++i) keys[i] = unmix64((i << 20) * inverse >> 12);
  return keys;
}

// Without other homes for them, minutes.
void chosen_keys_are_found() {
  constexpr std::size_t kKeys = 150'000;
  Pool pool(2);
  Table table(counting(1));
  Keys all;
  for (const std::uint32_t factor : {1U, next_factor(1), next_factor(next_factor(1))}) {
    const Keys keys = keys_of_one_home(factor, kKeys);
    const auto sequence = static_cast<std::int64_t>(2 * all.size());
    push(table, keys, {{0, sequence + 1}}, pool);
    push(table, keys, {{0, sequence + 2}}, pool);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  Keys gone;
  for (std::size_t i = 0; i < all.size(); i += 2) gone.push_back(all[i]);
  CHECK_EQUAL(table.erase(gone, pool), gone.size());
  const auto check = [&](const Table& actual) {
    CHECK_EQUAL(actual.num_rows(), all.size() - gone.size());
    const std::vector<float> counts = counts_of(actual, all, pool);
    for (std::size_t i = 0; i < all.size(); ++i)
      CHECK(i % 2 == 0 ? counts[i] == 0 : counts[i] >= 2);
  };
  check(table);
  Table other(counting(1));
  other.restore(0, view_of(table.snapshot(0)));
  check(other);
}

// Keys that were chosen for one place of the set that finds those that repeat: without a limit it
// takes longer than a test may.
void chosen_keys_are_restored() {
  constexpr std::size_t kKeys = 1'000'000;
  Table table(counting(1));
  Keys keys(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) keys[i] = unmix64(i << 24);
  const std::vector<std::uint8_t> classes(kKeys), rows(kKeys * table.row_bytes());
  Table::BucketView content;
  content.keys = keys;
  content.classes = classes;
  content.rows = rows;
  const auto restore = [&] { table.restore(0, content); };
  restore();
  CHECK_EQUAL(table.num_rows(), kKeys);
  keys.back() = keys[7];
  test::check_refused(restore, "distinct keys, found " + std::to_string(keys[7]) + " twice");
}

void a_push_counts_once_in_every_bucket() {
  test::Random random(1);
  Pool pool(2);
  Table table(counting(2));
  const Keys keys = random_keys(random, 2000);
  CHECK_EQUAL(push(table, keys, {{3, 2}}, pool), keys.size());
  CHECK_EQUAL(push(table, keys, {{3, 2}}, pool), 0U);
  CHECK_EQUAL(push(table, keys, {{3, 1}}, pool), 0U);
  std::vector<std::uint64_t> marks(kNumBuckets);
  table.marks(3, marks);
  for (const std::uint64_t mark : marks) CHECK_EQUAL(mark, 2U);
  // Half of the buckets have push 3 of stream 3: they are passed over by the merged push of two
  // streams, and keep their marks, so that they can get the push that they lack alone.
  for (std::size_t bucket = 0; bucket < kNumBuckets; bucket += 2) marks[bucket] = 3;
  table.set_marks(3, marks);
  const auto lacking = static_cast<std::size_t>(
      std::ranges::count_if(keys, [](std::uint64_t key) { return bucket_of(key) % 2 == 1; }));
  CHECK_EQUAL(push(table, keys, {{3, 3}, {4, 7}}, pool), lacking);
  table.marks(4, marks);
  for (std::size_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    CHECK_EQUAL(marks[bucket], bucket % 2 == 1 ? 7U : 0U);
  }
  CHECK_EQUAL(push(table, keys, {{4, 7}}, pool), keys.size() - lacking);
  CHECK_EQUAL(push(table, keys, {{3, 3}, {4, 7}}, pool), 0U);
  for (const float count : counts_of(table, keys, pool)) CHECK_EQUAL(count, 2.0F);
}

void buckets_move_to_another_table() {
  test::Random random(1);
  Pool pool(2);
  TableConfig config = counting(7);
  config.rule.name = "adagrad";
  Table table(config);
  Table other(config);
  Keys keys = random_keys(random, 3000);
  const Keys crowded = keys_in(9, random, 200);
  keys.insert(keys.end(), crowded.begin(), crowded.end());
  push(table, keys, {{0, 1}, {2, 5}}, pool);
  push(other, some_of(keys, random, 500), {{1, 1}}, pool);  // everything is replaced
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    const BucketContent content = table.snapshot(bucket);
    other.restore(bucket, view_of(content));
    CHECK(are_equal(other.snapshot(bucket), content));
    other.restore(bucket, view_of(content));
  }
  CHECK_EQUAL(other.num_rows(), table.num_rows());
  push(table, keys, {{0, 2}}, pool);
  push(other, keys, {{0, 2}}, pool);
  std::vector<float> expected(keys.size() * 7);
  std::vector<float> found(keys.size() * 7);
  CHECK_EQUAL(table.lookup(keys, expected.data(), pool), 0U);
  CHECK_EQUAL(other.lookup(keys, found.data(), pool), 0U);
  CHECK(found == expected);
}

void wrong_content_is_refused_and_nothing_changes() {
  test::Random random(1);
  Pool pool(1);
  Table table(counting(2));
  const Keys keys = keys_in(9, random, 20);
  push(table, keys, {{0, 1}}, pool);
  const BucketContent before = table.snapshot(9);
  const auto is_refused = [&](const std::function<void(BucketContent&)>& damage) {
    BucketContent content = table.snapshot(9);
    damage(content);
    bool caught = false;
    try {
      table.restore(9, view_of(content));
    } catch (const Error& error) {
      caught = error.code() == ErrorCode::kBadRequest;
    }
    return caught && are_equal(table.snapshot(9), before);
  };
  CHECK(is_refused([](BucketContent& content) { content.keys[3] = content.keys[4]; }));
  CHECK(is_refused([](BucketContent& content) { content.keys[3] ^= 1; }));
  CHECK(is_refused([](BucketContent& content) { content.classes[3] = 1; }));
  CHECK(is_refused([](BucketContent& content) { content.rows = Array<std::uint8_t>(20); }));
  CHECK(is_refused([](BucketContent& content) { content.marks = {{-1, 1}}; }));
}

// The arrays of a call end where their allocations end, so ASan detects accesses past them.
void all_instruction_sets_keep_within_arrays_and_agree(std::uint64_t seed) {
  Pool pool(1);
  for (int dim = 1; dim <= 70; ++dim) {
    for (const char* rule : {"sgd", "adagrad", "adam", "count"}) {
      std::vector<float> expected;
      for (const char* simd : {"scalar", "avx2", "avx512"}) {
        TableConfig config = counting(dim);
        config.rule.name = rule;
        config.initializer = "uniform";
        config.init_b = 1.0F;
        config.simd = simd;
        try {
          choose_isa(simd);
        } catch (const Error&) {
          continue;  // not supported by this machine
        }
        Table table(config);
        test::Random random(seed);
        const Keys keys = random_keys(random, 70);
        push(table, some_of(keys, random, 100), {{0, 1}}, pool);
        std::vector<float> found(keys.size() * static_cast<std::size_t>(dim));
        table.lookup(keys, found.data(), pool);
        if (expected.empty()) expected = found;
        CHECK(found == expected);
      }
    }
  }
}

// ---- many callers ----

// Runs `writers` to their end, and meanwhile each of `readers` repeatedly, at least once.
void together(const std::vector<std::function<void()>>& writers,
              const std::vector<std::function<void()>>& readers) {
  std::atomic<std::size_t> num_writing{writers.size()};
  std::vector<std::thread> threads;
  for (const auto& write : writers) {
    threads.emplace_back([&] {
      write();
      --num_writing;
    });
  }
  for (const auto& read : readers) {
    threads.emplace_back([&] {
      do read();
      while (num_writing > 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void callers_of_the_same_keys_count_exactly(std::uint64_t seed) {
  constexpr std::int64_t kWriters = 3;
  constexpr std::int64_t kPushes = 40;
  test::Random random(seed);
  const Keys keys = random_keys(random, 500);
  Table table(counting(19));
  Pool pool(3);  // for all of them
  std::array<std::unordered_map<std::uint64_t, float>, kWriters> expected;
  std::vector<std::function<void()>> writers;
  for (std::int64_t stream = 0; stream < kWriters; ++stream) {
    writers.emplace_back([&, stream] {
      test::Random own(seed + static_cast<std::uint64_t>(stream));
      for (std::int64_t sequence = 1; sequence <= kPushes; ++sequence) {
        const Keys some = some_of(keys, own, sequence % 8 == 0 ? 5000 : own.below(100));
        CHECK_EQUAL(push(table, some, {{stream, sequence}}, pool), some.size());
        CHECK_EQUAL(push(table, some, {{stream, sequence}}, pool), 0U);
        table.advance(std::array{PushId{kWriters, sequence}});  // a stream that they share
        for (const std::uint64_t key : some) ++expected[static_cast<std::size_t>(stream)][key];
      }
    });
  }
  std::vector<float> before(keys.size());
  const auto read_rows = [&] {
    const std::vector<float> counts = counts_of(table, keys, pool);
    for (std::size_t i = 0; i < keys.size(); ++i) CHECK(counts[i] >= before[i]);
    before = counts;
  };
  const auto read_the_rest = [&] {
    std::vector<std::uint64_t> marks(kNumBuckets);
    for (std::int64_t stream = 0; stream <= kWriters; ++stream) table.marks(stream, marks);
    for (std::uint32_t bucket = 0; bucket < 100; ++bucket) table.snapshot(bucket);
    Array<bool> there(keys.size());
    table.contains(keys, there.data(), pool);
    CHECK(table.num_rows() <= keys.size());
    CHECK(table.bytes() > 0);
  };
  together(writers, {read_rows, read_the_rest});
  const std::vector<float> counts = counts_of(table, keys, pool);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    float sum = 0;
    for (auto& counted : expected) sum += counted[keys[i]];
    CHECK_EQUAL(counts[i], sum);
  }
}

// Whichever caller pushes a key's n-th occurrence, the weights count from that one on. Concurrent
// snapshots and shrinks change nothing.
void callers_bring_keys_in_together(std::uint64_t seed) {
  constexpr std::int64_t kWriters = 3;
  constexpr std::int64_t kPushes = 60;
  constexpr std::uint32_t kN = 280;
  test::Random random(seed);
  const Keys keys = random_keys(random, 400);
  TableConfig config = counting(5);
  config.admission = {.name = "count_filter", .n = kN};
  Table table(config);
  Pool pool(2);
  std::array<std::unordered_map<std::uint64_t, std::uint32_t>, kWriters> occurred;
  std::vector<std::function<void()>> writers;
  for (std::int64_t stream = 0; stream < kWriters; ++stream) {
    writers.emplace_back([&, stream] {
      test::Random own(seed + static_cast<std::uint64_t>(stream));
      for (std::int64_t sequence = 1; sequence <= kPushes; ++sequence) {
        const Keys some = some_of(keys, own, sequence % 8 == 0 ? 5000 : own.below(100));
        push(table, some, {{stream, sequence}}, pool);
        for (const std::uint64_t key : some) ++occurred[static_cast<std::size_t>(stream)][key];
      }
    });
  }
  const auto look = [&] {
    for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += 7) {
      table.snapshot(bucket);
      table.shrink(bucket, {.time = 1'000'000, .day_over = true}, 0);
    }
    CHECK(table.bytes() > 0);
  };
  together(writers, {look});
  const std::vector<float> counts = counts_of(table, keys, pool);
  std::size_t num_rows = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::uint32_t sum = 0;
    for (auto& of_writer : occurred) sum += of_writer[keys[i]];
    CHECK_EQUAL(counts[i], static_cast<float>(sum < kN ? 0 : sum - (kN - 1)));
    num_rows += sum >= kN;
  }
  CHECK(num_rows > 0 && num_rows < keys.size());
  CHECK_EQUAL(table.num_rows(), num_rows);
  CHECK_EQUAL(table.counters().admitted, num_rows);
}

// With a rate of 0 rows keep their initial weights: a key has the same weights with or without a
// row.
void lookups_stay_right_while_rows_come_go_and_move(std::uint64_t seed) {
  test::Random random(seed);
  const Keys keys = random_keys(random, 6000);
  TableConfig config = counting(9);
  config.rule.name = "sgd";
  config.initializer = "uniform";
  config.init_b = 1.0F;
  Table table(config);
  Pool pool(1);
  std::vector<float> expected(keys.size() * 9);
  CHECK_EQUAL(table.lookup(keys, expected.data(), pool), keys.size());
  const auto churn = [&](std::int64_t stream) {
    test::Random own(seed + static_cast<std::uint64_t>(stream));
    for (std::int64_t sequence = 1; sequence <= 40; ++sequence) {
      push(table, some_of(keys, own, 1000), {{stream, sequence}}, pool);
      table.erase(some_of(keys, own, 700), pool);
    }
  };
  const auto replace = [&] {
    test::Random own(seed);
    for (int i = 0; i < 3000; ++i) {
      const auto bucket = static_cast<std::uint32_t>(own.below(kNumBuckets));
      if (i % 3 == 0) {
        table.restore(bucket, {});
      } else {
        const BucketContent content = table.snapshot(bucket);
        table.restore(bucket, view_of(content));
      }
    }
  };
  const auto read = [&] {
    std::vector<float> found(keys.size() * 9);
    table.lookup(keys, found.data(), pool);
    CHECK(found == expected);
  };
  together({[&] { churn(0); }, [&] { churn(1); }, replace}, {read, read});
}

void lookups_find_rows_while_the_table_grows(std::uint64_t seed) {
  constexpr std::size_t kPushes = 40;
  constexpr std::size_t kSize = 1000;
  test::Random random(seed);
  const Keys keys = random_keys(random, kPushes * kSize);
  Table table(counting(3));
  Pool pool(2);
  std::atomic<std::size_t> num_done{0};
  const auto grow = [&] {
    for (std::size_t i = 0; i < kPushes; ++i) {
      const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(i * kSize);
      push(table, Keys(begin, begin + kSize), {{0, static_cast<std::int64_t>(i) + 1}}, pool);
      num_done = (i + 1) * kSize;
    }
  };
  const auto read = [&] {
    const std::size_t num_there = num_done;
    const std::vector<float> counts = counts_of(table, keys, pool);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      CHECK(counts[i] == 1.0F || (counts[i] == 0.0F && i >= num_there));
    }
  };
  together({grow}, {read, read});
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  a_table_agrees_with_a_map(seed);
  a_growing_table_finds_every_row(seed);
  chosen_keys_are_found();
  chosen_keys_are_restored();
  a_push_counts_once_in_every_bucket();
  buckets_move_to_another_table();
  wrong_content_is_refused_and_nothing_changes();
  all_instruction_sets_keep_within_arrays_and_agree(seed);
  callers_of_the_same_keys_count_exactly(seed);
  callers_bring_keys_in_together(seed);
  lookups_stay_right_while_rows_come_go_and_move(seed);
  lookups_find_rows_while_the_table_grows(seed);
  return 0;
}
