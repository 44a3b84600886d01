// Table: update, advance and erase: what changes rows one by one.
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "base/array.h"
#include "base/error.h"
#include "table/table.h"

namespace trireme {
namespace {

// Fewer keys than this are not worth waking threads for.
constexpr std::size_t kParallelKeysMin = 4096;

// Some keys of a group, copied: room for all of them is taken at the start.
class Selection {
 public:
  explicit Selection(const Group& from)
      : from_(from), keys_(from.keys.size()), positions_(from.keys.size()) {}

  void add(std::size_t i) noexcept {
    keys_[size_] = from_.keys[i];
    positions_[size_++] = static_cast<std::uint32_t>(from_.position(i));
  }
  Group group() const noexcept {
    return {.keys = keys_.span().first(size_), .positions = positions_.data(), .first = 0};
  }

 private:
  const Group& from_;
  Array<std::uint64_t> keys_;
  Array<std::uint32_t> positions_;
  std::size_t size_ = 0;
};

}  // namespace

// Calls function(stripe, group) for every stripe, also for those without keys.
template <class Function>
void Table::for_stripes(std::span<const std::uint64_t> keys, Pool& pool,
                        const Function& function) const {
  const Groups groups(keys, pool);
  if (keys.size() < kParallelKeysMin) {
    for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) function(stripe, groups[stripe]);
  } else {
    pool.run(kNumStripes, [&](std::size_t stripe) {
      function(static_cast<std::uint32_t>(stripe), groups[stripe]);
    });
  }
}

std::size_t Table::update(std::span<const std::uint64_t> keys, const float* grads,
                          std::span<const PushId> ids, const RuleValues& values, Pool& pool) {
  values.check();
  const Advance advance(ids, marks_);
  std::atomic<std::size_t> applied{0};
  for_stripes(keys, pool, [&](std::uint32_t stripe, const Group& group) {
    applied += update_stripe(stripe, group, grads, advance, values);
  });
  return applied;
}

std::size_t Table::update_stripe(std::uint32_t stripe, const Group& group, const float* grads,
                                 const Advance& advance, const RuleValues& values) {
  const std::uint32_t first_bucket = stripe * kBucketsPerStripe;
  std::unique_lock lock(stripes_[stripe]);
  const std::uint64_t applied = advance.applied(first_bucket);
  if (applied == ~std::uint64_t{0}) return 0;
  std::size_t num_keys = group.keys.size();
  if (applied == 0) {
    apply_group(group, grads, values);
  } else {
    Selection remaining(group);
    for (std::size_t i = 0; i < num_keys; ++i) {
      const std::uint32_t bucket = bucket_of(group.keys[i]) % kBucketsPerStripe;
      if ((applied >> bucket & 1) == 0) remaining.add(i);
    }
    num_keys = remaining.group().keys.size();
    apply_group(remaining.group(), grads, values);
  }
  advance.raise(first_bucket);
  return num_keys;
}

// All or nothing: whatever could fail comes before the first row changes. Requires: the lock of the
// group's stripe.
void Table::apply_group(const Group& group, const float* grads, const RuleValues& values) {
  const std::size_t n = group.keys.size();
  if (n == 0) return;
  Arena::Reservation reservation(arena_, n);
  std::vector<Arena::Ref> scratch;
  index_.prepare(bucket_of(group.keys[0]) / kBucketsPerStripe, n, scratch);
  Selection fresh(group);
  Array<std::uint32_t> absent(n);
  Updates updates{.arena = arena_, .index = index_, .group = group, .grads = grads, .dim = dim_};
  const std::size_t num_absent = rule_.update(updates, values, isa_, absent.data());
  if (num_absent == 0) return;
  for (std::size_t i = 0; i < num_absent; ++i) fresh.add(absent[i]);
  const std::span<Arena::Ref> rows = absent.span().first(num_absent);
  reservation.take(rows);
  updates.group = fresh.group();
  insert_rows(updates.group.keys, rows, scratch);
  TRIREME_CHECK(rule_.update(updates, values, isa_, absent.data()) == 0);
}

void Table::advance(std::span<const PushId> ids) {
  const Advance advance(ids, marks_);
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += kBucketsPerStripe) {
    std::unique_lock lock(mutex_of(bucket));
    advance.raise(bucket);
  }
}

void Table::initialize(std::byte* row, std::uint64_t key) const noexcept {
  std::memcpy(row, &key, sizeof key);
  float* weights = weights_of_row(row);
  initializer_.fill(key, weights, dim_);
  for (int j = 0; j < state_floats(); ++j) weights[dim_ + j] = rule_.initial_state;
}

// Gives rows to keys of one stripe that have none. A key may occur twice; the rows left over go
// back.
void Table::insert_rows(std::span<const std::uint64_t> keys, std::span<const Arena::Ref> rows,
                        std::vector<Arena::Ref>& scratch) noexcept {
  const std::uint32_t first_bucket = bucket_of(keys[0]) / kBucketsPerStripe * kBucketsPerStripe;
  std::array<std::size_t, kBucketsPerStripe> num_new{};
  for (const std::uint64_t key : keys) ++num_new[bucket_of(key) - first_bucket];
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if (num_new[i] == 0) continue;
    index_.reserve(first_bucket + i, index_.num_rows(first_bucket + i) + num_new[i], scratch);
  }
  std::size_t used = 0;
  for (const std::uint64_t key : keys) {
    if (index_.find(key) != nullptr) continue;
    initialize(arena_.row(rows[used]), key);
    index_.insert(mix64(key), rows[used++]);
  }
  arena_.free(rows.subspan(used));
}

std::size_t Table::erase(std::span<const std::uint64_t> keys, Pool& pool) {
  std::atomic<std::size_t> erased{0};
  for_stripes(keys, pool, [&](std::uint32_t stripe, const Group& group) {
    if (group.keys.empty()) return;
    std::vector<Arena::Ref> refs;
    refs.reserve(group.keys.size());
    std::unique_lock lock(stripes_[stripe]);
    for (const std::uint64_t key : group.keys) {
      Arena::Ref ref;
      if (index_.erase(key, ref)) refs.push_back(ref);
    }
    arena_.free(refs);
    erased += refs.size();
  });
  return erased;
}

}  // namespace trireme
