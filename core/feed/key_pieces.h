// Values distributed over pieces: ranges of buckets, by the top bits of the hash, that are small
// enough for the hash table of one to stay in the first-level cache. All occurrences of a key are
// in one piece, in the order of their positions, and pieces are in the order of buckets. So each
// piece can be worked on alone, in parallel, and the result does not depend on how the work was
// divided.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/pool.h"
#include "feed/chunks.h"

namespace trireme {

class KeyPieces {
 public:
  using Part = std::span<const std::uint64_t>;

  // parts: the values, in one array or several. bits_max: of the number of pieces; distributing to
  // more would cost more than it saves.
  KeyPieces(std::vector<Part> parts, std::optional<std::uint64_t> padding_key, int bits_max,
            Pool& pool)
      : parts_(std::move(parts)),
        total_(total_of(parts_)),
        has_padding_(padding_key.has_value()),
        padding_(padding_key.value_or(0)),
        pool_(pool),
        bits_(std::min(static_cast<int>(std::bit_width(total_ / kValues)), bits_max)),
        num_chunks_(num_chunks(total_, kChunkValuesMin, pool, 1)) {}

  // Values in all parts.
  std::size_t total() const noexcept { return total_; }

  // The first bits of a hash, which number its piece.
  int bits() const noexcept { return bits_; }
  std::size_t size() const noexcept { return std::size_t{1} << bits_; }
  // Where the values of a piece are, after distribute(). Piece size() begins behind the last value.
  std::size_t begin(std::size_t piece) const noexcept { return begins_[piece]; }
  std::size_t num_values(std::size_t piece) const noexcept {
    return begins_[piece + 1] - begins_[piece];
  }

  // Calls put(at, hash, i) for each value, `at` being its place, and skip(i) for each that is
  // padding; from all threads. mix64 is a bijection: equal hashes are equal keys.
  template <class Put, class Skip>
  void distribute(const Put& put, const Skip& skip) {
    std::vector<std::size_t> next(num_chunks_ * size(), 0);  // (chunk, piece): count, then place
    pool_.run(num_chunks_, [&](std::size_t c) {
      std::size_t* const count = &next[c * size()];
      for_chunk(
          c, [&](std::size_t, std::uint64_t hash) { ++count[piece_of(hash)]; }, [](std::size_t) {});
    });
    begins_.resize(size() + 1);
    std::size_t total = 0;
    for (std::size_t p = 0; p < size(); ++p) {
      begins_[p] = total;
      for (std::size_t c = 0; c < num_chunks_; ++c) {
        total += std::exchange(next[c * size() + p], total);
      }
    }
    begins_[size()] = total;
    pool_.run(num_chunks_, [&](std::size_t c) {
      std::size_t* const write = &next[c * size()];
      for_chunk(
          c, [&](std::size_t i, std::uint64_t hash) { put(write[piece_of(hash)]++, hash, i); },
          skip);
    });
  }

  // Calls write(i, rank) for each of the hashes of a piece: a stable counting sort by the bucket
  // bits that the piece does not fix.
  template <class Write>
  void order_by_bucket(std::span<const std::uint64_t> hashes, const Write& write) const {
    const std::size_t num_buckets = std::size_t{kNumBuckets} >> bits_;
    std::vector<std::uint32_t> next(num_buckets, 0);
    for (const std::uint64_t hash : hashes) ++next[bucket_of_hash(hash) & (num_buckets - 1)];
    std::uint32_t total = 0;
    for (std::uint32_t& n : next) total += std::exchange(n, total);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      write(i, next[bucket_of_hash(hashes[i]) & (num_buckets - 1)]++);
    }
  }

 private:
  static constexpr std::size_t kValues = 2048;          // of a piece, about
  static constexpr std::size_t kChunkValuesMin = 8192;  // less is not worth waking a thread for
  static constexpr std::size_t kHashedAtOnce = 256;     // values

  // In two shifts, because a shift by 64 is undefined.
  std::size_t piece_of(std::uint64_t hash) const noexcept { return hash >> 1 >> (63 - bits_); }

  template <class Visit, class Skip>
  void for_chunk(std::size_t chunk, const Visit& visit, const Skip& skip) const {
    const std::size_t begin = chunk_begin(total_, chunk, num_chunks_);
    const std::size_t end = chunk_begin(total_, chunk + 1, num_chunks_);
    std::size_t first = 0;  // the number of the part's first value among all
    for (const Part& part : parts_) {
      const std::size_t last = std::min(end, first + part.size());
      for (std::size_t i = std::max(begin, first); i < last;) {
        const Part block = part.subspan(i - first, std::min(kHashedAtOnce, last - i));
        std::array<std::uint64_t, kHashedAtOnce> hashes;
        mix64_all(block, hashes.data());
        for (std::size_t j = 0; j < block.size(); ++j, ++i) {
          if (has_padding_ && block[j] == padding_) {
            skip(i);
          } else {
            visit(i, hashes[j]);
          }
        }
      }
      first += part.size();
    }
  }

  static std::size_t total_of(const std::vector<Part>& parts) noexcept {
    std::size_t total = 0;
    for (const Part& part : parts) total += part.size();
    return total;
  }

  const std::vector<Part> parts_;
  const std::size_t total_;
  const bool has_padding_;
  const std::uint64_t padding_;
  Pool& pool_;
  const int bits_;
  const std::size_t num_chunks_;
  std::vector<std::size_t> begins_;  // (size + 1,)
};

}  // namespace trireme
