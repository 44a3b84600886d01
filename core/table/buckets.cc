// Table: the content of buckets, and their marks.
#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <type_traits>
#include <unordered_map>

#include "base/error.h"
#include "base/hash.h"
#include "base/search_steps.h"
#include "table/scan.h"
#include "table/table.h"

namespace trireme {
namespace {

[[noreturn]] void refuse(const char* who, std::uint32_t bucket, const std::string& what) {
  throw Error(ErrorCode::kBadRequest,
              std::string("Table.") + who + ": bucket " + std::to_string(bucket) + ": " + what);
}

// A key that occurs twice, if there is one.
std::optional<std::uint64_t> repeated(std::span<const std::uint64_t> keys) {
  // A set of the hashes, which are distinct if the keys are. 0 means a free slot; only one key has
  // hash 0.
  std::vector<std::uint64_t> slots(std::bit_ceil(2 * keys.size() + 1));
  const std::uint64_t mask = slots.size() - 1;
  std::size_t steps_left = kStepsPerKey * keys.size();
  bool has_zero = false;
  for (const std::uint64_t key : keys) {
    const std::uint64_t hash = mix64(key);
    std::uint64_t slot = hash & mask;
    for (; slots[slot] != 0 && slots[slot] != hash; slot = (slot + 1) & mask) {
      if (--steps_left > 0) continue;
      std::vector<std::uint64_t> sorted(keys.begin(), keys.end());
      std::ranges::sort(sorted);
      const auto twice = std::ranges::adjacent_find(sorted);
      return twice != sorted.end() ? std::optional(*twice) : std::nullopt;
    }
    if (hash == 0 ? std::exchange(has_zero, true) : slots[slot] == hash) return key;
    slots[slot] = hash;
  }
  return std::nullopt;
}

// Errors: kBadRequest for a key of another bucket, or a key that occurs twice.
void check_keys(const char* who, std::uint32_t bucket, std::span<const std::uint64_t> keys) {
  for (const std::uint64_t key : keys) {
    if (bucket_of(key) == bucket) continue;
    refuse(who, bucket,
           "expected its own keys, found key " + std::to_string(key) + " of bucket " +
               std::to_string(bucket_of(key)));
  }
  if (const auto key = repeated(keys)) {
    refuse(who, bucket, "expected distinct keys, found " + std::to_string(*key) + " twice");
  }
}

std::array<std::size_t, Arenas::kClassesMax> count_by_class(const Table::BucketView& content) {
  std::array<std::size_t, Arenas::kClassesMax> counts{};
  for (const std::uint8_t row_class : content.classes) ++counts[row_class];
  return counts;
}

// Takes this many rows of each class, class after class; returns where each begins.
std::array<std::size_t, Arenas::kClassesMax> take_by_class(Arenas::Reservation& reservation,
                                                           std::span<const std::size_t> counts,
                                                           std::span<Arena::Ref> refs) noexcept {
  std::array<std::size_t, Arenas::kClassesMax> begins{};
  std::size_t at = 0;
  for (std::size_t row_class = 0; row_class < counts.size(); ++row_class) {
    begins[row_class] = at;
    if (counts[row_class] == 0) continue;
    reservation.take(static_cast<int>(row_class), refs.subspan(at, counts[row_class]));
    at += counts[row_class];
  }
  return begins;
}

}  // namespace

void Table::marks(std::int64_t stream, std::span<std::uint64_t> out) const {
  const StreamMarks* marks = marks_.find(stream);
  if (marks == nullptr) {
    std::fill(out.begin(), out.end(), 0);
    return;
  }
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::shared_lock lock(stripes_[stripe]);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      out[stripe * kBucketsPerStripe + i] = (*marks)[stripe * kBucketsPerStripe + i];
    }
  }
}

void Table::set_marks(std::int64_t stream, std::span<const std::uint64_t> marks) {
  StreamMarks& own = marks_.of(stream);
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::unique_lock lock(stripes_[stripe]);
    own.assign(stripe, marks.subspan(stripe * kBucketsPerStripe).first<kBucketsPerStripe>());
  }
}

// The rows of a bucket with a version > since. Requires: the stripe's lock.
std::vector<Arena::Ref> Table::refs_since(std::uint32_t bucket, std::uint32_t since) const {
  std::vector<Arena::Ref> refs;
  index_.refs_since(bucket, since, version(), refs);
  if (since == 0) return refs;
  std::size_t size = 0;
  for_rows(arenas_, classes_.layouts(), refs, from_stamp, sizeof(Stamp),
           [&](std::size_t i, const RowLayout& layout, const std::byte* row) {
             if (layout.stamp(row).version > since) refs[size++] = refs[i];
           });
  refs.resize(size);
  return refs;
}

