#include "table/keys_by_stripe.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/hash.h"

namespace trireme {
namespace {

constexpr std::size_t kChunkKeysMin = 16384;  // less is not worth waking a thread for

struct Chunk {
  std::span<const std::uint64_t> keys;
  std::size_t first = 0;                            // position of keys[0] in the call
  std::array<std::uint32_t, kNumStripes> counts{};  // keys per stripe
  std::array<std::size_t, kNumStripes> next{};      // where to write the next key of a stripe
  bool is_ordered = true;
};

void count(Chunk& chunk) noexcept {
  std::uint32_t last = 0;
  bool is_ordered = true;
  for (const std::uint64_t key : chunk.keys) {
    const std::uint32_t stripe = stripe_of_hash(mix64(key));
    ++chunk.counts[stripe];
    is_ordered &= stripe >= last;
    last = stripe;
  }
  chunk.is_ordered = is_ordered;
}

void place(Chunk& chunk, std::uint64_t* keys, std::uint32_t* positions) noexcept {
  for (std::size_t i = 0; i < chunk.keys.size(); ++i) {
    const std::uint64_t key = chunk.keys[i];
    const std::size_t to = chunk.next[stripe_of_hash(mix64(key))]++;
    keys[to] = key;
    positions[to] = static_cast<std::uint32_t>(chunk.first + i);
  }
}

std::vector<Chunk> cut(std::span<const std::uint64_t> keys, int threads) {
  const std::size_t num_chunks =
      std::clamp<std::size_t>(keys.size() / kChunkKeysMin, 1, static_cast<std::size_t>(threads));
  std::vector<Chunk> chunks(num_chunks);
  for (std::size_t c = 0; c < num_chunks; ++c) {
    const std::size_t begin = keys.size() * c / num_chunks;
    const std::size_t end = keys.size() * (c + 1) / num_chunks;
    chunks[c].keys = keys.subspan(begin, end - begin);
    chunks[c].first = begin;
  }
  return chunks;
}

bool are_ordered(std::span<const Chunk> chunks) noexcept {
  std::uint32_t last = 0;
  for (const Chunk& chunk : chunks) {
    if (chunk.keys.empty()) continue;
    if (!chunk.is_ordered || stripe_of_hash(mix64(chunk.keys.front())) < last) return false;
    last = stripe_of_hash(mix64(chunk.keys.back()));
  }
  return true;
}

}  // namespace

KeysByStripe::KeysByStripe(std::span<const std::uint64_t> keys, Pool& pool) : keys_(keys) {
  if (keys.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kBadRequest, "Table: expected fewer than 2^32 keys in a call, found " +
                                            std::to_string(keys.size()));
  }
  std::vector<Chunk> chunks = cut(keys, pool.threads());
  pool.run(chunks.size(), [&](std::size_t c) { count(chunks[c]); });
  std::size_t at = 0;
  for (std::size_t stripe = 0; stripe < kNumStripes; ++stripe) {
    starts_[stripe] = at;
    for (Chunk& chunk : chunks) {
      chunk.next[stripe] = at;
      at += chunk.counts[stripe];
    }
  }
  starts_[kNumStripes] = at;
  if (are_ordered(chunks)) return;
  copied_keys_ = std::make_unique_for_overwrite<std::uint64_t[]>(keys.size());
  positions_ = std::make_unique_for_overwrite<std::uint32_t[]>(keys.size());
  keys_ = {copied_keys_.get(), keys.size()};
  pool.run(chunks.size(),
           [&](std::size_t c) { place(chunks[c], copied_keys_.get(), positions_.get()); });
}

Group KeysByStripe::operator[](std::size_t stripe) const noexcept {
  const std::size_t first = starts_[stripe];
  return {.keys = keys_.subspan(first, starts_[stripe + 1] - first),
          .positions = positions_ ? positions_.get() + first : nullptr,
          .first = first};
}

}  // namespace trireme
