// Table: whole buckets, and their marks.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "base/error.h"
#include "table/table.h"

namespace trireme {
namespace {

void check_bucket(std::uint32_t bucket) {
  if (bucket < kNumBuckets) return;
  throw Error(ErrorCode::kBadRequest, "Table: expected a bucket in [0, " +
                                          std::to_string(kNumBuckets) + "), found " +
                                          std::to_string(bucket));
}

[[noreturn]] void refuse(std::uint32_t bucket, const std::string& what) {
  throw Error(ErrorCode::kBadRequest,
              "Table.restore: bucket " + std::to_string(bucket) + ": " + what);
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

BucketContent Table::snapshot(std::uint32_t bucket) const {
  check_bucket(bucket);
  BucketContent content;
  std::vector<Arena::Ref> refs;
  std::shared_lock lock(mutex_of(bucket));
  index_.refs_of(bucket, refs);
  content.keys = Array<std::uint64_t>(refs.size());
  content.classes = Array<std::uint8_t>(refs.size());
  content.rows = Array<std::uint8_t>(refs.size() * row_bytes());
  constexpr std::size_t kAhead = 8;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    const std::byte* next = arena_.row(refs[std::min(i + kAhead, refs.size() - 1)]);
    for (std::size_t byte = 0; byte < std::min<std::size_t>(row_bytes(), 256); byte += 64) {
      __builtin_prefetch(next + byte);
    }
    const std::byte* row = arena_.row(refs[i]);
    content.keys[i] = key_of_row(row);
    content.classes[i] = 0;
    std::memcpy(content.rows.data() + i * row_bytes(), row + kWeightsOffset, row_bytes());
  }
  for (const auto& [stream, marks] : marks_.streams()) {
    if ((*marks)[bucket] > 0) content.marks.emplace_back(stream, (*marks)[bucket]);
  }
  return content;
}

void Table::restore(std::uint32_t bucket, const BucketView& content) {
  check_bucket(bucket);
  check_content(bucket, content);
  replace(bucket, content);
}

void Table::clear_bucket(std::uint32_t bucket) {
  check_bucket(bucket);
  replace(bucket, {});
}

void Table::check_content(std::uint32_t bucket, const BucketView& content) const {
  if (content.classes.size() != content.keys.size()) {
    refuse(bucket, "expected " + std::to_string(content.keys.size()) +
                       " classes, one per key, found " + std::to_string(content.classes.size()));
  }
  if (content.rows.size() != content.keys.size() * row_bytes()) {
    refuse(bucket, "expected " + std::to_string(content.keys.size()) + " rows of " +
                       std::to_string(row_bytes()) + " bytes, found " +
                       std::to_string(content.rows.size()) + " bytes");
  }
  for (const std::uint8_t row_class : content.classes) {
    if (row_class != 0) refuse(bucket, "expected row class 0, found " + std::to_string(row_class));
  }
  std::vector<std::uint64_t> sorted(content.keys.begin(), content.keys.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (bucket_of(sorted[i]) != bucket) {
      refuse(bucket, "expected its own keys, found key " + std::to_string(sorted[i]) +
                         " of bucket " + std::to_string(bucket_of(sorted[i])));
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      refuse(bucket, "expected distinct keys, found " + std::to_string(sorted[i]) + " twice");
    }
  }
}

// Swaps a bucket's rows and marks for those of `content`, which was checked. Nothing changes on an
// error.
void Table::replace(std::uint32_t bucket, const BucketView& content) {
  std::vector<std::pair<Marks::Array*, std::uint64_t>> marks;
  for (const auto& [stream, sequence] : content.marks)
    marks.emplace_back(&marks_.of(stream), sequence);
  std::unique_lock lock(mutex_of(bucket));
  std::vector<Arena::Ref> old;
  index_.refs_of(bucket, old);
  std::vector<Arena::Ref> refs(content.keys.size());
  const std::vector<std::pair<std::int64_t, Marks::Array*>> streams = marks_.streams();
  Arena::Reservation reservation(arena_, refs.size());
  std::vector<Arena::Ref> scratch;
  index_.prepare(bucket / kBucketsPerStripe, refs.size(), scratch);
  // From here on nothing fails.
  reservation.take(refs);
  index_.reserve(bucket, refs.size(), scratch);
  index_.clear(bucket);
  arena_.free(old);
  if (refs.empty()) index_.release(bucket);
  for (std::size_t i = 0; i < refs.size(); ++i) {
    std::byte* row = arena_.row(refs[i]);
    std::memcpy(row, &content.keys[i], sizeof content.keys[i]);
    std::memcpy(row + kWeightsOffset, content.rows.data() + i * row_bytes(), row_bytes());
    index_.insert(mix64(content.keys[i]), refs[i]);
  }
  for (const auto& [stream, array] : streams) (*array)[bucket] = 0;
  for (const auto& [array, sequence] : marks) (*array)[bucket] = sequence;
}

}  // namespace trireme
