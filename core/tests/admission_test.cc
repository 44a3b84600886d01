// Admission: counts agree with a map, sketches keep their bound, draws follow the published
// formula, and any bytes are accepted or refused.
#include "table/admission.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace trireme;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::uint64_t>;

constexpr PushId kId{.stream = 0, .sequence = 1};
constexpr std::uint32_t kBucket = 77;
constexpr std::uint64_t kChosen = 1'000'000;

Keys keys_of_bucket(test::Random& random, std::size_t n) {
  Keys keys;
  while (keys.size() < n) {
    const std::uint64_t key = random.next();
    if (bucket_of(key) == kBucket) keys.push_back(key);
  }
  return keys;
}

bool admit(Admission& admission, std::uint64_t key, std::uint32_t count, std::uint32_t time = 0) {
  admission.prepare(std::span(&key, 1));
  return admission.admit({.key = key, .count = count, .score = 0.0, .time = time}, kId);
}

Bytes saved(const Admission& admission) {
  const Array<std::uint8_t> bytes = admission.save(kBucket);
  return {bytes.span().begin(), bytes.span().end()};
}

AdmissionConfig counting(std::uint32_t n, std::uint64_t sketch_bytes = 0) {
  return {.name = "count_filter", .n = n, .sketch_bytes = sketch_bytes};
}

// Keys chosen for one home, or for one home after the other: without other homes for them this
// takes longer than a test may.
void chosen_keys_are_counted(const std::function<std::uint64_t(std::uint64_t)>& hash_of) {
  Admission admission(counting(2), 1);
  Keys keys;
  for (std::uint64_t i = 0; i < kChosen; ++i) {
    keys.push_back(unmix64(std::uint64_t{kBucket} << 52 | hash_of(i)));
  }
  admission.prepare(keys);
  for (const int count : {1, 2}) {
    for (const std::uint64_t key : keys) {
      const Occurrence once{.key = key, .count = 1, .score = 0.0, .time = 0};
      CHECK_EQUAL(admission.admit(once, kId), count == 2);
    }
  }
  CHECK_EQUAL(saved(admission).size(), 24 + 16 * kChosen);
  for (const std::uint64_t key : keys) admission.settle(key);
  CHECK(saved(admission).empty());
}

std::uint64_t hash_of_one_home(std::uint64_t i) { return i; }

// Of an index that has room for as many keys, and no more.
std::uint64_t hash_of_home(std::uint64_t i) {
  constexpr std::uint64_t kSlots = kChosen * 8 / 7 + 1;
  return ((i << 32) + kSlots - 1) / kSlots << 20;
}

void counts_agree_with_a_map(std::uint64_t seed) {
  test::Random random(seed);
  constexpr std::uint32_t kN = 6;
  Admission admission(counting(kN), 1);
  Admission other(counting(kN), 1);
  std::map<std::uint64_t, std::pair<std::uint32_t, std::uint32_t>> pending;  // count, time
  const Keys keys = keys_of_bucket(random, 300);
  for (std::uint32_t operation = 1; operation <= 20'000; ++operation) {
    const std::uint64_t key = keys[random.below(keys.size())];
    const std::uint64_t kind = random.below(1000);
    if (kind == 0) {
      const auto oldest = static_cast<std::uint32_t>(operation - random.below(300));
      admission.forget_before(kBucket, oldest, operation);
      std::erase_if(pending, [&](const auto& entry) { return entry.second.second < oldest; });
    } else if (kind < 100) {
      admission.settle(key);
      pending.erase(key);
    } else {
      const auto count = static_cast<std::uint32_t>(random.below(3));
      if (count > 0) pending[key] = {pending[key].first + count, operation};
      const bool expected = pending.contains(key) && pending[key].first >= kN;
      CHECK_EQUAL(admit(admission, key, count, operation), expected);
      if (expected) {
        admission.settle(key);
        pending.erase(key);
      }
    }
    if (operation % 100 != 0) continue;
    const Bytes bytes = saved(admission);
    CHECK_EQUAL(bytes.size(), pending.empty() ? 0 : 24 + 16 * pending.size());
    other.replace(kBucket, other.parse(kBucket, bytes));
    CHECK(saved(other) == bytes);
    if (operation % 200 == 0) admission.replace(kBucket, admission.parse(kBucket, bytes));
  }
  admission.replace(kBucket, {});
  CHECK(saved(admission).empty());
}