BucketContent Table::snapshot(std::uint32_t bucket, std::uint32_t since,
                              std::uint32_t removed_since) const {
  check_bucket(bucket);
  BucketContent content;
  if (tier_ == nullptr) {
    std::shared_lock lock(mutex_of(bucket));
    fill(content, bucket, since, removed_since, 0);
    return content;
  }
  std::size_t num_copied = 0;
  const auto keep = [&](std::uint32_t version) { return since == 0 || version > since; };
  const auto copy = [&](const Tier::Place& place) {
    if (!keep(classes_[place.row_class].stamp(place.row).version)) return false;
    if (num_copied == content.keys.size()) {
      const std::size_t num_rows = since == 0 ? num_rows_of(bucket) : 0;
      resize(content, num_copied, std::max(num_rows, num_copied + num_copied / 4 + 16));
    }
    write_row(content, num_copied++, place.row, place.row_class);
    return true;
  };
  tier_->scan_bucket(bucket,
                     {.keep = keep, .copy = copy, .end = [&](std::span<const char> is_there) {
                        fill(content, bucket, since, removed_since, keep_rows(content, is_there));
                      }});
  return content;
}

// Gives the content memory for this many rows, of which the first stay.
void Table::resize(BucketContent& content, std::size_t num_kept, std::size_t num_rows) const {
  const auto move = [](auto& array, std::size_t kept, std::size_t size) {
    auto other = std::remove_reference_t<decltype(array)>(size);
    std::copy_n(array.data(), kept, other.data());
    array = std::move(other);
  };
  move(content.keys, num_kept, num_rows);
  move(content.classes, num_kept, num_rows);
  move(content.rows, num_kept * row_bytes(), num_rows * row_bytes());
}

void Table::write_row(BucketContent& content, std::size_t i, const std::byte* row,
                      int row_class) const {
  content.keys[i] = key_of_row(row);
  content.classes[i] = static_cast<std::uint8_t>(row_class);
  classes_[row_class].write_wide(row, content.rows.data() + i * row_bytes());
}

// Forgets rows of the content. Returns the number of the others, which are the first then.
std::size_t Table::keep_rows(BucketContent& content, std::span<const char> is_kept) const {
  std::size_t n = 0;
  for (std::size_t i = 0; i < is_kept.size(); ++i) {
    if (is_kept[i] == 0) continue;
    if (n != i) {
      content.keys[n] = content.keys[i];
      content.classes[n] = content.classes[i];
      std::copy_n(content.rows.data() + i * row_bytes(), row_bytes(),
                  content.rows.data() + n * row_bytes());
    }
    ++n;
  }
  return n;
}

BucketContent Table::snapshot_in_memory(std::uint32_t bucket, std::uint32_t removed_since) const {
  check_bucket(bucket);
  const Tier& tier = need_tier("snapshot_in_memory");
  BucketContent content;
  std::shared_lock lock(mutex_of(bucket));
  fill(content, bucket, 0, removed_since, 0);
  ByteWriter places(content.places);
  tier.save_places(bucket, places);
  removed_.save(bucket, content.removed_since, places);
  return content;
}

// Adds to the content what is in memory. Requires: the stripe's lock.   num_copied: rows that it
// has already.
void Table::fill(BucketContent& content, std::uint32_t bucket, std::uint32_t since,
                 std::uint32_t removed_since, std::size_t num_copied) const {
  if (removed_since != 0) {
    const std::uint32_t known = since == 0 ? removed_.known_since(bucket) : 0;
    content.removed_since = std::max(removed_since, known);
    content.removed = removed_.since(bucket, content.removed_since);
  }
  const std::vector<Arena::Ref> refs = refs_since(bucket, since);
  const std::size_t size = num_copied + refs.size();
  if (content.keys.size() < size) resize(content, num_copied, size);
  const std::size_t bytes_ahead = std::min<std::size_t>(arenas_.row_bytes(), 256);
  for_rows(arenas_, classes_.layouts(), refs, from_start, bytes_ahead,
           [&](std::size_t i, const RowLayout&, const std::byte* row) {
             write_row(content, num_copied + i, row, arenas_.class_of(refs[i]));
           });
  content.keys.truncate(size);
  content.classes.truncate(size);
  content.rows.truncate(size * row_bytes());
  for (const auto& [stream, marks] : marks_.streams()) {
    const std::uint64_t mark = (*marks)[bucket];
    if (mark > 0) content.marks.emplace_back(stream, mark);
  }
  content.pending = admission_.save(bucket);
}

