// Small tables with an SSD tier on the fake device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "check.h"
#include "fake_device.h"
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

// A table of rows whose weights tell how often they were pushed, on a device of its own.
struct Counted {
  Counted(std::uint64_t seed, std::size_t num_keys, std::size_t row_budget,
          std::uint32_t num_buckets = 64, const PolicyConfig& policy = {})
      : random(seed),
        keys(keys_of_buckets(random, num_buckets, num_keys)),
        device(std::make_shared<ssd::FakeDevice>(seed)) {
    config.dims = {8};
    config.rule.name = "sgd";
    config.initializer = "constant";
    config.absent = "zeros";
    config.policy = policy;
    const std::size_t own = own_bytes(config);
    config.tier = tier_config(device, own + row_budget);
    table.emplace(config);
  }

  std::size_t push(std::span<const std::uint64_t> some) {
    const std::vector<float> grads(some.size() * 8, -1.0F);
    return table->update(some, grads.data(), std::array{PushId{0, ++sequence}},
                         RuleValues{.lr = 1.0}, pool);
  }
  float count_of(std::uint64_t key) { return counts_of({&key, 1})[0]; }
  // Of many at once each page is read once.
  std::vector<float> counts_of(std::span<const std::uint64_t> some) {
    std::vector<float> weights(some.size() * 8), counts(some.size());
    table->lookup(some, weights.data(), pool);
    for (std::size_t i = 0; i < some.size(); ++i) counts[i] = weights[i * 8];
    return counts;
  }

  Random random;
  Keys keys;
  Pool pool{1};
  std::shared_ptr<ssd::FakeDevice> device;
  TableConfig config;
  std::optional<Table> table;
  std::int64_t sequence = 0;
};

// As they are in memory, but that the key is missing.
using RowsByKey = std::map<std::uint64_t, std::vector<std::uint8_t>>;

inline RowsByKey rows_of(const Table& table) {
  RowsByKey rows;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    const BucketContent content = table.snapshot(bucket);
    const std::size_t row_bytes = table.row_bytes();
    for (std::size_t i = 0; i < content.keys.span().size(); ++i) {
      const auto row = content.rows.span().subspan(i * row_bytes, row_bytes);
      std::vector<std::uint8_t>& in_memory = rows[content.keys.span()[i]];
      in_memory.resize(kWeightsOffset);
      in_memory.insert(in_memory.end(), row.begin(), row.end());
    }
  }
  return rows;
}

}  // namespace trireme::test