void memory_per_pending_key_is_as_stated(std::uint64_t seed) {
  test::Random random(seed);
  Admission admission(counting(2), 1);
  const std::size_t empty = admission.bytes(kBucket);
  const Keys keys = keys_of_bucket(random, 2000);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    CHECK(!admit(admission, keys[i], 1, i % 2 == 0 ? 5 : 0));
    if (i >= 100) CHECK(admission.bytes(kBucket) - empty <= 23 * (i + 1) + 16);
  }
  admission.forget_before(kBucket, 6, 9);  // those without a time stay
  CHECK_EQUAL(saved(admission).size(), 24 + 16 * keys.size() / 2);
  admission.replace(kBucket, {});
  CHECK_EQUAL(admission.bytes(kBucket), empty);
}

void a_large_count_does_not_wrap() {
  constexpr std::uint32_t kMost = std::numeric_limits<std::uint32_t>::max();
  for (const std::uint64_t sketch_bytes : {std::uint64_t{0}, std::uint64_t{1} << 20}) {
    Admission admission(counting((1U << 31) - 1, sketch_bytes), 1);
    const std::uint64_t key = 5;
    CHECK(!admit(admission, key, 1));
    CHECK(admit(admission, key, kMost));
    CHECK(admit(admission, key, kMost));
  }
}

// For each width of cells: keys are never late, and early ones stay within the stated bound.
void a_sketch_keeps_its_bound(std::uint64_t seed) {
  for (const std::uint32_t n : {20U, 300U, 70'000U}) {
    test::Random random(seed);
    constexpr std::uint64_t kBytes = 2048;
    Admission admission(counting(n, kNumBuckets * kBytes), 1);
    const SketchShape shape = SketchShape::of(kBytes, n);
    CHECK(shape.bytes() <= kBytes && shape.bytes() > kBytes - 16);
    std::map<std::uint64_t, std::uint64_t> counts;
    const Keys keys = keys_of_bucket(random, 1500);
    std::uint64_t total = 0;
    std::set<std::uint64_t> early;
    for (std::uint32_t operation = 0; operation < 8000; ++operation) {
      const std::uint64_t key = keys[random.below(keys.size())];
      const auto count = static_cast<std::uint32_t>(random.below(n / 4));
      if (counts[key] >= n) continue;  // it has its row
      counts[key] += count;
      total += count;
      const bool is_admitted = admit(admission, key, count);
      CHECK(is_admitted || counts[key] < n);
      const double bound = 2.718281828459045 / shape.width * static_cast<double>(total);
      if (is_admitted && static_cast<double>(counts[key]) + bound < n) early.insert(key);
      if (is_admitted) counts[key] = n;
    }
    CHECK(static_cast<double>(early.size()) < 0.03 * static_cast<double>(keys.size()));
    Admission other(counting(n, kNumBuckets * kBytes), 1);
    other.replace(kBucket, other.parse(kBucket, saved(admission)));
    CHECK(saved(other) == saved(admission));
  }
}

void a_sketch_halves_what_is_old() {
  Admission admission(counting(10, kNumBuckets * 256), 1);
  const std::uint64_t key = 3;
  const std::uint32_t bucket = bucket_of(key);
  CHECK(!admit(admission, key, 9, 1000));
  admission.forget_before(bucket, 1000, 1500);  // counted since
  admission.forget_before(bucket, 1001, 1500);  // 9 -> 4
  admission.forget_before(bucket, 1500, 1500);  // halved since
  CHECK(!admit(admission, key, 5, 1500));
  CHECK(admit(admission, key, 1, 1500));
}

void draws_follow_the_published_hash() {
  constexpr std::uint64_t kSeed = 99;
  Admission admission({.name = "probability", .p = 0.25}, kSeed);
  test::Random random(4);
  std::size_t num_admitted = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t key = random.next();
    const PushId id{.stream = static_cast<std::int64_t>(random.below(9)),
                    .sequence = static_cast<std::int64_t>(random.below(1000)) + 1};
    const std::uint64_t golden = 0x9E3779B97F4A7C15ULL;
    std::uint64_t bits = mix64(mix64(kSeed + 2 * golden) ^ key);
    bits = mix64(mix64(bits ^ static_cast<std::uint64_t>(id.stream)) ^
                 static_cast<std::uint64_t>(id.sequence));
    const bool expected = static_cast<double>(bits >> 11) / 9007199254740992.0 < 0.25;
    const Occurrence occurrence{.key = key, .count = 1, .score = 0.0, .time = 0};
    CHECK_EQUAL(admission.admit(occurrence, id), expected);
    num_admitted += expected;
  }
  CHECK(num_admitted > 4700 && num_admitted < 5300);
}

void scores_decide() {
  Admission admission({.name = "score_filter", .threshold = 1.5}, 1);
  for (const double score : {-1.0, 1.4999, 1.5, 3.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_EQUAL(admission.admit({.key = 1, .count = 1, .score = score, .time = 0}, kId),
                score >= 1.5);
  }
}

bool is_refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kBadRequest;
  }
  return false;
}

