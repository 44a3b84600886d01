#include "feed/distinct.h"

#include <bit>
#include <vector>

#include "feed/key_pieces.h"

namespace trireme {
namespace {

constexpr int kPieceBitsMax = 11;

// Keeps the first of equal hashes, in the order of buckets, at the begin of the piece; returns how
// many.
std::size_t reduce(std::span<std::uint64_t> hashes, const KeyPieces& pieces) {
  const std::size_t mask = std::bit_ceil(3 * hashes.size() + 1) - 1;
  std::vector<std::uint32_t> numbers(mask + 1, 0);  // of the hashes in `kept`, from 1; 0 is free
  Array<std::uint64_t> kept(hashes.size());
  std::uint32_t num_kept = 0;
  for (const std::uint64_t hash : hashes) {
    std::size_t slot = hash & mask;
    while (numbers[slot] != 0 && kept[numbers[slot] - 1] != hash) slot = (slot + 1) & mask;
    if (numbers[slot] != 0) continue;
    kept[num_kept] = hash;
    numbers[slot] = ++num_kept;
  }
  kept.truncate(num_kept);
  pieces.order_by_bucket(kept.span(),
                         [&](std::size_t i, std::size_t rank) { hashes[rank] = kept[i]; });
  return num_kept;
}

}  // namespace

Array<std::uint64_t> distinct(std::span<const std::uint64_t> values,
                              std::optional<std::uint64_t> padding_key, Pool& pool) {
  KeyPieces pieces(values, padding_key, kPieceBitsMax, pool);
  Array<std::uint64_t> hashes(values.size());  // by piece
  pieces.distribute([&](std::size_t at, std::uint64_t hash, std::size_t) { hashes[at] = hash; },
                    [](std::size_t) {});
  std::vector<std::size_t> first(pieces.size() + 1, 0);
  pool.run(pieces.size(), [&](std::size_t p) {
    first[p + 1] = reduce({hashes.data() + pieces.begin(p), pieces.num_values(p)}, pieces);
  });
  for (std::size_t p = 0; p < pieces.size(); ++p) first[p + 1] += first[p];
  Array<std::uint64_t> keys(first.back());
  pool.run(pieces.size(), [&](std::size_t p) {
    const std::uint64_t* const kept = hashes.data() + pieces.begin(p);
    for (std::size_t i = first[p]; i < first[p + 1]; ++i) keys[i] = unmix64(kept[i - first[p]]);
  });
  return keys;
}

}  // namespace trireme
