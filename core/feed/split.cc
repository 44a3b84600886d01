#include "feed/split.h"

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "feed/chunks.h"

namespace trireme {
namespace {

constexpr std::size_t kChunkKeysMin = 16384;  // less is not worth waking a thread for

void check(std::size_t num_keys, std::span<const std::uint16_t> owners, std::uint16_t num_owners) {
  if (num_keys > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::kBadRequest,
                "split: expected fewer than 2^31 keys, found " + std::to_string(num_keys));
  }
  if (owners.size() != kNumBuckets) {
    throw Error(ErrorCode::kBadRequest, "split: expected " + std::to_string(kNumBuckets) +
                                            " owners, found " + std::to_string(owners.size()));
  }
  for (std::size_t bucket = 0; bucket < owners.size(); ++bucket) {
    if (owners[bucket] < num_owners) continue;
    throw Error(ErrorCode::kBadRequest,
                "split: expected owners below " + std::to_string(num_owners) + ", found " +
                    std::to_string(owners[bucket]) + " for bucket " + std::to_string(bucket));
  }
}

}  // namespace

Split split(std::span<const std::uint64_t> keys, std::span<const std::uint16_t> owners,
            std::uint16_t num_owners, Pool& pool) {
  check(keys.size(), owners, num_owners);
  const std::size_t chunks = num_chunks(keys.size(), kChunkKeysMin, pool, 1);
  std::vector<std::int64_t> next(chunks * num_owners,
                                 0);  // (chunk, owner): count, then where to write
  pool.run(chunks, [&](std::size_t c) {
    std::int64_t* const count = &next[c * num_owners];
    const std::size_t end = chunk_begin(keys.size(), c + 1, chunks);
    for (std::size_t i = chunk_begin(keys.size(), c, chunks); i < end; ++i)
      ++count[owners[bucket_of(keys[i])]];
  });
  Split result{Array<std::int32_t>(keys.size()), Array<std::int64_t>(num_owners)};
  std::int64_t total = 0;
  for (std::size_t owner = 0; owner < num_owners; ++owner) {
    const std::int64_t begin = total;
    for (std::size_t c = 0; c < chunks; ++c)
      total += std::exchange(next[c * num_owners + owner], total);
    result.counts[owner] = total - begin;
  }
  pool.run(chunks, [&](std::size_t c) {
    std::int64_t* const write = &next[c * num_owners];
    const std::size_t end = chunk_begin(keys.size(), c + 1, chunks);
    for (std::size_t i = chunk_begin(keys.size(), c, chunks); i < end; ++i) {
      result.order[static_cast<std::size_t>(write[owners[bucket_of(keys[i])]]++)] =
          static_cast<std::int32_t>(i);
    }
  });
  return result;
}

}  // namespace trireme