void wrong_settings_are_refused() {
  for (const AdmissionConfig& config :
       {AdmissionConfig{.name = "none"}, counting(0), counting(1U << 31), counting(2, 1000),
        counting(2, std::uint64_t{1} << 40), AdmissionConfig{.name = "probability", .p = 0.0},
        AdmissionConfig{.name = "probability", .p = 1.1},
        AdmissionConfig{.name = "probability", .p = std::numeric_limits<double>::quiet_NaN()},
        AdmissionConfig{.name = "score_filter",
                        .threshold = std::numeric_limits<double>::infinity()}}) {
    CHECK(is_refused([&] { Admission admission(config, 1); }));
  }
}

// Bytes that break the rules of the format are refused; other bytes are accepted.
void damaged_bytes_are_refused_or_harmless(std::uint64_t seed) {
  test::Random random(seed);
  for (const std::uint64_t sketch_bytes : {std::uint64_t{0}, std::uint64_t{kNumBuckets} * 128}) {
    Admission admission(counting(7, sketch_bytes), 1);
    for (const std::uint64_t key : keys_of_bucket(random, 50)) admit(admission, key, 3);
    const Bytes good = saved(admission);
    const auto refuses = [&](const std::function<void(Bytes&)>& damage) {
      Bytes bytes = good;
      damage(bytes);
      return is_refused([&] { admission.parse(kBucket, bytes); });
    };
    CHECK(!refuses([](Bytes&) {}));
    CHECK(refuses([](Bytes& bytes) { bytes.resize(10); }));
    CHECK(refuses([](Bytes& bytes) { bytes.resize(24); }));
    CHECK(refuses([](Bytes& bytes) { bytes.pop_back(); }));
    CHECK(refuses([](Bytes& bytes) { bytes.resize(bytes.size() + 16); }));
    CHECK(refuses([](Bytes& bytes) { bytes[0] = 2; }));   // version
    CHECK(refuses([](Bytes& bytes) { bytes[1] ^= 3; }));  // kind
    CHECK(refuses([](Bytes& bytes) { bytes[16] = 8; }));  // n
    CHECK(refuses([&](Bytes& bytes) {                     // another bucket's key; a cell above n
      bytes[sketch_bytes > 0 ? 30 : 24] ^= 0xF0;
    }));
    if (sketch_bytes > 0) {
      CHECK(refuses([](Bytes& bytes) { bytes[2] = 3; }));   // depth
      CHECK(refuses([](Bytes& bytes) { bytes[3] = 2; }));   // cell_bytes
      CHECK(refuses([](Bytes& bytes) { bytes[4] ^= 1; }));  // width
    } else {
      CHECK(refuses([](Bytes& bytes) { bytes[8] = 49; }));      // keys
      CHECK(refuses([](Bytes& bytes) { bytes[8 + 24] = 0; }));  // a count
      CHECK(refuses([](Bytes& bytes) { bytes[8 + 24] = 7; }));
      CHECK(refuses([](Bytes& bytes) {  // keys in another order, or twice
        std::swap_ranges(bytes.begin() + 24, bytes.begin() + 40, bytes.begin() + 40);
      }));
      CHECK(refuses([](Bytes& bytes) { std::copy_n(bytes.begin() + 24, 16, bytes.begin() + 40); }));
    }
    for (int i = 0; i < 3000; ++i) {
      Bytes bytes = good;
      bytes[random.below(i % 2 == 0 ? 24 : bytes.size())] =
          static_cast<std::uint8_t>(random.next());
      if (random.below(4) == 0) bytes.resize(random.below(bytes.size()));
      is_refused([&] { admission.replace(kBucket, admission.parse(kBucket, bytes)); });
      for (const std::uint64_t key : keys_of_bucket(random, 1)) admit(admission, key, 1);
    }
  }
  const Admission none({}, 1);
  CHECK(none.save(kBucket).size() == 0);
  CHECK(is_refused([&] { none.parse(kBucket, Bytes(24)); }));
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  counts_agree_with_a_map(seed);
  chosen_keys_are_counted(hash_of_one_home);
  chosen_keys_are_counted(hash_of_home);
  memory_per_pending_key_is_as_stated(seed);
  a_large_count_does_not_wrap();
  a_sketch_keeps_its_bound(seed);
  a_sketch_halves_what_is_old();
  draws_follow_the_published_hash();
  scores_decide();
  wrong_settings_are_refused();
  damaged_bytes_are_refused_or_harmless(seed);
  return 0;
}
