#include "table/policy.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/hash.h"

namespace trireme {
namespace {

constexpr std::uint64_t kIndexBytesPerRow = 8;  // a line of 64 bytes per about eight rows

std::uint64_t checked_share(const char* what, std::uint64_t limit, std::uint64_t bytes_per_row) {
  const std::uint64_t share = limit / bytes_per_row / kNumBuckets;
  if (share == 0) {
    throw Error(ErrorCode::kBadRequest, std::string("Table: expected ") + what +
                                            " >= " + std::to_string(kNumBuckets * bytes_per_row) +
                                            ", one row in every bucket, found " +
                                            std::to_string(limit));
  }
  return share;
}

}  // namespace

std::optional<std::uint32_t> PolicyConfig::max_rows_of_bucket(std::size_t row_bytes) const {
  if (!max_rows && !max_bytes) return std::nullopt;
  std::uint64_t share = std::numeric_limits<std::uint32_t>::max();
  if (max_rows) share = std::min(share, checked_share("max_rows", *max_rows, 1));
  if (max_bytes) {
    share = std::min(share, checked_share("max_bytes", *max_bytes, row_bytes + kIndexBytesPerRow));
  }
  return static_cast<std::uint32_t>(share);
}

std::uint32_t PolicyConfig::oldest_kept(std::uint32_t now) const noexcept {
  std::uint32_t oldest = 0;
  if (ttl_s && now > *ttl_s) oldest = static_cast<std::uint32_t>(now - *ttl_s);
  const std::uint32_t day = now / kSecondsPerDay;
  if (delete_after_unseen_days && day > *delete_after_unseen_days) {
    oldest = std::max(oldest, (day - *delete_after_unseen_days) * kSecondsPerDay);
  }
  return oldest;
}

bool PolicyConfig::is_expired(const Stamp& stamp, const Score* score,
                              const DataTime& now) const noexcept {
  if (ttl_s && stamp.time != 0 && now.time > stamp.time && now.time - stamp.time > *ttl_s) {
    return true;
  }
  if (score == nullptr) return false;
  if (delete_after_unseen_days && days_between(stamp.time, now.time) > *delete_after_unseen_days) {
    return true;
  }
  const ShowClick effective = now.effective(stamp, *score, rates);
  return rates.score(effective.show, effective.click) < delete_threshold;
}

}  // namespace trireme
