// Row classes: rows of several widths and types agree with a map, heads grow when their score
// reaches the threshold, accesses stay within arrays; and many callers at once, for TSan.
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
#include "store/arenas.h"
#include "table/table.h"

using namespace trireme;

namespace {

using Keys = std::vector<std::uint64_t>;

constexpr int kThreshold = 3;

// Weights count updates. Every push is one show, with score 1. Rows of several dims begin as heads,
// and are complete after as many pushes as the threshold.
TableConfig counting(std::vector<int> dims, const std::string& dtype) {
  TableConfig config;
  config.dims = std::move(dims);
  config.dtype = dtype;
  config.rule.name = "count";
  config.initializer = "constant";
  config.policy.is_scored = true;
  config.policy.rates = {.nonclk_coeff = 1.0, .click_coeff = 1.0};
  config.policy.embedx_threshold = kThreshold;
  return config;
}

Keys some_of(const Keys& keys, test::Random& random, std::size_t n) {
  Keys some;
  while (some.size() < n) {
    const std::uint64_t key = keys[random.below(keys.size())];
    if (std::ranges::find(some, key) == some.end()) some.push_back(key);
  }
  return some;
}

std::size_t push(Table& table, const Keys& keys, int row_class, const PushId& id, Pool& pool) {
  const auto dim = static_cast<std::size_t>(table.classes()[row_class].dim());
  const std::vector<float> grads(keys.size() * dim, 0.5F);
  std::vector<float> show_click(keys.size() * 2, 0.0F);
  for (std::size_t i = 0; i < keys.size(); ++i) show_click[2 * i] = 1.0F;
  std::vector<Table::Gradients> of_classes(static_cast<std::size_t>(row_class));
  of_classes.push_back({.rows = grads.data(), .num_keys = keys.size()});
  return table.update(keys, of_classes, std::array{id}, RuleValues{}, pool,
                      {.show_click = show_click.data()});
}

// A row of the map: how often it was pushed, and the class in which it is complete.
struct Row {
  int pushes = 0;
  int row_class = -1;  // of a head
  int pushes_before = 0;
};

void check_weights(const Row& row, const float* weights, int own_dim, int dim) {
  CHECK_EQUAL(weights[0], static_cast<float>(row.pushes));
  for (int j = 1; j < dim; ++j) {
    const int tail = row.row_class < 0 || j >= own_dim ? 0 : row.pushes - row.pushes_before;
    CHECK_EQUAL(weights[j], static_cast<float>(tail));
  }
}

void a_table_agrees_with_a_map(std::uint64_t seed, const std::string& dtype) {
  test::Random random(seed);
  Pool pool(2);
  const std::vector<int> dims = {9, 2, 17};
  Table table(counting(dims, dtype));
  CHECK_EQUAL(table.classes().head(), 3);
  std::unordered_map<std::uint64_t, Row> map;
  Keys keys(400);
  for (std::uint64_t& key : keys) key = random.next();
  std::int64_t sequence = 0;
  for (int operation = 0; operation < 3000; ++operation) {
    const Keys some = some_of(keys, random, random.below(12));
    const auto row_class = static_cast<int>(random.below(dims.size()));
    const std::uint64_t kind = random.below(10);
    if (kind < 6) {
      push(table, some, row_class, {0, ++sequence}, pool);
      for (const std::uint64_t key : some) {
        Row& row = map[key];
        ++row.pushes;
        if (row.row_class >= 0 || row.pushes < kThreshold) continue;
        row.row_class = row_class;
        row.pushes_before = row.pushes;
      }
    } else if (kind < 7) {
      table.erase(some, pool);
      for (const std::uint64_t key : some) map.erase(key);
    } else if (kind < 8) {
      const std::uint32_t bucket = bucket_of(keys[random.below(keys.size())]);
      const BucketContent content = table.snapshot(bucket);
      table.restore(bucket, {.keys = content.keys.span(),
                             .classes = content.classes.span(),
                             .rows = content.rows.span(),
                             .marks = content.marks,
                             .pending = content.pending.span()});
    } else {
      const int dim = dims[static_cast<std::size_t>(row_class)];
      std::vector<float> found(some.size() * static_cast<std::size_t>(dim));
      table.lookup(some, found.data(), pool, row_class);
      for (std::size_t i = 0; i < some.size(); ++i) {
        const Row row = map.contains(some[i]) ? map[some[i]] : Row{};
        const int own = row.row_class < 0 ? 1 : dims[static_cast<std::size_t>(row.row_class)];
        check_weights(row, found.data() + i * static_cast<std::size_t>(dim), own, dim);
      }
    }
    CHECK_EQUAL(table.num_rows(), map.size());
  }
}

// The arrays of a call end where their allocations end, so ASan detects accesses past them.
void all_instruction_sets_keep_within_arrays_and_agree(std::uint64_t seed) {
  Pool pool(1);
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    for (int dim = 1; dim <= 40; ++dim) {
      std::vector<float> expected;
      for (const char* simd : {"scalar", "avx2", "avx512"}) {
        TableConfig config = counting({dim, 1 + dim / 2}, dtype);
        config.rule.name = "adagrad";
        config.simd = simd;
        try {
          choose_isa(simd);
        } catch (const Error&) {
          continue;  // not supported by this machine
        }
        Table table(config);
        test::Random random(seed);
        Keys keys(70);
        for (std::uint64_t& key : keys) key = random.next();
        for (std::int64_t sequence = 1; sequence <= 6; ++sequence) {
          const int row_class = static_cast<int>(sequence % 2);
          push(table, some_of(keys, random, 50), row_class, {0, sequence}, pool);
        }
        std::vector<float> found(keys.size() * static_cast<std::size_t>(dim));
        table.lookup(keys, found.data(), pool);
        if (expected.empty()) expected = found;
        CHECK(found == expected);
      }
    }
  }
}

