// Tier: what a change needs is there before it is made, and stays until then.
//
// A server records a push before it applies it; in sync it applies it much later. So what the push
// needs of a tier, rows in memory and room for new ones, is taken before the record, and nothing
// that other callers do takes it away.
#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/hash.h"
#include "store/find.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

namespace {

constexpr std::size_t kClaimedShare = 2;  // claims take at most such a part of the memory of rows

}  // namespace

Tier::Claim::Claim(Tier& tier, std::span<const std::uint64_t> keys)
    : tier_(tier), keys_(keys.begin(), keys.end()), num_(keys.size()) {
  std::ranges::sort(keys_, {}, mix64);
  tier_.num_claimed_ += num_;
}

Tier::Claim::Claim(Tier& tier, std::size_t num_rows) : tier_(tier), num_(num_rows) {
  tier_.num_claimed_ += num_;
}

// What is in memory, or comes there, does not leave it from here on.
void Tier::Claim::begin() {
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    if (keys_of_stripe(stripe).empty()) continue;
    const std::unique_lock lock(tier_.mutex_of_stripe(stripe));
    tier_.claims_[stripe].push_back(this);
  }
}

Tier::Claim::~Claim() {
  tier_.num_claimed_ -= num_;
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    if (keys_of_stripe(stripe).empty()) continue;
    const std::unique_lock lock(tier_.mutex_of_stripe(stripe));
    std::erase(tier_.claims_[stripe], this);
  }
}

Tier::Claim::Keys Tier::Claim::keys_of(std::uint32_t first_bucket,
                                       std::uint32_t num_buckets) const noexcept {
  const auto begin = std::ranges::lower_bound(keys_, first_bucket, {}, bucket_of);
  const auto end =
      std::ranges::lower_bound(begin, keys_.end(), first_bucket + num_buckets, {}, bucket_of);
  return {begin, end};
}

std::unique_ptr<Tier::Claim> Tier::claim(std::span<const std::uint64_t> keys, Pool& pool) {
  auto claim = std::make_unique<Claim>(*this, keys);
  if (are_claims_few()) {
    try {
      hold(*claim, pool);
      return claim;
    } catch (const ssd::FullDevice&) {
      throw;  // a change that makes room as it goes would stop halfway
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted) throw;
    }
  }
  const Need need = largest_need(*claim);
  claim.reset();
  fetch(keys, pool, For::kUpdate);
  make_room(need);
  log_.extend(num_pages_max(keys.size()));
  return nullptr;
}

// The pages that leave memory while so many rows come there, as full as memory has rows for, and as
// many again that are cleaned meanwhile.
std::size_t Tier::num_pages_max(std::size_t num_rows) const {
  std::size_t num_buckets = 1;
  for (const auto& bits : in_memory_) {
    num_buckets += static_cast<std::size_t>(std::popcount(bits.load()));
  }
  std::size_t per_page = num_rows_in_memory() / num_buckets;
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    per_page = std::min(per_page, cold_.rows_per_page(i));
  }
  return 2 * num_rows / std::max<std::size_t>(per_page, 1);
}

std::unique_ptr<Tier::Claim> Tier::claim_buckets(
    std::span<const std::uint32_t, kNumBuckets> num_rows) {
  auto claim = std::make_unique<Claim>(
      *this, std::accumulate(num_rows.begin(), num_rows.end(), std::size_t{0}));
  if (!are_claims_few()) return nullptr;
  std::vector<Need> needs(kNumStripes);
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    Need& need = needs[bucket / kBucketsPerStripe];
    need.stripe = bucket / kBucketsPerStripe;
    need.rows += num_rows[bucket];
  }
  try {
    std::ranges::move(make_room(needs, Wait::kNo), claim->rooms_.begin());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    return nullptr;
  }
  return claim;
}

bool Tier::are_claims_few() const noexcept {
  const std::size_t own = bytes_beside_rows(), memory = memory_bytes_;
  return num_claimed_ * claimed_bytes() <= (memory - std::min(own, memory)) / kClaimedShare;
}

// What a key of a claim holds at most: its row, or room for one; both, if there are several
// classes, for one of another class may replace it.
std::size_t Tier::claimed_bytes() const noexcept {
  const std::size_t row_bytes = table_.arenas_.row_bytes();
  return table_.arenas_.num_classes() == 1 ? row_bytes : row_bytes + new_row_bytes();
}

// What the stripe with most keys needs if all their rows have left memory again, and are replaced;
// and of the other stripes what finds their rows on SSD then, and by how much the index in memory
// may stay larger. Of its pages no more than is kept for reads at any time: there is room for the
// others if few rows leave at the same time.
Tier::Need Tier::largest_need(const Claim& claim) const {
  Need need{.bytes = claim.keys_.size() * kColdBytes};
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    const std::size_t n = claim.keys_of_stripe(stripe).size();
    if (2 * n > need.rows) {
      need.stripe = stripe;
      need.rows = 2 * n;
      need.read_bytes = std::min(log_.read_bytes(n), spare_bytes());
    }
  }
  return need;
}

void Tier::hold(Claim& claim, Pool& pool) {
  claim.begin();
  fetch(claim.keys_, pool, For::kUpdate, Wait::kNo);
  std::vector<Need> needs(kNumStripes + 1);
  needs[kNumStripes].bytes = claim.keys_.size() * sizeof(std::uint64_t);
  pool.run(kNumStripes, [&](std::size_t i) {
    const auto stripe = static_cast<std::uint32_t>(i);
    needs[i] = {.stripe = stripe, .rows = fetch_rest(stripe, claim.keys_of_stripe(stripe))};
  });
  std::vector<Room> rooms = make_room(needs, Wait::kNo);
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    claim.rooms_[stripe] = std::move(rooms[stripe]);
  }
  claim.own_ = std::move(rooms[kNumStripes]);
}

