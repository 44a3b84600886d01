// A claim: what an update or settlement needs stays there until it is made, whatever others do.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "check.h"
#include "fake_device.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

std::atomic<std::size_t> num_bytes_allocated{0};

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t num_bytes) {
  num_bytes_allocated += num_bytes;
  if (void* memory = std::malloc(num_bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using test::Counted;
using test::Keys;

using Claimed = std::unique_ptr<Tier::Claim>;

void push_claimed(Counted& counted, std::span<const std::uint64_t> some,
                  std::span<const Claimed> claims) {
  std::vector<Tier::Claim*> all;
  for (const Claimed& claim : claims) {
    if (claim != nullptr) all.push_back(claim.get());
  }
  const std::vector<float> grads(some.size() * 8, -1.0F);
  counted.table->update(some, std::array{Table::Gradients{grads.data(), some.size()}},
                        std::array{PushId{0, ++counted.sequence}}, RuleValues{.lr = 1.0},
                        counted.pool, {}, Change::kRule, all);
}

void fill(Counted& counted, std::size_t num_keys) {
  for (std::size_t i = 0; i + 1000 <= num_keys; i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
}

// Looks up so many rows that those which nobody claims leave memory.
void use_others(Counted& counted, std::size_t begin, std::size_t end) {
  std::vector<float> weights(1000 * 8);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = begin; i + 1000 <= end; i += 1000) {
      counted.table->lookup(std::span(counted.keys).subspan(i, 1000), weights.data(), counted.pool);
      counted.table->fetch(std::span(counted.keys).subspan(i, 1000), counted.pool);
    }
  }
}

void test_claimed_keys_need_no_device(std::uint64_t seed) {
  Counted counted(seed, 42000, std::size_t{1} << 20);
  fill(counted, 40000);
  // Some that have been in memory, some that have not, and some that have no row; by two callers.
  const std::span<const std::uint64_t> all = counted.keys;
  std::vector<Claimed> claims;
  claims.push_back(counted.table->claim(all.first(500), counted.pool));
  claims.push_back(counted.table->claim(all.subspan(40000, 500), counted.pool));
  CHECK(claims[0] != nullptr && claims[1] != nullptr);
  use_others(counted, 1000, 40000);
  CHECK(counted.table->tier()->use().num_evicted > 40000);
  Keys keys(all.begin(), all.begin() + 500);
  keys.insert(keys.end(), all.begin() + 40000, all.begin() + 40500);
  counted.device->set_faults({.read_error = 1, .write_error = 1, .stuck = 1});
  const auto before = counted.device->counts();
  push_claimed(counted, keys, claims);
  CHECK_EQUAL(counted.device->counts().reads, before.reads);
  CHECK_EQUAL(counted.device->counts().writes, before.writes);
  CHECK(counted.table->bytes() <= counted.config.tier.memory_bytes);
  counted.device->set_faults({});
  claims.clear();
  use_others(counted, 1000, 40000);
  for (const float n : counted.counts_of(all.first(500))) CHECK_EQUAL(n, 2);
  for (const float n : counted.counts_of(all.subspan(40000, 500))) CHECK_EQUAL(n, 1);
}

void test_claimed_rows_are_erased_without_a_device(std::uint64_t seed) {
  Counted counted(seed, 42000, std::size_t{1} << 20);
  fill(counted, 40000);
  const std::span<const std::uint64_t> all = counted.keys;
  Keys keys(all.begin(), all.begin() + 500);
  keys.insert(keys.end(), all.begin() + 40000, all.begin() + 40500);
  Claimed claim = counted.table->claim(keys, counted.pool);
  CHECK(claim != nullptr);
  use_others(counted, 1000, 40000);
  counted.device->set_faults({.read_error = 1, .write_error = 1, .stuck = 1});
  const auto before = counted.device->counts();
  CHECK_EQUAL(counted.table->erase(keys, counted.pool, std::array{claim.get()}), 500U);
  CHECK_EQUAL(counted.device->counts().reads, before.reads);
  counted.device->set_faults({});
  claim.reset();
  use_others(counted, 1000, 40000);
  for (const float n : counted.counts_of(keys)) CHECK_EQUAL(n, 0);
  for (const float n : counted.counts_of(all.subspan(500, 500))) CHECK_EQUAL(n, 1);
}

// Rows of another table: some keys have rows, some have none.
void test_a_claimed_merge_needs_no_device(std::uint64_t seed) {
  Counted counted(seed, 40000, std::size_t{1} << 20);
  fill(counted, 39000);
  TableConfig config = counted.config;
  config.tier = {};
  Table staged(config);
  const std::span<const std::uint64_t> some = std::span(counted.keys).subspan(38600, 800);
  const std::vector<float> grads(some.size() * 8, -5.0F);
  staged.update(some, grads.data(), std::array{PushId{0, 1}}, RuleValues{.lr = 1.0}, counted.pool);
  Table many(config);
  const std::vector<float> of_many(counted.keys.size() * 8, -5.0F);
  many.update(counted.keys, of_many.data(), std::array{PushId{0, 1}}, RuleValues{.lr = 1.0},
              counted.pool);
  CHECK(counted.table->claim_rows(many, counted.pool) == nullptr);
  const Claimed claim = counted.table->claim_rows(staged, counted.pool);
  CHECK(claim != nullptr);
  use_others(counted, 0, 38000);
  counted.device->set_faults({.read_error = 1, .write_error = 1, .stuck = 1});
  const auto before = counted.device->counts();
  counted.table->merge(staged, 0, kNumBuckets, counted.pool, std::array{claim.get()});
  CHECK_EQUAL(counted.device->counts().reads, before.reads);
  CHECK_EQUAL(counted.device->counts().writes, before.writes);
  CHECK(counted.table->bytes() <= counted.config.tier.memory_bytes);
  counted.device->set_faults({});
  for (const float n : counted.counts_of(some)) CHECK_EQUAL(n, 5);
  for (const float n : counted.counts_of(std::span(counted.keys).first(1000))) CHECK_EQUAL(n, 1);
}

// Else the push that the claim is for would be recorded, and applied in part.
void test_a_claim_on_a_full_device_is_refused(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  fill(counted, 30000);
  counted.device->set_faults({.capacity_bytes = 0});
  bool is_refused = false;
  for (std::size_t i = 30000; i < 60000 && !is_refused; i += 1000) {
    const auto some = std::span<const std::uint64_t>(counted.keys).subspan(i, 1000);
    try {
      std::vector<Claimed> claims;
      claims.push_back(counted.table->claim(some, counted.pool));
      CHECK(claims[0] != nullptr);
      push_claimed(counted, some, claims);
    } catch (const ssd::FullDevice&) {
      is_refused = true;
    }
  }
  CHECK(is_refused);
}

// The same for more keys than are claimed, however much space is left.
void test_what_is_too_large_for_a_claim_is_applied_whole(std::uint64_t seed) {
  int num_refused = 0, num_applied = 0;
  for (std::size_t num_segments = 0; num_segments <= 240; num_segments += 40) {
    Counted counted(seed, 40000, std::size_t{1} << 20, 1024);
    fill(counted, 30000);
    const std::uint64_t in_use = counted.table->tier()->use().log.bytes;
    const std::size_t segment_bytes = counted.config.tier.segment_bytes;
    counted.device->set_faults({.capacity_bytes = in_use + num_segments * segment_bytes});
    const auto some = std::span<const std::uint64_t>(counted.keys).subspan(24000);
    std::vector<Claimed> claims;
    try {
      claims.push_back(counted.table->claim(some, counted.pool));
    } catch (const ssd::FullDevice&) {
      ++num_refused;
      continue;
    }
    CHECK(claims[0] == nullptr);
    push_claimed(counted, some, claims);
    ++num_applied;
  }
  CHECK(num_refused > 0 && num_applied > 0);
}

void test_rows_that_nobody_claims_any_more_leave(std::uint64_t seed) {
  Counted counted(seed, 40000, std::size_t{1} << 20);
  fill(counted, 40000);
  Claimed claim = counted.table->claim(std::span(counted.keys).first(3000), counted.pool);
  claim.reset();
  const std::uint64_t misses = counted.table->tier()->use().num_misses;
  use_others(counted, 3000, 40000);
  for (const float n : counted.counts_of(std::span(counted.keys).first(3000))) CHECK_EQUAL(n, 1);
  CHECK(counted.table->tier()->use().num_misses > misses + 3000);
}

// Too little memory, or a device that took longer than the timeout of a test on a busy machine.
bool is_refusal(const Error& error) {
  return error.code() == ErrorCode::kResourceExhausted ||
         error.code() == ErrorCode::kDeadlineExceeded;
}

// What a claim was granted for is applied, however small the budget and whatever others bring to
// memory between; and the budget holds.
void test_what_was_claimed_is_applied_at_any_budget(std::uint64_t seed) {
  test::Random random(seed);
  std::size_t num_granted = 0, num_passed = 0, num_refused = 0;
  for (const std::size_t more : {0, 4096, 20000, 100000, 300000}) {
    Counted counted(seed + more, 20000, std::size_t{1} << 20);
    const std::size_t own = test::own_bytes(counted.config);
    const std::size_t budget = own + own / 8 + 1 + more;  // from the least that a table takes on
    counted.config.tier.memory_bytes = budget;
    counted.config.tier.timeout = std::chrono::milliseconds(50);
    counted.table.emplace(counted.config);
    std::vector<int> counts(counted.keys.size());
    std::atomic<bool> may_end = false;
    std::thread other([&] {
      test::Random drawn(seed + 1);
      Pool pool(1);
      while (!may_end) {
        Keys some(1 + drawn.below(600));
        for (std::uint64_t& key : some) key = counted.keys[drawn.below(counted.keys.size())];
        counted.table->fetch(some, pool);
      }
    });
    for (int i = 0; i < 90 && !may_end; ++i) {
      const std::size_t n = 1 + random.below(random.below(4) == 0 ? 3000 : 300);
      const std::size_t begin = random.below(counted.keys.size() - n);
      const auto some = std::span(counted.keys).subspan(begin, n);
      std::array<Claimed, 1> claim;
      try {
        claim[0] = counted.table->claim(some, counted.pool);
      } catch (const Error& error) {
        CHECK(is_refusal(error));
        ++num_refused;
        continue;
      }
      ++(claim[0] == nullptr ? num_passed : num_granted);
      if (random.below(2) == 0) std::this_thread::yield();
      try {
        push_claimed(counted, some, claim);
      } catch (const Error& error) {  // not claimed: ended by its repetition, with more memory
        CHECK(claim[0] == nullptr && is_refusal(error));
        counted.table->set_memory(budget + (std::size_t{4} << 20));
        --counted.sequence;
        push_claimed(counted, some, claim);
        may_end = true;  // of this budget
      }
      for (std::size_t j = begin; j < begin + n; ++j) ++counts[j];
      if (!may_end) {
        const std::size_t taken = counted.table->bytes();
        if (taken > budget) CHECK_EQUAL(taken, budget);
      }
    }
    may_end = true;
    other.join();
    const std::vector<float> found = counted.counts_of(counted.keys);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      CHECK_EQUAL(found[i], static_cast<float>(counts[i]));
    }
  }
  std::cout << num_granted << " claims were granted, " << num_passed << " passed, " << num_refused
            << " refused" << std::endl;
  CHECK(num_granted > 50 && num_passed > 10);
}

// Rows come until even what finds them on SSD has no room. Whatever was tried for a push that is
// refused, the budget holds, and what was pushed is there.
void test_a_table_that_outgrows_its_budget_keeps_it(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 18);
  counted.config.tier.timeout = std::chrono::milliseconds(50);
  counted.table.emplace(counted.config);
  const std::size_t budget = counted.config.tier.memory_bytes;
  std::vector<float> counts(counted.keys.size());
  std::size_t num_refused = 0;
  for (std::size_t begin = 0; num_refused < 20; begin = (begin + 500) % counted.keys.size()) {
    const auto some = std::span(counted.keys).subspan(begin, 500);
    std::array<Claimed, 1> claim;
    try {
      claim[0] = counted.table->claim(some, counted.pool);
    } catch (const Error& error) {
      CHECK(is_refusal(error));
      ++num_refused;
      CHECK(counted.table->bytes() <= budget);
      continue;
    }
    push_claimed(counted, some, claim);
    for (std::size_t i = begin; i < begin + 500; ++i) ++counts[i];
    CHECK(counted.table->bytes() <= budget);
  }
  CHECK(counted.counts_of(counted.keys) == counts);
}

