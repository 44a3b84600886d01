// Tier: cleaning, by which segments with few rows become free.
//
// The rows that are left of some pages go to new ones, together with rows of the same bucket that
// have to leave memory, as many as those fit. So memory becomes free as if rows had been moved out,
// and files do not grow: that is what a step does instead, as long as the pages on SSD have much
// room. If they have even more, a second page of the bucket joins each, and files become smaller.
#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

namespace {

// Per cent of the rows that fit into the pages on SSD: with fewer left, a step cleans instead of
// moving rows out; with fewer than that, pages are joined. And the share of those of a segment above
// which it is not worth it.
constexpr std::size_t kLeftPercentMin = 62;
constexpr std::size_t kJoinPercentMax = 59;
constexpr std::size_t kWorthPercentMax = 95;

// Pages of a segment that are cleaned at a time. Fewer where memory has few rows: their rows in
// memory, if they all left, would be at most this share of it.
constexpr std::size_t kPagesCleaned = 32;
constexpr std::size_t kShareCleaned = 32;

// How long others wait for the thread that cleans, before they move rows out.
constexpr std::chrono::milliseconds kCleanerPatience{100};

}  // namespace

// Pages of a bucket that are cleaned together.
struct Tier::Group {
  std::uint32_t bucket;
  std::vector<ssd::Position> pages;
};

// Cleans some pages, if that is due. Returns whether rows have left memory, or may have, by another
// thread's cleaning.
bool Tier::clean() {
  if (cleans_in_vain_ || !may_leave()) return false;
  const ssd::PageLog::Use use = log_.use();
  const auto is_below = [&](std::size_t percent) {
    return use.num_rows * 100 < use.num_rows_max * percent;
  };
  if (!is_below(kLeftPercentMin) && !log_.failed()) return false;
  std::unique_lock lock(clean_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    if (is_cleaner_late_) return false;
    lock = std::unique_lock(clean_mutex_, kCleanerPatience);
    is_cleaner_late_ = !lock.owns_lock();
    return lock.owns_lock();
  }
  if (!find_victim()) return false;
  const std::size_t num_share = num_rows_in_memory() / kShareCleaned / cold_.rows_per_page(0);
  std::vector<ssd::Position> positions(
      std::min({clean_left_, std::clamp<std::size_t>(num_share, 1, kPagesCleaned),
                std::max<std::size_t>(log_.read_pages() / 2, 1)}));
  std::iota(positions.begin(), positions.end(), clean_next_);
  std::array<ssd::PagesRead, 2> reads;
  std::vector<Group> groups;
  try {
    reads[0] = log_.read(positions);
    groups = groups_of(reads[0], positions);
    if (is_below(kJoinPercentMax)) reads[1] = read_mates(groups);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadlineExceeded) throw;
    clean_left_ = 0;  // not now: who needs room has no need of that device
    return false;
  }
  clean_next_ += static_cast<ssd::Position>(positions.size());
  clean_left_ -= positions.size();
  std::size_t num_moved = 0;
  for (const Group& group : groups) num_moved += clean_group(group, reads);
  is_cleaner_late_ = false;
  cleans_in_vain_ = num_moved == 0;
  return num_moved > 0;
}

// The segment that is being cleaned, or the next one. Returns false if there is none.
// Requires: clean_mutex_.
bool Tier::find_victim() {
  if (clean_left_ > 0 && log_.generation(clean_next_) == clean_generation_) return true;
  clean_left_ = 0;
  std::optional<ssd::PageLog::Segment> victim = log_.failed();
  if (!victim) {
    victim = log_.emptiest();
    if (!victim || victim->num_rows * 100 > victim->num_rows_max * kWorthPercentMax) return false;
  }
  clean_next_ = victim->first;
  clean_left_ = victim->num_pages;
  clean_generation_ = log_.generation(clean_next_);
  return true;
}