void Table::restore(std::uint32_t bucket, const BucketView& content, Tier::Claims claims) {
  check_bucket(bucket);
  check_content("restore", bucket, content);
  raise_version_to(content);
  replace(bucket, content, claims);
}

std::uint32_t Table::removed_known_since() const {
  std::uint32_t since = 0;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    std::shared_lock lock(mutex_of(bucket));
    since = std::max(since, removed_.known_since(bucket));
  }
  return since;
}

void Table::raise_version_to(const BucketView& content) noexcept {
  raise_version(content.removed_at);
  for (std::size_t i = 0; i < content.keys.size(); ++i) {
    raise_version(classes_.wide().version_of_wide(content.rows.data() + i * row_bytes()));
  }
}

void Table::check_content(const char* who, std::uint32_t bucket, const BucketView& content) const {
  if (content.classes.size() != content.keys.size()) {
    refuse(who, bucket,
           "expected " + std::to_string(content.keys.size()) + " classes, one per key, found " +
               std::to_string(content.classes.size()));
  }
  if (content.rows.size() != content.keys.size() * row_bytes()) {
    refuse(who, bucket,
           "expected " + std::to_string(content.keys.size()) + " rows of " +
               std::to_string(row_bytes()) + " bytes, found " +
               std::to_string(content.rows.size()) + " bytes");
  }
  for (std::size_t i = 0; i < content.keys.size(); ++i) {
    const int row_class = content.classes[i];
    if (row_class >= classes_.size()) {
      refuse(who, bucket,
             "expected a row class in [0, " + std::to_string(classes_.size()) + "), found " +
                 std::to_string(row_class));
    }
    if (!classes_[row_class].fits_wide(content.rows.data() + i * row_bytes())) {
      refuse(who, bucket,
             "expected zeros behind the " + std::to_string(classes_[row_class].dim()) +
                 " weights of key " + std::to_string(content.keys[i]) + " of row class " +
                 std::to_string(row_class) + ", found others");
    }
  }
  check_keys(who, bucket, content.keys);
}

// Replaces a bucket's rows and marks by those of `content`, which was checked. Nothing changes on
// an error.
void Table::replace(std::uint32_t bucket, const BucketView& content, Tier::Claims claims) {
  for (const auto& [stream, sequence] : content.marks) marks_.of(stream);
  Admission::Pending pending;
  if (content.pending) pending = admission_.parse(bucket, *content.pending);
  RemovedKeys::Removals removed{
      .keys = {content.removed.begin(), content.removed.end()},
      .versions = std::vector<std::uint32_t>(content.removed.size(), content.removed_at)};
  std::uint32_t removed_since = content.removed_since;
  Tier::SavedPlaces places;
  if (!content.places.empty()) {
    ByteReader reader(content.places);
    places = need_tier("restore").parse_places(bucket, reader);
    raise_version(places.rows.version());
    // Keys that have rows again must not count as removed now, and those on SSD are not known here:
    // the versions are of use. Places that were saved without them stand for no known removals.
    if (reader.is_at_end()) {
      removed = {};
      removed_since = std::max(removed_since, content.removed_at);
    } else {
      removed = RemovedKeys::parse(bucket, reader);
    }
    if (!reader.is_at_end()) {
      throw Error(ErrorCode::kCorruption, "Table.restore: bucket " + std::to_string(bucket) +
                                              ": expected no bytes behind removed keys");
    }
  }
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  const Tier::Lock lock =
      tier_ == nullptr
          ? Tier::Lock(nullptr, stripe, std::unique_lock(stripes_[stripe]))
          : tier_->lock_stripe(stripe, content.keys.size(), content.places.size(), claims);
  ++num_changes_;
  std::vector<Arena::Ref> old;
  index_.refs_of(bucket, old);
  const std::vector<std::pair<StreamMarks*, std::uint64_t>> marks = changed_marks(bucket, content);
  const auto counts = count_by_class(content);
  Arenas::Reservation reservation(arenas_, counts);
  std::vector<Index::Entry> scratch;
  const std::size_t num_rows = content.keys.size();
  std::vector<Arena::Ref> refs(num_rows);
  index_.prepare(bucket / kBucketsPerStripe, num_rows, scratch);
  // From here on nothing fails.
  index_.reserve(bucket, num_rows, version(), scratch);
  index_.clear(bucket);
  arenas_.free(old);
  if (tier_ != nullptr) tier_->restore_places(bucket, std::move(places));
  if (num_rows == 0) index_.release(bucket);
  removed_.restore(bucket, std::move(removed), removed_since);
  admission_.replace(bucket, std::move(pending));
  std::array<std::size_t, Arenas::kClassesMax> next = take_by_class(reservation, counts, refs);
  for (std::size_t i = 0; i < num_rows; ++i) {
    insert_row(refs[next[content.classes[i]]++], content, i, scratch);
  }
  for (const auto& [stream, mark] : marks) stream->set(bucket, mark);
}

