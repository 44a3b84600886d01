// Design: as unique(). Values are distributed over pieces, ranges of buckets whose hash table stays
// in cache; then each piece is reduced for itself.
#include "feed/distinct.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "feed/chunks.h"

namespace trireme {
namespace {

constexpr std::size_t kPieceValues = 2048;
constexpr int kPieceBitsMax = 11;
constexpr std::size_t kChunkValuesMin = 8192;  // less is not worth waking a thread for

class Distinct {
 public:
  Distinct(std::span<const std::uint64_t> values, std::optional<std::uint64_t> padding_key,
           Pool& pool)
      : values_(values),
        padding_key_(padding_key),
        pool_(pool),
        piece_bits_(std::min(static_cast<int>(std::bit_width(values.size() / kPieceValues)),
                             kPieceBitsMax)),
        num_pieces_(std::size_t{1} << piece_bits_),
        num_chunks_(num_chunks(values.size(), kChunkValuesMin, pool, 1)),
        hashes_(values.size()) {}

  Array<std::uint64_t> run() {
    distribute();
    std::vector<std::size_t> first(num_pieces_ + 1, 0);
    pool_.run(num_pieces_, [&](std::size_t p) { first[p + 1] = reduce(p); });
    for (std::size_t p = 0; p < num_pieces_; ++p) first[p + 1] += first[p];
    Array<std::uint64_t> keys(first.back());
    pool_.run(num_pieces_, [&](std::size_t p) {
      const std::uint64_t* const hashes = hashes_.data() + begins_[p];
      for (std::size_t i = 0; i < first[p + 1] - first[p]; ++i) {
        keys[first[p] + i] = unmix64(hashes[i]);
      }
    });
    return keys;
  }

 private:
  // In two shifts, because a shift by 64 is undefined.
  std::size_t piece_of(std::uint64_t hash) const noexcept {
    return hash >> 1 >> (63 - piece_bits_);
  }

  template <class Function>
  void for_values(std::size_t chunk, const Function& function) const {
    const std::size_t end = chunk_begin(values_.size(), chunk + 1, num_chunks_);
    for (std::size_t i = chunk_begin(values_.size(), chunk, num_chunks_); i < end; ++i) {
      if (padding_key_ != values_[i]) function(mix64(values_[i]));
    }
  }

  // Stable: within a piece, hashes keep the order of their values.
  void distribute() {
    std::vector<std::size_t> next(num_chunks_ * num_pieces_, 0);  // count, then where to write
    pool_.run(num_chunks_, [&](std::size_t c) {
      for_values(c, [&](std::uint64_t hash) { ++next[c * num_pieces_ + piece_of(hash)]; });
    });
    begins_.resize(num_pieces_ + 1);
    std::size_t total = 0;
    for (std::size_t p = 0; p < num_pieces_; ++p) {
      begins_[p] = total;
      for (std::size_t c = 0; c < num_chunks_; ++c) {
        total += std::exchange(next[c * num_pieces_ + p], total);
      }
    }
    begins_[num_pieces_] = total;
    pool_.run(num_chunks_, [&](std::size_t c) {
      for_values(
          c, [&](std::uint64_t hash) { hashes_[next[c * num_pieces_ + piece_of(hash)]++] = hash; });
    });
  }

  // Keeps the first of equal hashes of a piece, in the order of buckets; returns how many.
  std::size_t reduce(std::size_t piece) {
    const std::span hashes(hashes_.data() + begins_[piece], begins_[piece + 1] - begins_[piece]);
    const std::size_t mask = std::bit_ceil(2 * hashes.size() + 1) - 1;
    std::vector<std::uint64_t> slots(mask + 1, 0);  // 0 is free; one value has hash 0
    bool has_zero = false;
    const auto is_first = [&](std::uint64_t hash) {
      if (hash == 0) return !std::exchange(has_zero, true);
      std::size_t slot = hash & mask;
      while (slots[slot] != 0 && slots[slot] != hash) slot = (slot + 1) & mask;
      return std::exchange(slots[slot], hash) != hash;
    };
    std::vector<std::uint64_t> kept;
    kept.reserve(hashes.size());
    for (const std::uint64_t hash : hashes) {
      if (is_first(hash)) kept.push_back(hash);
    }
    order_by_bucket(kept, hashes.data());
    return kept.size();
  }

  // A stable counting sort by the bucket bits that the piece does not fix.
  void order_by_bucket(std::span<const std::uint64_t> kept, std::uint64_t* out) const {
    const std::size_t num_buckets = std::size_t{kNumBuckets} >> piece_bits_;
    std::vector<std::uint32_t> next(num_buckets, 0);
    for (const std::uint64_t hash : kept) ++next[bucket_of_hash(hash) & (num_buckets - 1)];
    std::uint32_t total = 0;
    for (std::uint32_t& n : next) total += std::exchange(n, total);
    for (const std::uint64_t hash : kept) {
      out[next[bucket_of_hash(hash) & (num_buckets - 1)]++] = hash;
    }
  }

  const std::span<const std::uint64_t> values_;
  const std::optional<std::uint64_t> padding_key_;
  Pool& pool_;
  const int piece_bits_;
  const std::size_t num_pieces_;
  const std::size_t num_chunks_;
  Array<std::uint64_t> hashes_;      // by piece
  std::vector<std::size_t> begins_;  // (num_pieces + 1,): of the pieces
};

}  // namespace

Array<std::uint64_t> distinct(std::span<const std::uint64_t> values,
                              std::optional<std::uint64_t> padding_key, Pool& pool) {
  return Distinct(values, padding_key, pool).run();
}

}  // namespace trireme
