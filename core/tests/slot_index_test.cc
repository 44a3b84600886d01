// The slots of keys, against a map; and keys that were chosen for one place of the index.
#include "table/slot_index.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace trireme;

namespace {

using Keys = std::vector<std::uint64_t>;

std::size_t size_of(std::int32_t slot) { return static_cast<std::size_t>(slot); }

void slots_equal_a_map(test::Random& random, std::size_t num_max) {
  Pool pool(3);
  Keys keys_of_slots(num_max);
  SlotIndex index(keys_of_slots, pool);
  std::map<std::uint64_t, std::int32_t> model;
  std::vector<std::int32_t> free(num_max);
  std::iota(free.begin(), free.end(), 0);
  const std::array none{static_cast<std::int32_t>(num_max)};
  for (int round = 0; round < 6; ++round) {
    Keys fresh = test::distinct_keys(random, num_max - model.size());
    std::vector<std::int32_t> slots;
    for (const std::uint64_t key : fresh) {
      slots.push_back(free.back());
      free.pop_back();
      model[key] = slots.back();
    }
    index.assign(fresh, slots, pool);
    CHECK_EQUAL(index.num_keys(), model.size());
    test::check_refused([&] { index.assign(std::array{random.next()}, none, pool); });
    test::check_refused(
        [&] { index.assign(std::array{random.next()}, std::array{0}, pool); });  // full
    Keys gone;
    for (const auto& [key, slot] : model) {
      if (random.below(2) == 0) gone.push_back(key);
    }
    for (const std::uint64_t key : gone) {
      free.push_back(model[key]);
      model.erase(key);
    }
    for (int i = 0; i < 10; ++i) gone.push_back(random.next());
    index.remove(gone);
    CHECK_EQUAL(index.num_keys(), model.size());
    Keys asked = gone;
    for (const auto& [key, slot] : model) asked.push_back(key);
    std::vector<std::int32_t> found(asked.size());
    index.find(asked, found.data(), pool);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const auto expected = model.find(asked[i]);
      CHECK_EQUAL(found[i], expected == model.end() ? SlotIndex::kAbsent : expected->second);
    }
    for (const auto& [key, slot] : model) CHECK_EQUAL(keys_of_slots[size_of(slot)], key);
    if (model.empty() || free.empty()) continue;
    const std::array twice{model.begin()->first};
    test::check_refused([&] { index.assign(twice, std::array{free.back()}, pool); });
    test::check_refused([&] { index.assign(std::array{random.next()}, std::array{-2}, pool); });
  }
}

// Many keys in the order of their buckets, which threads divide among them; and in others.
void many_slots_are_found(test::Random& random, std::size_t num) {
  Pool pool(3);
  Keys keys = test::distinct_keys(random, num);
  std::vector<std::int32_t> slots(num), found(num);
  std::iota(slots.begin(), slots.end(), 0);
  for (int order = 0; order < 4; ++order) {
    if (order == 1) std::ranges::sort(keys, {}, bucket_of);
    if (order == 2) std::ranges::sort(keys, {}, mix64);
    if (order == 3) std::ranges::reverse(keys);
    Keys memory(num);
    SlotIndex index(memory, pool);
    index.assign(keys, slots, pool);
    CHECK_EQUAL(index.num_keys(), num);
    index.find(keys, found.data(), pool);
    CHECK(found == slots);
    CHECK(memory == keys);
    SlotIndex in_place(memory, pool);  // the keys are where they shall be
    in_place.assign(memory, pool);
    in_place.find(keys, found.data(), pool);
    CHECK(found == slots);
    Keys others(num + 1);
    SlotIndex with_others(others, pool);
    with_others.assign(std::array{keys[num / 2]}, std::array{static_cast<std::int32_t>(num)}, pool);
    test::check_refused([&] { with_others.assign(keys, slots, pool); });
    Keys twice = keys;
    twice[num / 3] = twice[num / 3 + 1];
    SlotIndex other(memory, pool);
    test::check_refused([&] { other.assign(twice, slots, pool); });
  }
}

// Keys whose searches all begin at one place, or at the last ones: without a bound, minutes.
void chosen_keys_have_slots(test::Random& random, std::uint64_t first_hash) {
  constexpr std::size_t kKeys = 200'000;
  Pool pool(3);
  Keys keys(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) keys[i] = unmix64(first_hash + i);
  std::vector<std::int32_t> slots(kKeys), actual(kKeys);
  std::iota(slots.begin(), slots.end(), 0);
  Keys memory(kKeys);
  SlotIndex index(memory, pool);
  index.assign(keys, slots, pool);
  const auto check = [&](std::size_t first_present) {
    CHECK_EQUAL(index.num_keys(), kKeys - first_present);
    index.find(keys, actual.data(), pool);
    for (std::size_t i = 0; i < kKeys; ++i) {
      CHECK_EQUAL(actual[i], i < first_present ? SlotIndex::kAbsent : slots[i]);
    }
  };
  check(0);
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = kKeys - 1; i > 0; --i) {
      const std::size_t j = random.below(i + 1);
      std::swap(keys[i], keys[j]);
      std::swap(slots[i], slots[j]);
    }
    const std::size_t num = kKeys / 3;
    const auto gone = std::span(keys).first(num);
    index.remove(gone);
    index.remove(gone);  // ignored
    check(num);
    const std::array last{keys.back()};
    test::check_refused([&] { index.assign(last, std::array{slots[0]}, pool); });
    if (round == 1) std::ranges::sort(gone, {}, mix64);
    std::vector<std::int32_t> free;
    std::vector<bool> is_used(kKeys);
    for (std::size_t i = num; i < kKeys; ++i) is_used[size_of(slots[i])] = true;
    for (std::size_t slot = 0; slot < kKeys; ++slot) {
      if (!is_used[slot]) free.push_back(static_cast<std::int32_t>(slot));
    }
    std::ranges::copy(free, slots.begin());
    index.assign(gone, free, pool);
    check(0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  test::Random random(test::seed_of(argc, argv));
  for (const std::size_t num_max : {0, 1, 2, 50, 20'000}) slots_equal_a_map(random, num_max);
  many_slots_are_found(random, 40'000);
  chosen_keys_have_slots(random, 0);
  chosen_keys_have_slots(random, ~std::uint64_t{0} - 200'000);
  return 0;
}