// What settling so many claimed keys allocates.
std::size_t bytes_to_settle(std::uint64_t seed, std::size_t num_keys) {
  PolicyConfig policy;
  policy.is_scored = true;
  Counted counted(seed, num_keys, std::size_t{64} << 20, 64, policy);
  std::ranges::sort(counted.keys, {}, mix64);
  const Claimed claim = counted.table->claim(counted.keys, counted.pool);
  CHECK(claim != nullptr);
  const std::vector<float> scores(num_keys);
  const std::size_t before = num_bytes_allocated;
  CHECK_EQUAL(counted.table->settle(counted.keys, scores.data(), std::array{claim.get()}),
              num_keys);
  return num_bytes_allocated - before;
}

// It is made for few keys after the other, each time within all that are claimed.
void test_what_a_settlement_allocates_grows_with_its_keys_alone(std::uint64_t seed) {
  const std::size_t num_bytes = bytes_to_settle(seed, 16384);
  CHECK(bytes_to_settle(seed, 65536) <= 5 * num_bytes);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_claimed_keys_need_no_device(seed);
  test_claimed_rows_are_erased_without_a_device(seed);
  test_a_claimed_merge_needs_no_device(seed);
  test_rows_that_nobody_claims_any_more_leave(seed);
  test_a_claim_on_a_full_device_is_refused(seed);
  test_what_is_too_large_for_a_claim_is_applied_whole(seed);
  test_a_table_that_outgrows_its_budget_keeps_it(seed);
  test_what_was_claimed_is_applied_at_any_budget(seed);
  test_what_a_settlement_allocates_grows_with_its_keys_alone(seed);
}