// Brings to memory what a fetch has left on SSD: rows whose pages moved meanwhile. Of other keys
// the index there does not tell whether they have rows, so their pages are read too. Returns how
// many rows an update of the keys may make. Requires: they are claimed.
std::size_t Tier::fetch_rest(std::uint32_t stripe, std::span<const std::uint64_t> keys) {
  std::vector<std::uint64_t> left;
  {
    const std::shared_lock lock(mutex_of_stripe(stripe));
    left = absent_of(keys);
    const std::size_t num_absent = left.size();
    std::erase_if(left, [&](std::uint64_t key) { return !cold_.may_have(key); });
    if (left.empty() && table_.arenas_.num_classes() == 1) return num_absent;
  }
  const std::size_t num_max = std::max<std::size_t>(log_.read_pages() / 2, 1);
  for (std::size_t i = 0; i < left.size(); i += num_max) {
    lock_unclaimed(stripe, std::span(left).subspan(i, std::min(num_max, left.size() - i)), 0,
                   Wait::kNo);
  }
  const std::shared_lock lock(mutex_of_stripe(stripe));
  return num_new_max(keys);
}

// The keys of a stripe that have no row in memory. Requires: its lock.
std::vector<std::uint64_t> Tier::absent_of(std::span<const std::uint64_t> keys) const {
  std::vector<std::uint64_t> absent;
  for (std::size_t begin = 0; begin < keys.size(); begin += kFindBlock) {
    const auto block = keys.subspan(begin, std::min(kFindBlock, keys.size() - begin));
    Finder finder(table_.arenas_, table_.index_, sizeof(std::uint64_t));
    finder.begin(block);
    finder.find([](std::size_t, const IndexLine*, const std::byte*, bool) {},
                [&](std::size_t i, const IndexLine*, const std::byte* row) {
                  if (row == nullptr) absent.push_back(block[i]);
                });
  }
  return absent;
}

// How many rows an update of these keys may make. Requires: their stripe's lock; all their rows are
// in memory.
std::size_t Tier::num_new_max(std::span<const std::uint64_t> keys) const {
  // One of another class may replace a row.
  return table_.arenas_.num_classes() > 1 ? keys.size() : absent_of(keys).size();
}

// Whether all keys are among those of the claims.
bool Tier::are_claimed(std::span<const std::uint64_t> keys, std::uint32_t stripe,
                       Claims claims) const {
  if (claims.size() == 1 && &claims.front()->tier_ == this) {
    // Where they lie: a settlement or import asks for few keys of a stripe after the other.
    const Claim::Keys own = claims.front()->keys_of_stripe(stripe);
    return std::ranges::all_of(keys, [&](std::uint64_t key) {
      return std::ranges::binary_search(own, mix64(key), {}, mix64);
    });
  }
  std::vector<std::uint64_t> claimed;  // their hashes
  for (const Claim* claim : claims) {
    if (&claim->tier_ != this) continue;
    std::ranges::transform(claim->keys_of_stripe(stripe), std::back_inserter(claimed), mix64);
  }
  std::ranges::sort(claimed);
  return std::ranges::all_of(
      keys, [&](std::uint64_t key) { return std::ranges::binary_search(claimed, mix64(key)); });
}

// Gives the lock what it needs of what the claims have for its stripe. Returns false, and takes
// nothing, if that is not enough.
bool Tier::use_claims(Lock& lock, std::span<const std::uint64_t> keys, std::size_t num_new,
                      Claims claims) {
  if (!are_claimed(keys, lock.stripe_, claims)) return false;
  lock.num_new_ = std::min(num_new, num_new_max(keys));
  return use_rooms(lock, claims);
}

// The same, for its new rows.
bool Tier::use_rooms(Lock& lock, Claims claims) {
  std::size_t num_promised = 0;
  for (const Claim* claim : claims) {
    if (&claim->tier_ == this) num_promised += claim->rooms_[lock.stripe_].num_rows();
  }
  if (num_promised < lock.num_new_) return false;
  std::size_t num_left = lock.num_new_;
  for (Claim* claim : claims) {
    if (num_left == 0 || &claim->tier_ != this) continue;
    Room& room = claim->rooms_[lock.stripe_];
    const std::size_t num_taken = std::min(num_left, room.num_rows());
    lock.rooms_.push_back(room.split(num_taken));
    num_left -= num_taken;
  }
  return true;
}

Tier::Lock Tier::lock_rows(std::uint32_t stripe, std::span<const std::uint64_t> keys,
                           std::size_t num_new, Claims claims) {
  if (!claims.empty()) {
    Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    if (use_claims(result, keys, num_new, claims)) return result;
  }
  return lock_unclaimed(stripe, keys, num_new);
}

// Takes the rows that are claimed out of those of a bucket. Requires: the stripe's lock.
void Tier::leave_out_claimed(std::uint32_t bucket, std::vector<Arena::Ref>& refs) const {
  std::vector<Arena::Ref> claimed;
  for (const Claim* claim : claims_[bucket / kBucketsPerStripe]) {
    for (const std::uint64_t key : claim->keys_of(bucket, 1)) {
      const std::byte* row = row_in_memory(key);
      if (row != nullptr) claimed.push_back(table_.arenas_.ref_of(row));
    }
  }
  if (claimed.empty()) return;
  std::ranges::sort(claimed);
  std::erase_if(refs, [&](Arena::Ref ref) { return std::ranges::binary_search(claimed, ref); });
}

}  // namespace trireme
