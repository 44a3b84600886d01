// Cleaning: how large the files of an SSD tier become, and how much is written, when rows come and
// go for long. All is drawn with the seed, and one thread pushes, so the figures are always the
// same.
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <span>

#include "check.h"
#include "store/ssd/page.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using test::Counted;
using test::Keys;

constexpr std::uint32_t kBuckets = 32;
constexpr std::size_t kRowBudget = std::size_t{800} << 10;  // a third of the rows

// Of pages, by the rows that are left in them.
double room_of(const Counted& counted) {
  const ssd::PageLog::Use use = counted.table->tier()->use().log;
  const std::size_t row_bytes = counted.table->classes()[0].row_bytes();
  const std::size_t per_page = ssd::rows_of_page(ssd::kBlockBytes, row_bytes);
  return static_cast<double>(use.num_pages * per_page) / static_cast<double>(use.num_rows);
}

// Pushes keys that are all as likely, `num_turns` times as many as there are. Returns rows written
// by rows that left memory.
double push_all_alike(Counted& counted, std::span<const std::uint64_t> keys, int num_turns) {
  const Tier::Use before = counted.table->tier()->use();
  Keys some(1000);
  for (std::size_t i = 0; i < keys.size() * static_cast<std::size_t>(num_turns); i += some.size()) {
    for (std::uint64_t& key : some) key = keys[counted.random.below(keys.size())];
    counted.push(some);
  }
  const Tier::Use use = counted.table->tier()->use();
  const auto num_evicted = static_cast<double>(use.num_evicted - before.num_evicted);
  return 1 + static_cast<double>(use.num_cleaned - before.num_cleaned) / num_evicted;
}

void fill(Counted& counted) {
  const std::span<const std::uint64_t> keys = counted.keys;
  for (std::size_t i = 0; i < keys.size(); i += 1000) counted.push(keys.subspan(i, 1000));
}

void test_files_stay_small_when_all_keys_are_used_alike(std::uint64_t seed) {
  Counted counted(seed, 40000, kRowBudget, kBuckets);
  fill(counted);
  push_all_alike(counted, counted.keys, 6);
  const double first = room_of(counted);
  const double written = push_all_alike(counted, counted.keys, 6);
  const double last = room_of(counted);
  std::cout << "room of pages: " << first << ", then " << last << " times their rows; " << written
            << " rows written by rows that left memory" << std::endl;
  CHECK(first < 1.9 && last < 1.9);
  CHECK(written < 2);
}

// With no memory for more than a few rows of each bucket, pages cannot be filled from there.
void test_files_stay_bounded_with_little_memory(std::uint64_t seed) {
  Counted counted(seed, 40000, kRowBudget / 2, kBuckets);
  fill(counted);
  push_all_alike(counted, counted.keys, 6);
  CHECK(room_of(counted) < 2.5);
}

// Files shrink when most rows are erased, while others come and go.
void test_files_become_small_when_rows_are_erased(std::uint64_t seed) {
  Counted counted(seed, 40000, kRowBudget, kBuckets);
  fill(counted);
  const std::span<const std::uint64_t> all = counted.keys;
  const auto kept = all.first(16000), erased = all.subspan(16000);
  counted.table->erase(erased, counted.pool);
  push_all_alike(counted, kept, 12);
  std::cout << "room of pages after erasing: " << room_of(counted) << " times their rows"
            << std::endl;
  CHECK(room_of(counted) < 2);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_files_stay_small_when_all_keys_are_used_alike(seed);
  test_files_stay_bounded_with_little_memory(seed);
  test_files_become_small_when_rows_are_erased(seed);
}
