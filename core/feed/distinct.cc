#include "feed/distinct.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "feed/chunks.h"
#include "feed/key_pieces.h"

namespace trireme {
namespace {

constexpr int kPieceBitsMax = 11;
constexpr std::size_t kGroupsPerThread = 16;
constexpr std::size_t kStepsPerHash = 16;  // only keys that somebody chose for it take more

// Sorts the hashes of a piece, without those that repeat, into its beginning; returns how many they
// are. All begin with the same `bits` bits. They go through an open table whose places are in the
// order of hashes: it drops those that repeat, and has the others nearly sorted. table: its memory,
// which serves many pieces.
std::size_t reduce(std::span<std::uint64_t> hashes, int bits, std::vector<std::uint64_t>& table) {
  const int home_bits = std::bit_width(3 * hashes.size());
  const std::size_t mask = (std::size_t{1} << home_bits) - 1;
  table.assign(mask + 1, 0);  // 0: free
  std::size_t steps_left = kStepsPerHash * hashes.size();
  bool has_zero = false;
  for (const std::uint64_t hash : hashes) {
    // Two shifts each, because a shift by 64 is undefined.
    std::size_t i = hash << bits >> 1 >> (63 - home_bits);
    for (; table[i] != 0 && table[i] != hash; i = (i + 1) & mask) {
      if (--steps_left > 0) continue;
      std::ranges::sort(hashes);
      const auto repeated = std::ranges::unique(hashes);
      return hashes.size() - repeated.size();
    }
    table[i] = hash;
    has_zero |= hash == 0;
  }
  std::size_t num_others = 0;
  for (const std::uint64_t hash : table) {
    table[num_others] = hash;
    num_others += hash != 0 ? 1 : 0;  // no branch: it could not be predicted
  }
  std::size_t num = 0;
  std::uint64_t last = 0;
  if (has_zero) hashes[num++] = 0;
  for (std::size_t from = 0; from < num_others; ++from) {
    const std::uint64_t hash = table[from];
    std::size_t at = num++;
    if (hash > last) {
      last = hash;
    } else {
      for (; at > 0 && hashes[at - 1] > hash; --at) hashes[at] = hashes[at - 1];
    }
    hashes[at] = hash;
  }
  return num;
}

}  // namespace

Array<std::uint64_t> distinct(std::span<const std::span<const std::uint64_t>> parts, Pool& pool) {
  KeyPieces pieces({parts.begin(), parts.end()}, std::nullopt, kPieceBitsMax, pool);
  Array<std::uint64_t> hashes(pieces.total());  // by piece
  pieces.distribute([&](std::size_t at, std::uint64_t hash, std::size_t) { hashes[at] = hash; },
                    [](std::size_t) {});
  std::vector<std::size_t> nums(pieces.size());
  const std::size_t num_groups = num_chunks(pieces.size(), 1, pool, kGroupsPerThread);
  pool.run(num_groups, [&](std::size_t g) {
    std::vector<std::uint64_t> table;
    const std::size_t end = chunk_begin(pieces.size(), g + 1, num_groups);
    for (std::size_t p = chunk_begin(pieces.size(), g, num_groups); p < end; ++p) {
      const std::span piece(hashes.data() + pieces.begin(p), pieces.num_values(p));
      nums[p] = reduce(piece, pieces.bits(), table);
      for (std::uint64_t& hash : piece.first(nums[p])) hash = unmix64(hash);
    }
  });
  const std::size_t num = std::reduce(nums.begin(), nums.end());
  // Where few repeat, the keys stay in this memory; else they get some of their own size.
  Array<std::uint64_t> others(num < hashes.size() / 2 ? num : 0);
  Array<std::uint64_t>& keys = num < hashes.size() / 2 ? others : hashes;
  for (std::size_t p = 0, to = 0; p < pieces.size(); to += nums[p++]) {
    const std::uint64_t* const from = hashes.data() + pieces.begin(p);
    if (keys.data() + to != from) std::memmove(keys.data() + to, from, nums[p] * sizeof *from);
  }
  keys.truncate(num);
  return std::move(keys);
}

}  // namespace trireme
