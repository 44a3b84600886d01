#include "table/table.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace trireme {
namespace {

// Fewer keys than this are not worth waking threads for.
constexpr std::size_t kParallelKeysMin = 4096;
// The rows of so many keys stay in the second-level cache between finding and applying.
constexpr std::size_t kCachedRowBytes = 512 * 1024;

int checked_dim(const TableConfig& config) {
  if (config.dims.size() != 1) {
    throw Error(ErrorCode::kBadRequest, "Table: expected one row class in dims, found " +
                                            std::to_string(config.dims.size()));
  }
  const int dim = config.dims[0];
  constexpr int kDimMax = static_cast<int>(Arena::kRowBytesMax / sizeof(float));
  if (dim < 1 || dim > kDimMax) {
    throw Error(ErrorCode::kBadRequest, "Table: expected a dim in [1, " + std::to_string(kDimMax) +
                                            "], found " + std::to_string(dim));
  }
  return dim;
}

bool checked_absent_is_zero(const std::string& absent) {
  if (absent == "zeros") return true;
  if (absent == "initial") return false;
  throw Error(ErrorCode::kBadRequest, "Table: expected absent initial or zeros, found " + absent);
}

std::size_t checked_row_bytes(int dim, const Rule& rule) {
  const std::size_t floats =
      static_cast<std::size_t>(dim) + static_cast<std::size_t>(rule.state_floats(dim));
  const std::size_t bytes = round_up(kWeightsOffset + floats * sizeof(float), 8);
  if (bytes > Arena::kRowBytesMax) {
    throw Error(ErrorCode::kBadRequest,
                "Table: expected rows of at most " + std::to_string(Arena::kRowBytesMax) +
                    " bytes, found " + std::to_string(bytes) + " for dim " + std::to_string(dim));
  }
  return bytes;
}

// The keys of a group whose buckets are not in `applied`, copied.
struct Remaining {
  Remaining(const Group& all, std::uint64_t applied) {
    for (std::size_t i = 0; i < all.keys.size(); ++i) {
      if (applied >> bucket_in_stripe(mix64(all.keys[i])) & 1) continue;
      keys.push_back(all.keys[i]);
      positions.push_back(static_cast<std::uint32_t>(all.position(i)));
    }
  }
  Group group() const noexcept { return {.keys = keys, .positions = positions.data(), .first = 0}; }

  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> positions;
};

}  // namespace

Table::Table(const TableConfig& config)
    : dim_(checked_dim(config)),
      isa_(choose_isa(config.simd)),
      rule_(make_rule(config.rule, isa_)),
      initializer_(config.initializer, config.init_a, config.init_b, config.seed),
      absent_is_zero_(checked_absent_is_zero(config.absent)),
      arena_(checked_row_bytes(dim_, rule_)),
      marks_(config.num_streams_max) {}

std::size_t Table::num_rows() const {
  std::size_t n = 0;
  for (const Stripe& stripe : stripes_) {
    std::shared_lock lock(stripe.mutex);
    n += stripe.index.num_rows();
  }
  return n;
}

std::size_t Table::bytes() const {
  std::size_t n = sizeof *this + arena_.bytes() + marks_.bytes();
  for (const Stripe& stripe : stripes_) {
    std::shared_lock lock(stripe.mutex);
    n += stripe.index.bytes();
  }
  return n;
}

// Calls function(stripe, group) for every stripe, also for those without keys.
template <class Function>
void Table::for_stripes(std::span<const std::uint64_t> keys, Pool& pool,
                        const Function& function) const {
  const Groups groups(keys, pool);
  if (keys.size() < kParallelKeysMin) {
    for (std::size_t stripe = 0; stripe < kNumStripes; ++stripe) function(stripe, groups[stripe]);
  } else {
    pool.run(kNumStripes, [&](std::size_t stripe) { function(stripe, groups[stripe]); });
  }
}

// Calls visit(position, row or null) for every key, under its stripe's lock.
template <class Visit>
void Table::find_all(std::span<const std::uint64_t> keys, std::size_t row_bytes, Pool& pool,
                     const Visit& visit) const {
  for_stripes(keys, pool, [&](std::size_t stripe, const Group& group) {
    if (group.keys.empty()) return;
    std::shared_lock lock(stripes_[stripe].mutex);
    stripes_[stripe].index.find(
        group.keys, arena_, row_bytes,
        [&](std::size_t i, const std::byte* row) { visit(group.position(i), row); });
  });
}

std::size_t Table::lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool) const {
  std::atomic<std::size_t> missing{0};
  for_stripes(keys, pool, [&](std::size_t stripe, const Group& group) {
    if (!group.keys.empty()) missing += lookup_stripe(stripe, group, out);
  });
  return missing;
}

std::size_t Table::lookup_stripe(std::size_t stripe, const Group& group, float* out) const {
  const auto dim = static_cast<std::size_t>(dim_);
  std::size_t missing = 0;
  const Stripe& s = stripes_[stripe];
  std::shared_lock lock(s.mutex);
  s.index.find(group.keys, arena_, kWeightsOffset + dim * sizeof(float),
               [&](std::size_t i, const std::byte* row) {
                 float* weights = out + group.position(i) * dim;
                 if (row != nullptr) {
                   copy_floats(weights, weights_of_row(row), dim_);
                   return;
                 }
                 ++missing;
                 if (absent_is_zero_) {
                   std::memset(weights, 0, dim * sizeof(float));
                 } else {
                   initializer_.fill(group.keys[i], weights, dim_);
                 }
               });
  return missing;
}

