#include "frozen/rows.h"

#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

constexpr FrozenLine kNoLine{};

[[noreturn]] void damaged(const FrozenFile& file, const std::string& expected_and_found) {
  throw Error(ErrorCode::kCorruption, file.name + ": expected " + expected_and_found);
}

void expect(const FrozenFile& file, const char* what, std::uint64_t expected, std::uint64_t found) {
  if (expected == found) return;
  damaged(file,
          std::string(what) + " " + std::to_string(expected) + ", found " + std::to_string(found));
}

FrozenFooter read_footer(const FrozenFile& file) {
  if (reinterpret_cast<std::uintptr_t>(file.bytes.data()) % sizeof(std::uint64_t) != 0) {
    throw Error(ErrorCode::kBadRequest, file.name + ": expected memory aligned to 8 bytes");
  }
  if (file.bytes.size() < sizeof(FrozenFooter)) {
    damaged(file, "frozen rows, found " + std::to_string(file.bytes.size()) + " bytes");
  }
  FrozenFooter footer;
  const std::uint64_t before = file.bytes.size() - sizeof footer;
  std::memcpy(&footer, file.bytes.data() + before, sizeof footer);
  if (footer.magic != FrozenFooter::kMagic) {
    damaged(file, "frozen rows of version 1 (TRMROWS1 64 bytes before the end), found other bytes");
  }
  if (footer.encoding > static_cast<std::uint32_t>(Encoding::kInt8)) {
    damaged(file, "an encoding from 0 to 2, found " + std::to_string(footer.encoding));
  }
  if (footer.options > FrozenFooter::kHasFlags) {
    damaged(file, "options 0 or 1, found " + std::to_string(footer.options));
  }
  if (footer.dim < 1 || footer.dim > FrozenFooter::kDimMax ||
      footer.statistics > FrozenFooter::kStatisticsMax) {
    damaged(file, "a dim from 1 to 2^20 and up to 16 statistics, found " +
                      std::to_string(footer.dim) + " and " + std::to_string(footer.statistics));
  }
  if (footer.first_bucket > kNumBuckets || footer.num_buckets > kNumBuckets ||
      footer.first_bucket + footer.num_buckets > kNumBuckets) {
    damaged(file, "buckets below 4096, found " + std::to_string(footer.num_buckets) + " from " +
                      std::to_string(footer.first_bucket));
  }
  expect(file, "a directory at byte", before - footer.num_buckets * sizeof(FrozenBucket),
         footer.directory_offset);
  return footer;
}

}  // namespace

FrozenRows::FrozenRows(std::span<const FrozenFile> files) {
  if (files.empty()) throw Error(ErrorCode::kBadRequest, "FrozenRows: expected files, found none");
  bool is_first = true;
  for (const FrozenFile& file : files) {
    add(file, is_first);
    is_first = false;
  }
  null_row_.resize(row_bytes_);
  for (Bucket& bucket : buckets_) {
    if (bucket.num_lines == 0) bucket.lines = &kNoLine;
  }
}

void FrozenRows::add(const FrozenFile& file, bool is_first) {
  const FrozenFooter footer = read_footer(file);
  if (is_first) {
    encoding_ = static_cast<Encoding>(footer.encoding);
    dim_ = static_cast<int>(footer.dim);
    has_flags_ = footer.options == FrozenFooter::kHasFlags;
    statistics_ = static_cast<int>(footer.statistics);
    row_bytes_ = frozen_row_bytes(encoding_, footer.statistics, footer.dim, has_flags_);
  }
  expect(file, "encoding", static_cast<std::uint32_t>(encoding_), footer.encoding);
  expect(file, "dim", static_cast<std::uint32_t>(dim_), footer.dim);
  expect(file, "statistics", static_cast<std::uint32_t>(statistics_), footer.statistics);
  expect(file, "options", has_flags_ ? FrozenFooter::kHasFlags : 0, footer.options);
  expect(file, "bytes per row:", row_bytes_, footer.row_bytes);

  std::uint64_t rows_here = 0;
  for (std::uint32_t i = 0; i < footer.num_buckets; ++i) {
    FrozenBucket entry;
    std::memcpy(&entry, file.bytes.data() + footer.directory_offset + i * sizeof entry,
                sizeof entry);
    add_bucket(file, footer.first_bucket + i, entry, footer.directory_offset);
    rows_here += entry.num_rows;
  }
  expect(file, "as many rows as it says:", footer.num_rows, rows_here);
  num_rows_ += rows_here;
}

