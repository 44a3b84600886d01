#include "table/removed.h"

#include <algorithm>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"

namespace trireme {

void RemovedKeys::prepare(std::uint32_t bucket, std::size_t num_keys) {
  Bucket& b = buckets_[bucket];
  const std::size_t size = b.keys.size() + num_keys;
  if (size <= std::min(b.keys.capacity(), b.versions.capacity())) return;
  const std::size_t room = std::max(size, b.keys.size() + b.keys.size() / 2);
  b.keys.reserve(room);
  b.versions.reserve(room);
}

void RemovedKeys::add(std::uint32_t bucket, std::uint64_t key, std::uint32_t version,
                      std::size_t num_rows) noexcept {
  Bucket& b = buckets_[bucket];
  if (b.keys.size() >= std::max(num_rows, kKeptMin)) {
    drop(b, b.versions[b.versions.size() / 2]);
  }
  b.keys.push_back(key);
  b.versions.push_back(version);
}

void RemovedKeys::trim(std::uint32_t bucket) noexcept {
  Bucket& b = buckets_[bucket];
  if (b.keys.capacity() <= 2 * b.keys.size()) return;
  try {
    b.keys.shrink_to_fit();
    b.versions.shrink_to_fit();
  } catch (const std::bad_alloc&) {  // then they keep it
  }
}

Array<std::uint64_t> RemovedKeys::since(std::uint32_t bucket, std::uint32_t since) const {
  const Bucket& b = buckets_[bucket];
  if (since < b.forgotten) {
    throw Error(ErrorCode::kBadRequest, "Table.snapshot: bucket " + std::to_string(bucket) +
                                            ": expected since >= " + std::to_string(b.forgotten) +
                                            ", found " + std::to_string(since) +
                                            ": the keys removed before are forgotten; save"
                                            " all rows, and deltas after that");
  }
  const auto first = std::upper_bound(b.versions.begin(), b.versions.end(), since);
  std::vector<std::uint64_t> keys(b.keys.begin() + (first - b.versions.begin()), b.keys.end());
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  Array<std::uint64_t> found(keys.size());
  std::copy(keys.begin(), keys.end(), found.data());
  return found;
}

void RemovedKeys::forget(std::uint32_t bucket, std::uint32_t version) noexcept {
  drop(buckets_[bucket], version);
  trim(bucket);
}

// Forgets keys, and keeps their room.
void RemovedKeys::drop(Bucket& b, std::uint32_t version) noexcept {
  const auto end = std::upper_bound(b.versions.begin(), b.versions.end(), version);
  b.keys.erase(b.keys.begin(), b.keys.begin() + (end - b.versions.begin()));
  b.versions.erase(b.versions.begin(), end);
  b.forgotten = std::max(b.forgotten, version);
}

void RemovedKeys::save(std::uint32_t bucket, std::uint32_t since, ByteWriter& bytes) const {
  const Bucket& b = buckets_[bucket];
  const auto first = std::upper_bound(b.versions.begin(), b.versions.end(), since);
  const auto at = static_cast<std::size_t>(first - b.versions.begin());
  bytes.value(static_cast<std::uint64_t>(b.keys.size() - at));
  bytes.array(std::span(b.keys).subspan(at));
  bytes.array(std::span(b.versions).subspan(at));
}

RemovedKeys::Removals RemovedKeys::parse(std::uint32_t bucket, ByteReader& bytes) {
  Removals found;
  const auto num_keys = bytes.value<std::uint64_t>();
  bytes.expect<std::uint64_t>(num_keys);
  found.keys.resize(num_keys);
  bytes.array(std::span(found.keys));
  bytes.expect<std::uint32_t>(num_keys);
  found.versions.resize(num_keys);
  bytes.array(std::span(found.versions));
  const bool are_own = std::ranges::all_of(
      found.keys, [&](std::uint64_t key) { return bucket_of_hash(mix64(key)) == bucket; });
  if (!are_own || !std::ranges::is_sorted(found.versions)) {
    throw Error(ErrorCode::kCorruption, "RemovedKeys: expected removals from bucket " +
                                            std::to_string(bucket) +
                                            " in their order, found others");
  }
  return found;
}

void RemovedKeys::restore(std::uint32_t bucket, Removals&& removals, std::uint32_t since) noexcept {
  buckets_[bucket] = {std::move(removals), since};
}

std::size_t RemovedKeys::bytes(std::uint32_t bucket) const noexcept {
  const Bucket& b = buckets_[bucket];
  return b.keys.capacity() * sizeof b.keys[0] + b.versions.capacity() * sizeof b.versions[0];
}

}  // namespace trireme
