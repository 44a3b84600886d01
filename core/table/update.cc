// Table: update, advance and erase: what changes rows one by one.
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "store/find.h"
#include "table/table.h"

namespace trireme {
namespace {

// Fewer keys than this are not worth waking threads for.
constexpr std::size_t kParallelKeysMin = 4096;
// The rows of so many keys stay in the second-level cache between finding and applying.
constexpr std::size_t kCachedRowBytes = 512 * 1024;

// The keys of a group whose buckets are not in `applied`, copied.
struct Remaining {
  Remaining(const Group& all, std::uint64_t applied) {
    for (std::size_t i = 0; i < all.keys.size(); ++i) {
      if (applied >> (bucket_of(all.keys[i]) % kBucketsPerStripe) & 1) continue;
      keys.push_back(all.keys[i]);
      positions.push_back(static_cast<std::uint32_t>(all.position(i)));
    }
  }
  Group group() const noexcept { return {.keys = keys, .positions = positions.data(), .first = 0}; }

  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> positions;
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
  std::unique_lock lock(stripes_[stripe].mutex);
  const std::uint64_t applied = advance.applied(first_bucket);
  if (applied == ~std::uint64_t{0}) return 0;
  std::size_t num_keys = group.keys.size();
  if (applied == 0) {
    apply_group(group, grads, values);
  } else {
    const Remaining remaining(group, applied);
    num_keys = remaining.keys.size();
    apply_group(remaining.group(), grads, values);
  }
  advance.raise(first_bucket);
  return num_keys;
}

// All or nothing: finds every row, then makes the missing ones, and only then applies, which cannot
// fail. Requires: the lock of the group's stripe.
void Table::apply_group(const Group& group, const float* grads, const RuleValues& values) {
  const std::size_t n = group.keys.size();
  if (n == 0) return;
  const auto rows = std::make_unique_for_overwrite<std::byte*[]>(n);
  if (!find_rows(group.keys, rows.get())) insert_missing(group.keys, {rows.get(), n});
  rule_.apply({.rows = rows.get(),
               .grads = grads,
               .positions = group.positions,
               .first = group.first,
               .size = n,
               .dim = dim_,
               .row_bytes = arena_.row_bytes()},
              values, isa_);
}

// Finds the row of every key, null for an absent one; returns whether none was.
bool Table::find_rows(std::span<const std::uint64_t> keys, std::byte** rows) const noexcept {
  const bool stays_cached = keys.size() * arena_.row_bytes() <= kCachedRowBytes;
  Finder finder(arena_, index_, stays_cached ? arena_.row_bytes() : sizeof(std::uint64_t));
  bool is_complete = true;
  for (std::size_t begin = 0; begin < keys.size(); begin += Finder::kBlock) {
    with_isa(isa_, [&]() TRIREME_INLINE_LAMBDA {
      finder.begin(keys.subspan(begin, std::min(Finder::kBlock, keys.size() - begin)));
      finder.find([&](std::size_t i, std::byte* row)
                      TRIREME_INLINE_LAMBDA { rows[begin + i] = row; },
                  [&](std::size_t i, std::byte* row) TRIREME_INLINE_LAMBDA {
                    rows[begin + i] = row;
                    is_complete &= row != nullptr;
                  });
    });
  }
  return is_complete;
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

// Rows taken from the arena for keys to be inserted; those that are not used go back.
class Table::NewRows {
 public:
  NewRows(Arena& arena, std::size_t n) : arena_(arena), refs_(n) { arena_.allocate(refs_); }
  ~NewRows() { arena_.free(std::span(refs_).subspan(used_)); }
  NewRows(const NewRows&) = delete;
  NewRows& operator=(const NewRows&) = delete;
  Arena::Ref take() noexcept { return refs_[used_++]; }

 private:
  Arena& arena_;
  std::vector<Arena::Ref> refs_;
  std::size_t used_ = 0;
};

// Makes a row for every key whose entry in `rows` is null. Nothing changes on an error.
void Table::insert_missing(std::span<const std::uint64_t> keys, std::span<std::byte*> rows) {
  const std::uint32_t first_bucket = bucket_of(keys[0]) / kBucketsPerStripe * kBucketsPerStripe;
  std::array<std::uint32_t, kBucketsPerStripe> missing{};
  std::size_t num_missing = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != nullptr) continue;
    ++missing[bucket_of(keys[i]) - first_bucket];
    ++num_missing;
  }
  NewRows fresh(arena_, num_missing);
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if (missing[i] == 0) continue;
    index_.reserve(first_bucket + i, index_.num_rows(first_bucket + i) + missing[i]);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != nullptr) continue;
    const std::uint64_t key = keys[i];
    rows[i] = index_.find(key);  // there if the call has the key twice
    if (rows[i] != nullptr) continue;
    const Arena::Ref ref = fresh.take();
    rows[i] = arena_.row(ref);
    initialize(rows[i], key);
    index_.insert(mix64(key), ref);
  }
}

std::size_t Table::erase(std::span<const std::uint64_t> keys, Pool& pool) {
  std::atomic<std::size_t> erased{0};
  for_stripes(keys, pool, [&](std::uint32_t stripe, const Group& group) {
    if (group.keys.empty()) return;
    std::vector<Arena::Ref> refs;
    refs.reserve(group.keys.size());
    std::unique_lock lock(stripes_[stripe].mutex);
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