// The pages that could be read, by bucket. Sets others aside.
std::vector<Tier::Group> Tier::groups_of(const ssd::PagesRead& victims,
                                         std::span<const ssd::Position> positions) {
  std::vector<Group> groups;
  for (const ssd::Position position : positions) {
    const ssd::PagesRead::Page* page = victims.find(position);
    if (page->generation != clean_generation_) continue;
    if (page->error != 0) log_.set_aside(position);
    if (page->bytes == nullptr) continue;
    const std::uint32_t bucket = ssd::header_of(page->bytes).bucket;
    if (bucket >= kNumBuckets) continue;
    if (groups.empty() || groups.back().bucket != bucket ||
        groups.back().pages.size() == kPagesOut) {
      groups.push_back({.bucket = bucket, .pages = {}});
    }
    groups.back().pages.push_back(position);
  }
  return groups;
}

// Adds to each group the emptiest other page of its bucket, and reads it.
ssd::PagesRead Tier::read_mates(std::vector<Group>& groups) const {
  std::vector<ssd::Position> mates;
  if (groups.empty()) return {};
  const ssd::Position first = groups.front().pages.front(), last = groups.back().pages.back();
  for (Group& group : groups) {
    std::shared_lock lock(mutex_of_stripe(group.bucket / kBucketsPerStripe));
    const std::optional<ssd::Position> mate = cold_.emptiest(group.bucket, first, last + 1);
    if (!mate) continue;
    group.pages.push_back(*mate);
    mates.push_back(*mate);
  }
  ssd::sort_distinct(mates);
  return log_.read(std::move(mates));
}

// Writes the rows that are left of the pages to new ones, filled with rows from memory. Returns how
// many of these there were.
std::size_t Tier::clean_group(const Group& group, std::span<const ssd::PagesRead> reads) {
  const auto num_classes = static_cast<std::size_t>(table_.arenas_.num_classes());
  ssd::PageLog::Room room = log_.reserve(kPagesOut + 1 + num_classes);
  const std::uint32_t stripe = group.bucket / kBucketsPerStripe;
  Lock lock(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
  Places places;
  for (const ssd::Position position : group.pages) {
    for (const ssd::PagesRead& read : reads) {
      const ssd::PagesRead::Page* page = read.find(position);
      if (page == nullptr || page->bytes == nullptr) continue;
      if (page->generation != log_.generation(position)) continue;
      const ssd::PageHeader header = ssd::header_of(page->bytes);
      if (header.bucket != group.bucket || !cold_.is_current(header, position)) continue;
      cold_.for_rows_of_page(header, page->bytes,
                             [&](const Place& place) { places.push_back(place); });
    }
  }
  if (places.empty()) return 0;
  const std::vector<Arena::Ref> refs = fill_of(group.bucket, places);
  write_out(group.bucket, refs, places, room);
  std::vector<Index::Entry> scratch;
  table_.index_.trim(group.bucket, table_.version(), scratch);
  num_cleaned_ += places.size();
  num_evicted_ += refs.size();
  return refs.size();
}

// The rows in memory that were used least, as many of each class as fit into the last of its pages.
// Requires: the stripe's lock.
std::vector<Arena::Ref> Tier::fill_of(std::uint32_t bucket, const Places& places) const {
  std::array<std::size_t, Arenas::kClassesMax> counts{};
  for (const Place& place : places) ++counts[place.row_class];
  std::vector<Arena::Ref> refs, filling, of_class;
  table_.index_.refs_of(bucket, refs);
  for (const Arena::Ref ref : refs) uses_.keep(ref);
  leave_out_claimed(bucket, refs);
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const std::size_t per_page = cold_.rows_per_page(i);
    const std::size_t rest = counts[static_cast<std::size_t>(i)] % per_page;
    if (rest == 0) continue;
    of_class.clear();
    std::ranges::copy_if(refs, std::back_inserter(of_class),
                         [&](Arena::Ref ref) { return table_.arenas_.class_of(ref) == i; });
    keep_coldest(of_class, per_page - rest);
    filling.insert(filling.end(), of_class.begin(), of_class.end());
  }
  return filling;
}

}  // namespace trireme
