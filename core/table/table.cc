#include "table/table.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "base/error.h"

namespace trireme {
namespace {

bool checked_absent_is_zero(const std::string& absent) {
  if (absent == "zeros") return true;
  if (absent == "initial") return false;
  throw Error(ErrorCode::kBadRequest, "Table: expected absent initial or zeros, found " + absent);
}

}  // namespace

Table::Table(const TableConfig& config)
    : isa_(choose_isa(config.simd)),
      rule_(make_rule(config.rule)),
      classes_(config.dims, config.dtype, rule_.state, config.policy.is_scored,
               config.policy.embedx_threshold.has_value()),
      policy_(config.policy),
      max_rows_of_bucket_(policy_.max_rows_of_bucket(std::ranges::max(classes_.row_bytes()))),
      initializer_(config.initializer, config.init_a, config.init_b, config.seed),
      absent_is_zero_(checked_absent_is_zero(config.absent)),
      seed_(config.seed),
      arenas_(classes_.row_bytes()),
      index_(arenas_, config.tier.devices.empty() ? Index::SmallBuckets::kDouble
                                                  : Index::SmallBuckets::kGrowByFew),
      marks_(config.num_streams_max),
      admission_(config.admission, config.seed),
      tier_(config.tier.devices.empty() ? nullptr : std::make_unique<Tier>(*this, config.tier)) {
  if (admission_.reads_score() && !is_scored()) {
    throw Error(
        ErrorCode::kBadRequest,
        "Table: expected a scored table for admission score_filter, found one without scores");
  }
}

std::size_t Table::num_rows() const {
  std::size_t n = 0;
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::shared_lock lock(stripes_[stripe]);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      n += num_rows_of(stripe * kBucketsPerStripe + i);
    }
  }
  return n;
}

std::size_t Table::bytes() const {
  if (tier_ != nullptr) return tier_->bytes();
  std::size_t n = sizeof *this + arenas_.bytes() + marks_.bytes();
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::shared_lock lock(stripes_[stripe]);
    n += index_.bytes(stripe);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      const std::uint32_t bucket = stripe * kBucketsPerStripe + i;
      n += removed_.bytes(bucket) + admission_.bytes(bucket);
    }
  }
  return n;
}

void Table::raise_version(std::uint32_t version) noexcept {
  std::uint32_t found = version_.load(std::memory_order_relaxed);
  while (found < version &&
         !version_.compare_exchange_weak(found, version, std::memory_order_relaxed)) {
  }
}

Tier& Table::need_tier(const char* who) const {
  if (tier_ == nullptr) {
    throw Error(
        ErrorCode::kBadRequest,
        "Table." + std::string(who) + ": expected a table with an SSD tier, found one in memory");
  }
  return *tier_;
}

void Table::set_memory(std::size_t num_bytes) { need_tier("set_memory").set_memory(num_bytes); }

Tier::Lock Table::lock_rows(std::uint32_t stripe, std::span<const std::uint64_t> keys,
                            std::size_t num_new, Tier::Claims claims) {
  Tier::Lock lock = tier_ != nullptr
                        ? tier_->lock_rows(stripe, keys, num_new, claims)
                        : Tier::Lock(nullptr, stripe, std::unique_lock(stripes_[stripe]));
  if (!keys.empty()) ++num_changes_;  // under the lock: rows read after this count have the change
  return lock;
}

Table::LockedBucket Table::lock_bucket(std::uint32_t bucket) {
  LockedBucket locked;
  if (tier_ != nullptr) {
    locked.tiered.emplace(tier_->lock_bucket(bucket));
  } else {
    locked.lock.emplace(nullptr, bucket / kBucketsPerStripe, std::unique_lock(mutex_of(bucket)));
  }
  ++num_changes_;
  return locked;
}

void Table::check_bucket(std::uint32_t bucket) {
  if (bucket < kNumBuckets) return;
  throw Error(ErrorCode::kBadRequest, "Table: expected a bucket in [0, " +
                                          std::to_string(kNumBuckets) + "), found " +
                                          std::to_string(bucket));
}

void Table::check_class(const char* who, int row_class) const {
  if (row_class >= 0 && row_class < classes_.num_dims()) return;
  throw Error(ErrorCode::kBadRequest,
              std::string("Table.") + who + ": expected a row class in [0, " +
                  std::to_string(classes_.num_dims()) + "), found " + std::to_string(row_class));
}

void Table::check_scored(const char* who) const {
  if (is_scored()) return;
  throw Error(ErrorCode::kBadRequest,
              std::string("Table.") + who + ": expected a scored table, found one without scores");
}

}  // namespace trireme
