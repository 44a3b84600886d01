#include "feed/distinct.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/search_steps.h"
#include "feed/chunks.h"
#include "feed/key_pieces.h"

namespace trireme {
namespace {

constexpr int kPieceBitsMax = 11;
constexpr std::size_t kGroupsPerThread = 16;

// Orders the hashes of a piece, all of which begin with the same `bits` bits, by the bits that
// follow: as many as give each hash two to four places of its own. next: memory, which serves many
// pieces.
template <class Count>
void order_nearly(std::span<const std::uint64_t> hashes, int bits, std::vector<Count>& next,
                  std::span<std::uint64_t> ordered) {
  const int place_bits = std::bit_width(hashes.size()) + 1;
  const auto place_of = [&](std::uint64_t hash) { return hash << bits >> (64 - place_bits); };
  next.assign(std::size_t{1} << place_bits, 0);
  for (const std::uint64_t hash : hashes) ++next[place_of(hash)];
  Count total = 0;
  for (Count& n : next) total = static_cast<Count>(total + std::exchange(n, total));
  for (const std::uint64_t hash : hashes) ordered[next[place_of(hash)]++] = hash;
}

// Writes hashes that are nearly in order to `sorted`, in order and without those that repeat;
// returns how many they are.
std::size_t insert(std::span<std::uint64_t> hashes, std::span<std::uint64_t> sorted) {
  std::size_t steps_left = kStepsPerKey * hashes.size();
  std::size_t num = 0;
  for (const std::uint64_t hash : hashes) {
    if (num == 0) {
      sorted[num++] = hash;
      continue;
    }
    // No branch: whether two neighbours are in order could not be predicted.
    const std::uint64_t last = sorted[num - 1];
    sorted[num - 1] = std::min(last, hash);
    sorted[num] = std::max(last, hash);
    num += hash != last ? 1 : 0;
    if (num < 3 || sorted[num - 3] < sorted[num - 2]) continue;
    std::size_t at = num - 2;
    const std::uint64_t lower = sorted[at];
    while (at > 0 && sorted[at - 1] > lower && steps_left > 0) --at, --steps_left;
    if (steps_left == 0) {
      std::ranges::sort(hashes);
      const auto end = std::ranges::unique_copy(hashes, sorted.begin()).out;
      return static_cast<std::size_t>(end - sorted.begin());
    }
    if (at > 0 && sorted[at - 1] == lower) {
      sorted[num - 2] = sorted[num - 1];
      --num;
    } else {
      std::copy_backward(&sorted[at], &sorted[num - 2], &sorted[num - 1]);
      sorted[at] = lower;
    }
  }
  return num;
}

// Sorts the hashes of a piece, without those that repeat, into its beginning.
class PieceSorter {
 public:
  std::size_t sort(std::span<std::uint64_t> hashes, int bits) {
    if (ordered_.size() < hashes.size()) ordered_.resize(hashes.size());
    const std::span ordered = std::span(ordered_).first(hashes.size());
    // Narrow counts stay in the first-level cache.
    if (hashes.size() <= std::numeric_limits<std::uint16_t>::max()) {
      order_nearly(hashes, bits, narrow_, ordered);
    } else {
      order_nearly(hashes, bits, wide_, ordered);
    }
    return insert(ordered, hashes);
  }

 private:
  std::vector<std::uint64_t> ordered_;
  std::vector<std::uint16_t> narrow_;
  std::vector<std::size_t> wide_;
};

}  // namespace

Array<std::uint64_t> distinct(std::span<const std::span<const std::uint64_t>> parts, Pool& pool) {
  KeyPieces pieces({parts.begin(), parts.end()}, std::nullopt, kPieceBitsMax, pool);
  Array<std::uint64_t> hashes(pieces.total());  // by piece
  pieces.distribute([&](std::size_t at, std::uint64_t hash, std::size_t) { hashes[at] = hash; },
                    [](std::size_t) {});
  std::vector<std::size_t> nums(pieces.size());
  const std::size_t num_groups = num_chunks(pieces.size(), 1, pool, kGroupsPerThread);
  pool.run(num_groups, [&](std::size_t g) {
    PieceSorter sorter;
    const std::size_t end = chunk_begin(pieces.size(), g + 1, num_groups);
    for (std::size_t p = chunk_begin(pieces.size(), g, num_groups); p < end; ++p) {
      const std::span piece(hashes.data() + pieces.begin(p), pieces.num_values(p));
      nums[p] = sorter.sort(piece, pieces.bits());
      unmix64_all(piece.first(nums[p]));
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