// A reference identifies one row in all classes, and its class.
void references_tell_classes_apart() {
  const std::array<std::size_t, 3> row_bytes = {64, 24, 136};
  Arenas arenas(row_bytes);
  const std::array<std::size_t, 3> wanted = {100, 100, 100};
  Arenas::Reservation reservation(arenas, wanted);
  std::vector<Arena::Ref> refs;
  for (int i = 0; i < 300; ++i) {
    const int row_class = i % 3;
    refs.push_back(reservation.take(row_class));
    CHECK_EQUAL(arenas.class_of(refs.back()), row_class);
    CHECK_EQUAL(arenas.class_of(arenas.row(refs.back())), row_class);
    std::fill_n(arenas.row(refs.back()), row_bytes[static_cast<std::size_t>(row_class)],
                static_cast<std::byte>(i % 251));
  }
  for (int i = 0; i < 300; ++i) {
    const std::byte* row = arenas.row(refs[static_cast<std::size_t>(i)]);
    const std::size_t size = row_bytes[static_cast<std::size_t>(i % 3)];
    CHECK(std::all_of(row, row + size,
                      [&](std::byte byte) { return byte == static_cast<std::byte>(i % 251); }));
  }
  arenas.free(refs);
}

// A class may have more rows than an equal share of the references, here a sixteenth of 2^32.
void a_class_has_the_references_that_others_leave() {
  constexpr std::size_t kAtOnce = std::size_t{1} << 22;
  constexpr std::size_t kRows = (std::size_t{1} << 28) + kAtOnce;
  Arenas arenas(std::vector<std::size_t>(Arenas::kClassesMax, 8));
  arenas.expect(kRows);  // then memory is taken when it is written to, which nobody does here
  std::vector<Arena::Ref> refs(kAtOnce);
  std::vector<Arena::Ref> others;
  for (std::size_t taken = 0; taken < kRows; taken += kAtOnce) {
    std::vector<std::size_t> wanted(Arenas::kClassesMax, 1);
    wanted[3] = kAtOnce;
    Arenas::Reservation reservation(arenas, wanted);
    reservation.take(3, refs);
    others.push_back(reservation.take(static_cast<int>(5 + others.size() % 11)));
    for (std::size_t i = 0; i < kAtOnce; i += 61) {
      CHECK(arenas.class_of(refs[i]) == 3);
      CHECK(arenas.row(refs[i]) == arenas.of(3).null_row() + 8 * (1 + taken + i));
    }
  }
  for (std::size_t i = 0; i < others.size(); ++i) {
    const int row_class = static_cast<int>(5 + i % 11);
    CHECK_EQUAL(arenas.class_of(others[i]), row_class);
    CHECK(arenas.row(others[i]) == arenas.of(row_class).null_row() + 8 * (1 + i / 11));
  }
  arenas.free(refs);  // the last ones are the first to be taken again
  std::vector<std::size_t> wanted(Arenas::kClassesMax, 0);
  wanted[3] = 1;
  CHECK_EQUAL(Arenas::Reservation(arenas, wanted).take(3), refs.back());
}

// Rows are pushed, grow, are read, saved and erased by several threads at the same time: a row is
// always complete, and its head counts every push.
void rows_grow_while_they_are_read(std::uint64_t seed) {
  constexpr std::int64_t kWriters = 2;
  constexpr std::int64_t kPushes = 60;
  test::Random random(seed);
  Keys keys(300);
  for (std::uint64_t& key : keys) key = random.next();
  Table table(counting({12}, "float32"));
  Pool pool(2);
  std::atomic<int> num_writing{kWriters};
  std::vector<std::thread> threads;
  for (std::int64_t stream = 0; stream < kWriters; ++stream) {
    threads.emplace_back([&, stream] {
      for (std::int64_t sequence = 1; sequence <= kPushes; ++sequence) {
        CHECK_EQUAL(push(table, keys, 0, {stream, sequence}, pool), keys.size());
        CHECK_EQUAL(push(table, keys, 0, {stream, sequence}, pool), 0U);
      }
      --num_writing;
    });
  }
  threads.emplace_back([&] {
    std::vector<float> weights(keys.size() * 12);
    do {
      table.lookup(keys, weights.data(), pool);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const float* row = weights.data() + i * 12;
        CHECK(row[1] == std::max(row[0] - kThreshold, 0.0F));
        CHECK(std::all_of(row + 1, row + 12, [&](float weight) { return weight == row[1]; }));
      }
      for (std::uint32_t bucket = 0; bucket < 200; ++bucket) table.snapshot(bucket);
    } while (num_writing > 0);
  });
  for (std::thread& thread : threads) thread.join();
  std::vector<float> weights(keys.size() * 12);
  CHECK_EQUAL(table.lookup(keys, weights.data(), pool), 0U);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CHECK_EQUAL(weights[i * 12], static_cast<float>(kWriters * kPushes));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    a_table_agrees_with_a_map(seed, dtype);
  }
  all_instruction_sets_keep_within_arrays_and_agree(seed);
  references_tell_classes_apart();
  a_class_has_the_references_that_others_leave();
  rows_grow_while_they_are_read(seed);
}