// The streams whose mark of the bucket the content changes, with the new one. They have room for
// it. Requires: the stripe's lock.
std::vector<std::pair<StreamMarks*, std::uint64_t>> Table::changed_marks(
    std::uint32_t bucket, const BucketView& content) {
  std::unordered_map<const StreamMarks*, std::uint64_t> marks;
  for (const auto& [stream, mark] : content.marks) marks[marks_.find(stream)] = mark;
  std::vector<std::pair<StreamMarks*, std::uint64_t>> changed;
  for (const auto& [number, stream] : marks_.streams()) {
    const auto found = marks.find(stream);
    const std::uint64_t mark = found == marks.end() ? 0 : found->second;
    if ((*stream)[bucket] == mark) continue;
    stream->part(bucket / kBucketsPerStripe);
    changed.emplace_back(stream, mark);
  }
  return changed;
}

// Inserts row i of the content, whose key is absent, as `ref`, a row of its class. Requires: there
// is room for it.
void Table::insert_row(Arena::Ref ref, const BucketView& content, std::size_t i,
                       std::vector<Index::Entry>& scratch) noexcept {
  const int row_class = content.classes[i];
  std::byte* row = arenas_.row(ref);
  std::memcpy(row, &content.keys[i], sizeof content.keys[i]);
  classes_[row_class].read_wide(row, content.rows.data() + i * row_bytes());
  const auto version = static_cast<std::uint16_t>(classes_[row_class].stamp(row).version);
  index_.insert(mix64(content.keys[i]), {ref, version}, this->version(), scratch);
  if (tier_ != nullptr) tier_->uses().begin(ref);
  admission_.settle(content.keys[i]);
}

void Table::apply(std::uint32_t bucket, const BucketView& content,
                  std::span<const std::uint64_t> removed, Tier::Claims claims) {
  check_bucket(bucket);
  check_content("apply", bucket, content);
  check_keys("apply", bucket, removed);
  Admission::Pending pending;
  if (content.pending) pending = admission_.parse(bucket, *content.pending);
  raise_version_to(content);
  std::vector<std::uint64_t> keys(content.keys.begin(), content.keys.end());
  keys.insert(keys.end(), removed.begin(), removed.end());
  if (!claims.empty()) std::ranges::sort(keys, {}, mix64);  // as claims have them
  const Tier::Lock lock = lock_rows(bucket / kBucketsPerStripe, keys, keys.size(), claims);
  const std::size_t num_rows = content.keys.size();
  Arenas::Reservation reservation(arenas_, count_by_class(content));
  std::vector<Index::Entry> scratch;
  index_.prepare(bucket / kBucketsPerStripe, num_rows, scratch);
  // From here on nothing fails.
  const auto forget = [&](std::uint64_t key) {
    if (Arena::Ref ref; index_.erase(key, ref)) arenas_.free({&ref, 1});
  };
  if (content.pending) admission_.replace(bucket, std::move(pending));
  for (const std::uint64_t key : removed) forget(key);
  index_.reserve(bucket, index_.num_rows(bucket) + num_rows, version(), scratch);
  for (std::size_t i = 0; i < num_rows; ++i) {
    std::byte* row = index_.find(content.keys[i]);
    if (row != nullptr && arenas_.class_of(row) == content.classes[i]) {
      const RowLayout& layout = layout_of(row);
      layout.read_wide(row, content.rows.data() + i * row_bytes());
      index_.touch(content.keys[i], layout.stamp(row).version, version());
    } else {
      forget(content.keys[i]);
      insert_row(reservation.take(content.classes[i]), content, i, scratch);
    }
  }
}

}  // namespace trireme
