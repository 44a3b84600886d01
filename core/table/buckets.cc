// Table: the content of buckets, and their marks.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "base/error.h"
#include "table/scan.h"
#include "table/table.h"

namespace trireme {
namespace {

[[noreturn]] void refuse(const char* who, std::uint32_t bucket, const std::string& what) {
  throw Error(ErrorCode::kBadRequest,
              std::string("Table.") + who + ": bucket " + std::to_string(bucket) + ": " + what);
}

// Errors: kBadRequest for a key of another bucket, or twice the same.
void check_keys(const char* who, std::uint32_t bucket, std::span<const std::uint64_t> keys) {
  std::vector<std::uint64_t> sorted(keys.begin(), keys.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (bucket_of(sorted[i]) != bucket) {
      refuse(who, bucket,
             "expected its own keys, found key " + std::to_string(sorted[i]) + " of bucket " +
                 std::to_string(bucket_of(sorted[i])));
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      refuse(who, bucket, "expected distinct keys, found " + std::to_string(sorted[i]) + " twice");
    }
  }
}

}  // namespace

void Table::marks(std::int64_t stream, std::span<std::uint64_t> out) const {
  const Marks::Array* marks = marks_.find(stream);
  if (marks == nullptr) {
    std::fill(out.begin(), out.end(), 0);
    return;
  }
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += kBucketsPerStripe) {
    std::shared_lock lock(mutex_of(bucket));
    std::copy_n(marks->begin() + bucket, kBucketsPerStripe, out.begin() + bucket);
  }
}

void Table::set_marks(std::int64_t stream, std::span<const std::uint64_t> marks) {
  Marks::Array& array = marks_.of(stream);
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; bucket += kBucketsPerStripe) {
    std::unique_lock lock(mutex_of(bucket));
    std::copy_n(marks.begin() + bucket, kBucketsPerStripe, array.begin() + bucket);
  }
}

// The rows of a bucket with a version > since. Requires: the stripe's lock.
std::vector<Arena::Ref> Table::refs_since(std::uint32_t bucket, std::uint32_t since) const {
  std::vector<Arena::Ref> refs;
  index_.refs_since(bucket, since, version(), refs);
  if (since == 0) return refs;
  std::size_t size = 0;
  for_rows(arena_, refs, layout_.stamp_offset(), sizeof(Stamp),
           [&](std::size_t i, const std::byte* row) {
             if (layout_.stamp(row).version > since) refs[size++] = refs[i];
           });
  refs.resize(size);
  return refs;
}

BucketContent Table::snapshot(std::uint32_t bucket, std::uint32_t since) const {
  check_bucket(bucket);
  BucketContent content;
  std::shared_lock lock(mutex_of(bucket));
  if (since != 0) content.removed = removed_.since(bucket, since);
  const std::vector<Arena::Ref> refs = refs_since(bucket, since);
  content.keys = Array<std::uint64_t>(refs.size());
  content.classes = Array<std::uint8_t>(refs.size());
  content.rows = Array<std::uint8_t>(refs.size() * row_bytes());
  const std::size_t bytes_ahead = std::min<std::size_t>(layout_.row_bytes(), 256);
  for_rows(arena_, refs, 0, bytes_ahead, [&](std::size_t i, const std::byte* row) {
    content.keys[i] = key_of_row(row);
    content.classes[i] = 0;
    layout_.write_wide(row, content.rows.data() + i * row_bytes());
  });
  for (const auto& [stream, marks] : marks_.streams()) {
    if ((*marks)[bucket] > 0) content.marks.emplace_back(stream, (*marks)[bucket]);
  }
  content.pending = admission_.save(bucket);
  return content;
}

void Table::restore(std::uint32_t bucket, const BucketView& content) {
  check_bucket(bucket);
  check_content("restore", bucket, content);
  raise_version_to(content);
  replace(bucket, content);
}

