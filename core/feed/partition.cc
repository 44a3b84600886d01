#include "feed/partition.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/search_steps.h"

namespace trireme {
namespace {

constexpr std::size_t kPieceKeys = 512;  // of a piece of the sets, about
constexpr int kPieceBitsMax = 12;        // keys are in order of the 12 bits of their buckets

// A set of hashes: an open table, or the hashes sorted once searches have taken too many steps.
class HashSet {
 public:
  explicit HashSet(std::size_t num_steps_max) : steps_left_(num_steps_max) {}

  // The hashes stay as long as they are in the set; it may sort them.
  void assign(std::span<std::uint64_t> hashes) {
    hashes_ = hashes;
    if (is_sorted()) std::ranges::sort(hashes);
    slots_.assign(std::bit_ceil(4 * hashes.size() + 1), 0);
    has_zero_ = false;
    for (std::size_t i = 0; i < hashes.size() && !is_sorted(); ++i) {
      const std::uint64_t hash = hashes[i];
      has_zero_ |= hash == 0;
      if (hash != 0) slots_[find(hash)] = hash;
    }
  }

  bool contains(std::uint64_t hash) noexcept {
    const std::size_t slot = find(hash);
    if (is_sorted()) return std::ranges::binary_search(hashes_, hash);
    return hash == 0 ? has_zero_ : slots_[slot] == hash;
  }

 private:
  bool is_sorted() const noexcept { return steps_left_ == 0; }

  // The slot of the hash, or a free one; any if the hashes are sorted, and it may sort them.
  std::size_t find(std::uint64_t hash) noexcept {
    const std::size_t mask = slots_.size() - 1;
    std::size_t slot = hash & mask, num_steps = 0;
    while (slots_[slot] != 0 && slots_[slot] != hash && num_steps < steps_left_) {
      slot = (slot + 1) & mask;
      ++num_steps;
    }
    if (num_steps == 0) return slot;
    steps_left_ -= num_steps;
    if (is_sorted()) std::ranges::sort(hashes_);
    return slot;
  }

  std::span<std::uint64_t> hashes_;
  std::vector<std::uint64_t> slots_;  // 0: free
  std::size_t steps_left_;
  bool has_zero_ = false;
};

// Keys in the order of their buckets, read piece by piece: by the top bits of the hash.
class PiecedKeys {
 public:
  PiecedKeys(std::span<const std::uint64_t> keys, int bits) : keys_(keys), bits_(bits) {}

  // Calls visit(i, hash) for each key of a piece; pieces are visited in order.
  template <class Visit>
  void visit(std::uint64_t piece, const Visit& visit) {
    for (; next_ < keys_.size(); ++next_) {
      const std::uint64_t hash = mix64(keys_[next_]);
      if (hash >> 1 >> (63 - bits_) != piece) return;  // a shift by 64 would be undefined
      visit(next_, hash);
    }
  }

  void check_end() const {
    if (next_ == keys_.size()) return;
    throw Error(ErrorCode::kBadRequest,
                "partition: expected keys in the order of their buckets, found " +
                    std::to_string(keys_[next_]) + " at " + std::to_string(next_));
  }

 private:
  std::span<const std::uint64_t> keys_;
  int bits_;
  std::size_t next_ = 0;
};

}  // namespace

Partition partition(std::span<const std::uint64_t> keys,
                    std::span<const std::span<const std::uint64_t>> sets) {
  if (keys.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::kBadRequest,
                "partition: expected fewer than 2^31 keys, found " + std::to_string(keys.size()));
  }
  std::size_t num_in_sets = 0;
  for (const auto& set : sets) num_in_sets += set.size();
  const int bits =
      std::min(static_cast<int>(std::bit_width(num_in_sets / kPieceKeys)), kPieceBitsMax);
  PiecedKeys pieced(keys, bits);
  std::vector<PiecedKeys> pieced_sets;
  for (const auto& set : sets) pieced_sets.emplace_back(set, bits);
  const auto room = [&] {
    return KeyPart{Array<std::uint64_t>(keys.size()), Array<std::int32_t>(keys.size())};
  };
  Partition result{room(), room()};
  auto& [others, shared] = result;
  std::size_t num_others = 0, num_shared = 0;
  HashSet hashes(kStepsPerKey * (keys.size() + num_in_sets) + 1);
  std::vector<std::uint64_t> in_sets;
  for (std::uint64_t piece = 0; piece < std::uint64_t{1} << bits; ++piece) {
    in_sets.clear();
    for (PiecedKeys& set : pieced_sets) {
      set.visit(piece, [&](std::size_t, std::uint64_t hash) { in_sets.push_back(hash); });
    }
    hashes.assign(in_sets);
    pieced.visit(piece, [&](std::size_t i, std::uint64_t hash) {
      // Written to both, because a processor cannot predict which it is.
      others.keys[num_others] = shared.keys[num_shared] = keys[i];
      others.places[num_others] = shared.places[num_shared] = static_cast<std::int32_t>(i);
      const bool is_shared = hashes.contains(hash);
      num_shared += is_shared ? 1 : 0;
      num_others += is_shared ? 0 : 1;
    });
  }
  pieced.check_end();
  for (const PiecedKeys& set : pieced_sets) set.check_end();
  for (auto [part, size] : {std::pair{&others, num_others}, {&shared, num_shared}}) {
    part->keys.truncate(size);
    part->places.truncate(size);
  }
  return result;
}

void put_rows(std::span<const float> rows, std::span<const std::int32_t> places, std::size_t dim,
              std::span<float> out) {
  const std::size_t num_rows = dim == 0 ? 0 : out.size() / dim;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i] < 0 || static_cast<std::size_t>(places[i]) >= num_rows) {
      throw Error(ErrorCode::kBadRequest, "put_rows: expected places below " +
                                              std::to_string(num_rows) + ", found " +
                                              std::to_string(places[i]));
    }
    std::copy_n(rows.data() + i * dim, dim, out.data() + static_cast<std::size_t>(places[i]) * dim);
  }
}

}  // namespace trireme
