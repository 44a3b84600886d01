// Cleaning: how large the files of an SSD tier become, and how much is written, when rows come and
// go for long. All is drawn with the seed, and one thread pushes, so the figures are always the same.
#include <array>
#include <cstdint>
#include <span>

#include "check.h"
#include "store/ssd/fake_device.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using test::Counted;
using test::Keys;

struct Cost {
  double room;     // that pages have, by the rows that are left in them
  double written;  // rows, by those that left memory
};

Cost cost_since(const Tier::Use& before, const Counted& counted) {
  const Tier::Use use = counted.table->tier()->use();
  const auto num_evicted = static_cast<double>(use.num_evicted - before.num_evicted);
  const auto num_cleaned = static_cast<double>(use.num_cleaned - before.num_cleaned);
  return {.room = static_cast<double>(use.log.num_pages * 83) / static_cast<double>(use.log.num_rows),
          .written = (num_evicted + num_cleaned) / num_evicted};
}

// Pushes keys that are all as likely, until each row has left memory several times.
Cost cost_of_pushes(Counted& counted, std::span<const std::uint64_t> keys, int num_turns) {
  for (std::size_t i = 0; i < keys.size(); i += 1000) counted.push(keys.subspan(i, 1000));
  Tier::Use before = counted.table->tier()->use();
  for (int turn = 0; turn < num_turns; ++turn) {
    if (turn == num_turns / 2) before = counted.table->tier()->use();
    for (std::size_t i = 0; i < keys.size(); i += 1000) {
      Keys some(1000);
      for (std::uint64_t& key : some) key = keys[counted.random.below(keys.size())];
      counted.push(some);
    }
  }
  return cost_since(before, counted);
}

void test_files_stay_small_at_any_memory(std::uint64_t seed) {
  for (const std::size_t row_budget : {std::size_t{200} << 10, std::size_t{600} << 10}) {
    Counted counted(seed, 40000, row_budget + 200000, 32);
    const Cost cost = cost_of_pushes(counted, counted.keys, 16);
    std::cout << "room " << cost.room << ", written " << cost.written << ", hits " << counted.table->tier()->use().num_misses  << " evicted "<< counted.table->tier()->use().num_evicted << " pages " << counted.table->tier()->use().log.num_pages << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_files_stay_small_at_any_memory(seed);
}
