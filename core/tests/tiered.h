// Small tables with an SSD tier on the fake device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "store/ssd/fake_device.h"
#include "table/table.h"

namespace trireme::test {

using Keys = std::vector<std::uint64_t>;

// Keys of few buckets, so that each has pages enough.
inline Keys keys_of_buckets(Random& random, std::uint32_t num_buckets, std::size_t num_keys) {
  Keys keys;
  while (keys.size() < num_keys) {
    const std::uint64_t key = random.next();
    if (bucket_of(key) % (kNumBuckets / num_buckets) == 0) keys.push_back(key);
  }
  return keys;
}

inline TierConfig tier_config(std::shared_ptr<ssd::FakeDevice> device, std::size_t memory_bytes) {
  return {.devices = {device},
          .memory_bytes = memory_bytes,
          .number = 7,
          .segment_bytes = std::size_t{256} << 10,
          .buffer_bytes = std::size_t{64} << 10,
          .read_bytes = std::size_t{128} << 10};
}

inline std::size_t own_bytes(TableConfig config) {
  config.tier = tier_config(std::make_shared<ssd::FakeDevice>(1), std::size_t{1} << 30);
  return Table(config).bytes();
}

}  // namespace trireme::test