void FrozenRows::add_bucket(const FrozenFile& file, std::uint32_t number, const FrozenBucket& entry,
                            std::uint64_t end) {
  const std::string name = "of bucket " + std::to_string(number);
  if (is_held_[number])
    damaged(file, "one file with bucket " + std::to_string(number) + ", found two");
  expect(file, ("lines " + name + ":").c_str(), FrozenLine::lines_for(entry.num_rows),
         entry.num_lines);
  const std::uint64_t bytes =
      entry.num_lines * sizeof(FrozenLine) + std::uint64_t{entry.num_rows} * row_bytes_;
  if (entry.offset > end || bytes > end - entry.offset || entry.offset % kFrozenAlignment != 0) {
    damaged(file, "rows " + name + " before byte " + std::to_string(end) + ", found " +
                      std::to_string(bytes) + " bytes at " + std::to_string(entry.offset));
  }
  const auto* at = reinterpret_cast<const std::byte*>(file.bytes.data() + entry.offset);
  buckets_[number] = {
      .lines = reinterpret_cast<const FrozenLine*>(at),
      .rows = at + entry.num_lines * sizeof(FrozenLine),
      .num_lines = entry.num_lines,
      .num_rows = entry.num_rows,
  };
  is_held_[number] = true;
  ++num_buckets_;
}

const std::byte* FrozenRows::find(std::uint64_t key, std::uint64_t hash) const noexcept {
  const Bucket& bucket = buckets_[bucket_of_hash(hash)];
  const FrozenLine* line = home(hash);
  const std::uint64_t first = std::min(line->first_row, bucket.num_rows);
  const std::uint64_t num_rows = std::min<std::uint64_t>(line->num_rows, bucket.num_rows - first);
  const auto row_at = [&](std::uint64_t slot) { return bucket.rows + (first + slot) * row_bytes_; };
  for (std::uint32_t slots = match(line, FrozenLine::tag_of(hash)); slots != 0;
       slots &= slots - 1) {
    const auto slot = static_cast<std::uint64_t>(std::countr_zero(slots));
    if (slot < num_rows && key_of_row(row_at(slot)) == key) return row_at(slot);
  }
  // Of the others, which may be many if keys were chosen for one line, the order is known.
  std::uint64_t low = FrozenLine::kTags, high = num_rows;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    const std::uint64_t key_there = key_of_row(row_at(middle));
    if (key_there == key) return row_at(middle);
    mix64(key_there) < hash ? low = middle + 1 : high = middle;
  }
  return nullptr;
}

FrozenRows::Content FrozenRows::content(std::uint32_t number) const {
  if (number >= kNumBuckets) {
    throw Error(ErrorCode::kBadRequest, "FrozenRows.content: expected a bucket below 4096, found " +
                                            std::to_string(number));
  }
  const Bucket& bucket = buckets_[number];
  const std::size_t value_bytes = row_bytes_ - sizeof(std::uint64_t);
  Content out{.keys = Array<std::uint64_t>(bucket.num_rows),
              .values = Array<std::uint8_t>(bucket.num_rows * value_bytes)};
  for (std::size_t row = 0; row < bucket.num_rows; ++row) {
    const std::byte* at = bucket.rows + row * row_bytes_;
    out.keys[row] = key_of_row(at);
    std::memcpy(out.values.data() + row * value_bytes, at + sizeof(std::uint64_t), value_bytes);
  }
  return out;
}

}  // namespace trireme