std::size_t Table::update(std::span<const std::uint64_t> keys, const float* grads,
                          std::span<const PushId> ids, const RuleValues& values, Pool& pool) {
  values.check();
  const Advance advance(ids, marks_);
  std::atomic<std::size_t> applied{0};
  for_stripes(keys, pool, [&](std::size_t stripe, const Group& group) {
    applied += update_stripe(stripe, group, grads, advance, values);
  });
  return applied;
}

std::size_t Table::update_stripe(std::size_t stripe, const Group& group, const float* grads,
                                 const Advance& advance, const RuleValues& values) {
  const auto first_bucket = static_cast<std::uint32_t>(stripe * kBucketsPerStripe);
  Stripe& s = stripes_[stripe];
  std::unique_lock lock(s.mutex);
  const std::uint64_t applied = advance.applied(first_bucket);
  if (applied == ~std::uint64_t{0}) return 0;
  std::size_t num_keys = group.keys.size();
  if (applied == 0) {
    apply_stripe(s, group, grads, values);
  } else {
    const Remaining remaining(group, applied);
    num_keys = remaining.keys.size();
    apply_stripe(s, remaining.group(), grads, values);
  }
  advance.raise(first_bucket);
  return num_keys;
}

// All or nothing: finds every row, then makes the missing ones, and only then applies, which cannot
// fail.
void Table::apply_stripe(Stripe& stripe, const Group& group, const float* grads,
                         const RuleValues& values) {
  const std::size_t n = group.keys.size();
  if (n == 0) return;
  const auto rows = std::make_unique_for_overwrite<std::byte*[]>(n);
  const bool stays_cached = n * arena_.row_bytes() <= kCachedRowBytes;
  bool is_missing = false;
  stripe.index.find(group.keys, arena_, stays_cached ? arena_.row_bytes() : sizeof(std::uint64_t),
                    [&](std::size_t i, std::byte* row) {
                      rows[i] = row;
                      is_missing |= row == nullptr;
                    });
  if (is_missing) insert_missing(stripe, group, {rows.get(), n});
  rule_.apply({.rows = rows.get(),
               .grads = grads,
               .positions = group.positions,
               .first = group.first,
               .size = n,
               .dim = dim_,
               .row_bytes = arena_.row_bytes()},
              values);
}

void Table::advance(std::span<const PushId> ids) {
  const Advance advance(ids, marks_);
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += kBucketsPerStripe) {
    std::unique_lock lock(stripe_of(bucket).mutex);
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
void Table::insert_missing(Stripe& stripe, const Group& group, std::span<std::byte*> rows) {
  std::array<std::uint32_t, kBucketsPerStripe> missing{};
  std::size_t num_missing = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != nullptr) continue;
    ++missing[bucket_in_stripe(mix64(group.keys[i]))];
    ++num_missing;
  }
  NewRows fresh(arena_, num_missing);
  for (std::uint32_t bucket = 0; bucket < kBucketsPerStripe; ++bucket) {
    if (missing[bucket] == 0) continue;
    stripe.index.reserve(bucket, stripe.index.num_rows(bucket) + missing[bucket], arena_);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != nullptr) continue;
    const std::uint64_t key = group.keys[i];
    rows[i] = stripe.index.find(key, arena_);  // there if the call has the key twice
    if (rows[i] != nullptr) continue;
    const Arena::Ref ref = fresh.take();
    rows[i] = arena_.row(ref);
    initialize(rows[i], key);
    stripe.index.insert(mix64(key), ref);
  }
}

std::size_t Table::erase(std::span<const std::uint64_t> keys, Pool& pool) {
  std::atomic<std::size_t> erased{0};
  for_stripes(keys, pool, [&](std::size_t stripe, const Group& group) {
    if (group.keys.empty()) return;
    std::vector<Arena::Ref> refs;
    refs.reserve(group.keys.size());
    Stripe& s = stripes_[stripe];
    std::unique_lock lock(s.mutex);
    for (const std::uint64_t key : group.keys) {
      Arena::Ref ref;
      if (s.index.erase(key, arena_, ref)) refs.push_back(ref);
    }
    arena_.free(refs);
    erased += refs.size();
  });
  return erased;
}

void Table::contains(std::span<const std::uint64_t> keys, bool* out, Pool& pool) const {
  find_all(keys, sizeof(std::uint64_t), pool,
           [&](std::size_t position, const std::byte* row) { out[position] = row != nullptr; });
}

void Table::addresses(std::span<const std::uint64_t> keys, const float** out, Pool& pool) const {
  find_all(keys, sizeof(std::uint64_t), pool, [&](std::size_t position, const std::byte* row) {
    out[position] = row != nullptr ? weights_of_row(row) : nullptr;
  });
}

}  // namespace trireme
