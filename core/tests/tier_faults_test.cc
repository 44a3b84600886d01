// A table with an SSD tier on a disk with places that fail for ever, or beside a disk that does.
#include <memory>
#include <set>
#include <span>
#include <string>
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

constexpr std::uint64_t kSegmentBlocks = 64;

std::size_t num_damaged(const Table& table) { return table.tier()->use().log.num_damaged; }

// Of segments that have just been begun the last block becomes one that cannot be written.
void test_places_that_cannot_be_written_are_passed_over(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  std::set<std::string> seen;
  std::size_t num_spoiled = 0;
  for (std::size_t i = 0; i + 100 <= counted.keys.size(); i += 100) {
    counted.push(std::span(counted.keys).subspan(i, 100));
    std::size_t num_new = 0;
    for (const std::string& name : counted.device->names()) {
      num_new = seen.insert(name).second ? num_new + 1 : num_new;
    }
    if (num_new != 1 || counted.random.below(2) != 0) continue;
    counted.device->spoil(*seen.rbegin(), kSegmentBlocks - 1);
    ++num_spoiled;
  }
  for (int i = 0; i < 20; ++i) counted.push(std::span(counted.keys).subspan(1000 * i, 1000));
  const Tier::Use use = counted.table->tier()->use();
  std::cout << num_spoiled << " places, " << use.log.num_failed_writes << " writes failed\n";
  CHECK(num_spoiled > 2 && use.log.num_failed_writes >= num_spoiled);
  CHECK(counted.table->bytes() <= counted.config.tier.memory_bytes);
  const std::vector<float> counts = counted.counts_of(counted.keys);
  for (std::size_t i = 0; i < counts.size(); ++i) CHECK_EQUAL(counts[i], i < 20000 ? 2 : 1);
  CHECK_EQUAL(num_damaged(*counted.table), 0U);
  counted.table->tier()->log().flush();
}

void test_a_disk_that_cannot_be_written_leaves_the_work_to_the_other(
    std::uint64_t seed, const ssd::FakeDevice::Faults& faults) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  const auto other = std::make_shared<ssd::FakeDevice>(seed + 1);
  counted.config.tier.devices.push_back(other);
  counted.table.emplace(counted.config);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    if (i == 20000) other->set_faults(faults);
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  CHECK(counted.table->tier()->use().log.num_failed_writes > 0);
  CHECK(counted.table->bytes() <= counted.config.tier.memory_bytes);
  for (const float count : counted.counts_of(counted.keys)) CHECK_EQUAL(count, 1);
  other->set_faults({});
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  for (const float count : counted.counts_of(counted.keys)) CHECK_EQUAL(count, 2);
}

// It is an error of the rows of that page alone, and stays one.
void test_a_page_that_cannot_be_read_is_damaged(std::uint64_t seed) {
  Counted counted(seed, 60000, std::size_t{1} << 20);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  counted.table->tier()->log().flush();
  const std::vector<std::string> names = counted.device->names();
  for (int i = 0; i < 10; ++i) {
    counted.device->spoil(names[counted.random.below(names.size())],
                          counted.random.below(kSegmentBlocks));
  }
  std::size_t num_failed = 0;
  for (int round = 0; round < 2; ++round) {
    num_failed = 0;
    for (const std::uint64_t key : counted.keys) {
      try {
        CHECK_EQUAL(counted.count_of(key), 1);
      } catch (const Error& error) {
        ++num_failed;
        const std::string what = error.what();
        CHECK(what.find("bucket " + std::to_string(bucket_of(key)) + " ") != std::string::npos);
        CHECK(what.find(".rows at offset ") != std::string::npos);
        // Before any other page has been read it may be the disk.
        if (round == 1) CHECK(error.code() == ErrorCode::kCorruption);
      }
    }
  }
  CHECK(num_failed > 0 && num_failed <= 10 * 100);
  CHECK(num_damaged(*counted.table) > 0 && num_damaged(*counted.table) <= 10);
}

void test_a_device_that_is_gone_for_a_while_has_no_damaged_pages(std::uint64_t seed) {
  Counted counted(seed, 40000, std::size_t{1} << 20);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  for (int i = 0; i < 3; ++i) {
    counted.device->set_faults({.read_error = 1, .write_error = 1});
    std::size_t num_failed = 0;
    for (std::size_t j = 0; j < counted.keys.size(); j += 40) {
      try {
        counted.count_of(counted.keys[j]);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kUnavailable);
        ++num_failed;
      }
    }
    CHECK(num_failed > 100);
    counted.device->set_faults({});
    for (const float count : counted.counts_of(counted.keys)) CHECK_EQUAL(count, 1);
    CHECK_EQUAL(num_damaged(*counted.table), 0U);
  }
}

// A limit of rows takes others in the place of those that cannot be read.
void test_a_limit_is_kept_beside_pages_that_cannot_be_read(std::uint64_t seed) {
  constexpr std::size_t kMax = 400;
  PolicyConfig policy;
  policy.max_rows = kMax * kNumBuckets;
  Counted counted(seed, 20000, std::size_t{1} << 19, 64, policy);
  for (std::size_t i = 0; i < counted.keys.size(); i += 1000) {
    counted.push(std::span(counted.keys).subspan(i, 1000));
  }
  counted.table->tier()->log().flush();
  for (const std::string& name : counted.device->names()) {
    counted.device->spoil(name, counted.random.below(kSegmentBlocks));
  }
  int num_pushed = 0;
  for (int i = 0; i < 300; ++i) {
    counted.table->forget_removed(counted.table->version());  // they take memory too
    try {
      counted.push(test::keys_of_buckets(counted.random, 64, 100));
      ++num_pushed;
    } catch (const Error& error) {  // the index cannot tell one of the keys from one that is there
      CHECK(error.code() == ErrorCode::kCorruption || error.code() == ErrorCode::kUnavailable);
    }
  }
  CHECK(num_pushed > 280);
  std::size_t num_readable = 0;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += kNumBuckets / 64) {
    counted.table->shrink(bucket, {1, false}, 1);
  }
  for (const std::uint64_t key : counted.keys) {
    try {
      num_readable += counted.count_of(key) > 0;
    } catch (const Error&) {
    }
  }
  CHECK(num_damaged(*counted.table) > 0);
  CHECK(counted.table->num_rows() <= 64 * (kMax + 100));
  CHECK(num_readable < counted.keys.size());
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_places_that_cannot_be_written_are_passed_over(seed);
  test_a_disk_that_cannot_be_written_leaves_the_work_to_the_other(seed, {.write_error = 1});
  test_a_disk_that_cannot_be_written_leaves_the_work_to_the_other(seed, {.is_read_only = true});
  test_a_page_that_cannot_be_read_is_damaged(seed);
  test_a_device_that_is_gone_for_a_while_has_no_damaged_pages(seed);
  test_a_limit_is_kept_beside_pages_that_cannot_be_read(seed);
}
