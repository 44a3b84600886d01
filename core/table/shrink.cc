// Table: removal of rows by policy, and the record of removed keys.
#include <algorithm>
#include <compare>
#include <mutex>

#include "base/error.h"
#include "table/scan.h"
#include "table/table.h"

namespace trireme {
namespace {

// A bucket over its limit is shrunk to below it by this share, so that most pushes need not search
// for rows to remove.
constexpr std::uint32_t kSlack = 16;

// The order in which rows are removed, the least first.
struct Age {
  std::uint32_t time;
  std::uint32_t version;
  std::uint64_t draw;
  std::size_t row;  // its number in the list

  auto operator<=>(const Age&) const = default;
};

}  // namespace

void Table::check_shrink(std::span<const std::uint32_t> buckets) {
  for (const std::uint32_t bucket : buckets) check_bucket(bucket);
  if (tier_ != nullptr) tier_->check_buckets(buckets);
}

Table::Shrunk Table::shrink(std::uint32_t bucket, const DataTime& now, std::uint32_t version) {
  check_bucket(bucket);
  raise_version(version);
  const Shrunk shrunk = shrink_locked(bucket, now, lock_bucket(bucket));
  keep_removed_within_budget(bucket);
  return shrunk;
}

Table::Shrunk Table::shrink_locked(std::uint32_t bucket, const DataTime& now, LockedBucket locked) {
  std::vector<Arena::Ref> refs;
  index_.refs_of(bucket, refs);
  const auto is_expired = [&](const RowLayout& layout, const std::byte* row) {
    return policy_.is_expired(layout.stamp(row), is_scored() ? &layout.score(row) : nullptr, now);
  };
  std::size_t num_expired = 0;
  for_rows(arenas_, classes_.layouts(), refs, from_stamp, sizeof(Stamp) + sizeof(Score),
           [&](std::size_t i, const RowLayout& layout, const std::byte* row) {
             if (is_expired(layout, row)) refs[num_expired++] = refs[i];
           });
  refs.resize(num_expired);
  Tier::Places expired;
  std::erase_if(locked.on_ssd(), [&](const Tier::Place& place) {
    if (!is_expired(classes_[place.row_class], place.row)) return false;
    expired.push_back(place);
    return true;
  });
  remove(bucket, refs, expired);
  num_expired += expired.size();
  num_expired_ += num_expired;
  admission_.forget_before(bucket, policy_.oldest_kept(now.time), now.time);
  return {.num_expired = num_expired, .num_evicted = evict(bucket, locked.on_ssd())};
}

// Shrinks a bucket that is over its limit: removes the rows whose last push is longest ago. Ties
// are broken by a hash of key and marks: the same on every machine, but not always the same keys.
// Returns the number of rows removed.   on_ssd: the bucket's rows there, but for those of damaged
// pages, which do not count. Requires: the stripe's lock.
std::size_t Table::evict(std::uint32_t bucket, std::span<const Tier::Place> on_ssd) {
  if (!max_rows_of_bucket_ || num_rows_of(bucket) <= *max_rows_of_bucket_) return 0;
  std::uint64_t draw = 0;
  for (const auto& [stream, marks] : marks_.streams()) draw += (*marks)[bucket];
  std::vector<Arena::Ref> refs;
  index_.refs_of(bucket, refs);
  std::vector<Age> rows(refs.size() + on_ssd.size());
  const auto note = [&](std::size_t i, const RowLayout& layout, const std::byte* row) {
    const Stamp& stamp = layout.stamp(row);
    rows[i] = {.time = stamp.time,
               .version = stamp.version,
               .draw = mix64(key_of_row(row) ^ mix64(draw)),
               .row = i};
  };
  if (rows.size() <= *max_rows_of_bucket_) return 0;  // the others cannot be read
  for_rows(arenas_, classes_.layouts(), refs, from_start, arenas_.row_bytes(), note);
  for (std::size_t i = 0; i < on_ssd.size(); ++i) {
    note(refs.size() + i, classes_[on_ssd[i].row_class], on_ssd[i].row);
  }
  const std::uint32_t kept = *max_rows_of_bucket_ - *max_rows_of_bucket_ / kSlack;
  const std::size_t num_evicted = rows.size() - kept;
  const auto end = rows.begin() + static_cast<std::ptrdiff_t>(num_evicted);
  std::nth_element(rows.begin(), end, rows.end());
  std::vector<Arena::Ref> old;
  Tier::Places old_on_ssd;
  for (auto row = rows.begin(); row != end; ++row) {
    if (row->row < refs.size()) {
      old.push_back(refs[row->row]);
    } else {
      old_on_ssd.push_back(on_ssd[row->row - refs.size()]);
    }
  }
  remove(bucket, old, old_on_ssd);
  num_evicted_ += num_evicted;
  return num_evicted;
}

// Requires: the stripe's lock; the rows belong to the bucket.
void Table::remove(std::uint32_t bucket, std::span<const Arena::Ref> rows,
                   std::span<const Tier::Place> on_ssd) {
  removed_.prepare(bucket, rows.size() + on_ssd.size());
  for (const Arena::Ref row : rows) {
    const std::uint64_t key = key_of_row(arenas_.row(row));
    Arena::Ref erased;
    TRIREME_CHECK(index_.erase(key, erased) && erased == row);
    removed_.add(bucket, key, version(), num_rows_of(bucket));
  }
  arenas_.free(rows);
  for (const Tier::Place& place : on_ssd) {
    const std::uint64_t key = key_of_row(place.row);
    tier_->take(place);
    removed_.add(bucket, key, version(), num_rows_of(bucket));
  }
  removed_.trim(bucket);
}

// Rows leave memory for the keys that were removed of a bucket; if that is not enough, the bucket
// forgets them. Requires: no lock is held.
void Table::keep_removed_within_budget(std::uint32_t bucket) noexcept {
  if (tier_ == nullptr || tier_->has_room()) return;
  const Tier::Lock lock(tier_.get(), bucket / kBucketsPerStripe,
                        std::unique_lock(mutex_of(bucket)));
  removed_.forget(bucket, version());
}

// Returns whether there were any. Requires: no lock is held.
bool Table::forget_all_removed() {
  bool has_any = false;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets && !has_any; ++bucket) {
    std::shared_lock lock(mutex_of(bucket));
    has_any = removed_.bytes(bucket) > 0;
  }
  if (has_any) forget_removed(version());
  return has_any;
}

void Table::forget_removed(std::uint32_t version) {
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    const Tier::Lock lock(tier_.get(), stripe, std::unique_lock(stripes_[stripe]));
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      removed_.forget(stripe * kBucketsPerStripe + i, version);
    }
  }
}

Counters Table::counters() const noexcept {
  return {.admitted = num_admitted_,
          .rejected = num_rejected_,
          .expired = num_expired_,
          .evicted = num_evicted_};
}

}  // namespace trireme