void Table::raise_version_to(const BucketView& content) noexcept {
  for (std::size_t i = 0; i < content.keys.size(); ++i) {
    raise_version(layout_.version_of_wide(content.rows.data() + i * row_bytes()));
  }
}

void Table::clear_bucket(std::uint32_t bucket) {
  check_bucket(bucket);
  replace(bucket, {});
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
  for (const std::uint8_t row_class : content.classes) {
    if (row_class != 0) {
      refuse(who, bucket, "expected row class 0, found " + std::to_string(row_class));
    }
  }
  check_keys(who, bucket, content.keys);
}

// Swaps a bucket's rows and marks for those of `content`, which was checked. Nothing changes on an
// error.
void Table::replace(std::uint32_t bucket, const BucketView& content) {
  std::vector<std::pair<Marks::Array*, std::uint64_t>> marks;
  for (const auto& [stream, sequence] : content.marks)
    marks.emplace_back(&marks_.of(stream), sequence);
  Admission::Pending pending = admission_.parse(bucket, content.pending);
  std::unique_lock lock(mutex_of(bucket));
  std::vector<Arena::Ref> old;
  index_.refs_of(bucket, old);
  std::vector<Arena::Ref> refs(content.keys.size());
  const std::vector<std::pair<std::int64_t, Marks::Array*>> streams = marks_.streams();
  Arena::Reservation reservation(arena_, refs.size());
  std::vector<Index::Entry> scratch;
  index_.prepare(bucket / kBucketsPerStripe, refs.size(), scratch);
  // From here on nothing fails.
  reservation.take(refs);
  index_.reserve(bucket, refs.size(), version(), scratch);
  index_.clear(bucket);
  arena_.free(old);
  if (refs.empty()) index_.release(bucket);
  removed_.clear(bucket);
  admission_.replace(bucket, std::move(pending));
  for (std::size_t i = 0; i < refs.size(); ++i) insert_row(refs[i], content, i);
  for (const auto& [stream, array] : streams) (*array)[bucket] = 0;
  for (const auto& [array, sequence] : marks) (*array)[bucket] = sequence;
}

// Enters row i of the content, whose key is absent, as `ref`. Requires: there is room for it.
void Table::insert_row(Arena::Ref ref, const BucketView& content, std::size_t i) noexcept {
  std::byte* row = arena_.row(ref);
  std::memcpy(row, &content.keys[i], sizeof content.keys[i]);
  layout_.read_wide(row, content.rows.data() + i * row_bytes());
  const auto version = static_cast<std::uint16_t>(layout_.stamp(row).version);
  index_.insert(mix64(content.keys[i]), {ref, version}, this->version());
  admission_.settle(content.keys[i]);
}

void Table::apply(std::uint32_t bucket, const BucketView& content,
                  std::span<const std::uint64_t> removed) {
  check_bucket(bucket);
  check_content("apply", bucket, content);
  check_keys("apply", bucket, removed);
  raise_version_to(content);
  std::unique_lock lock(mutex_of(bucket));
  std::vector<Arena::Ref> refs(content.keys.size());
  std::vector<Arena::Ref> old;
  old.reserve(removed.size());
  Arena::Reservation reservation(arena_, refs.size());
  std::vector<Index::Entry> scratch;
  index_.prepare(bucket / kBucketsPerStripe, refs.size(), scratch);
  // From here on nothing fails.
  for (const std::uint64_t key : removed) {
    if (Arena::Ref ref; index_.erase(key, ref)) old.push_back(ref);
  }
  arena_.free(old);
  index_.reserve(bucket, index_.num_rows(bucket) + refs.size(), version(), scratch);
  for (std::size_t i = 0; i < refs.size(); ++i) {
    if (std::byte* row = index_.find(content.keys[i]); row != nullptr) {
      layout_.read_wide(row, content.rows.data() + i * row_bytes());
      index_.touch(content.keys[i], layout_.stamp(row).version, version());
    } else {
      reservation.take({&refs[i], 1});
      insert_row(refs[i], content, i);
    }
  }
}

}  // namespace trireme
