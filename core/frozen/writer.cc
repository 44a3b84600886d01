#include "frozen/writer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"

namespace trireme {
namespace {

[[noreturn]] void wrong(const std::string& expected_and_found) {
  throw Error(ErrorCode::kBadRequest, "FrozenWriter: expected " + expected_and_found);
}

void write_lines(std::span<FrozenLine> lines, std::uint32_t row, std::uint64_t hash) noexcept {
  FrozenLine& line = lines[FrozenLine::home_of(hash, static_cast<std::uint32_t>(lines.size()))];
  if (line.num_rows == 0) line.first_row = row;
  if (line.num_rows < FrozenLine::kTags) line.tags[line.num_rows] = FrozenLine::tag_of(hash);
  ++line.num_rows;
}

}  // namespace

FrozenWriter::FrozenWriter(Encoding encoding, int statistics, int dim, bool has_flags,
                           std::uint32_t first_bucket)
    : encoding_(encoding),
      statistics_(static_cast<std::uint32_t>(statistics)),
      dim_(static_cast<std::uint32_t>(dim)),
      has_flags_(has_flags),
      first_bucket_(first_bucket),
      row_bytes_(frozen_row_bytes(encoding, statistics_, dim_, has_flags)) {
  if (dim < 1 || dim > FrozenFooter::kDimMax || statistics < 0 ||
      statistics > FrozenFooter::kStatisticsMax) {
    wrong("a dim from 1 to " + std::to_string(FrozenFooter::kDimMax) + " and at most " +
          std::to_string(FrozenFooter::kStatisticsMax) + " statistics, found " +
          std::to_string(dim) + " and " + std::to_string(statistics));
  }
  if (first_bucket >= kNumBuckets) {
    wrong("a bucket below 4096, found " + std::to_string(first_bucket));
  }
}

std::vector<FrozenWriter::Entry> FrozenWriter::in_order(std::span<const std::uint64_t> keys) const {
  const std::size_t bucket = first_bucket_ + directory_.size();
  std::vector<Entry> entries(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    entries[i] = {mix64(keys[i]), static_cast<std::uint32_t>(i)};
    if (bucket_of_hash(entries[i].hash) != bucket) {
      wrong("keys of bucket " + std::to_string(bucket) + ", found key " + std::to_string(keys[i]));
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.hash < b.hash; });
  const auto twice =
      std::adjacent_find(entries.begin(), entries.end(),
                         [](const Entry& a, const Entry& b) { return a.hash == b.hash; });
  if (twice != entries.end()) {
    wrong("distinct keys, found key " + std::to_string(keys[twice->position]) + " twice");
  }
  return entries;
}

Array<std::uint8_t> FrozenWriter::add(std::span<const std::uint64_t> keys,
                                      std::span<const std::uint8_t> values) {
  if (first_bucket_ + directory_.size() >= kNumBuckets) wrong("4096 buckets, found more");
  if (keys.size() > std::numeric_limits<std::uint32_t>::max()) {
    wrong("fewer than 2^32 rows in a bucket, found " + std::to_string(keys.size()));
  }
  if (values.size() != keys.size() * value_bytes()) {
    wrong(std::to_string(keys.size() * value_bytes()) + " bytes of values, found " +
          std::to_string(values.size()));
  }
  const std::vector<Entry> entries = in_order(keys);
  const auto num_rows = static_cast<std::uint32_t>(keys.size());
  const std::uint32_t num_lines = FrozenLine::lines_for(num_rows);
  const std::size_t line_bytes = num_lines * sizeof(FrozenLine);
  Array<std::uint8_t> out(round_up(line_bytes + num_rows * row_bytes_, kFrozenAlignment));
  std::fill_n(out.data(), out.size(), std::uint8_t{0});

  std::vector<FrozenLine> lines(num_lines);
  for (std::uint32_t row = 0; row < num_rows; ++row) {
    const Entry& entry = entries[row];
    write_lines(lines, row, entry.hash);
    std::uint8_t* to = out.data() + line_bytes + row * row_bytes_;
    std::memcpy(to, &keys[entry.position], sizeof(std::uint64_t));
    std::memcpy(to + sizeof(std::uint64_t), values.data() + entry.position * value_bytes(),
                value_bytes());
  }
  if (num_lines > 0) std::memcpy(out.data(), lines.data(), line_bytes);
  directory_.push_back({num_bytes_, num_lines, num_rows});
  num_bytes_ += out.size();
  return out;
}

Array<std::uint8_t> FrozenWriter::finish() const {
  const std::size_t directory_bytes = directory_.size() * sizeof(FrozenBucket);
  FrozenFooter footer{
      .magic = FrozenFooter::kMagic,
      .encoding = static_cast<std::uint32_t>(encoding_),
      .dim = dim_,
      .row_bytes = static_cast<std::uint32_t>(row_bytes_),
      .options = has_flags_ ? FrozenFooter::kHasFlags : 0,
      .first_bucket = first_bucket_,
      .num_buckets = static_cast<std::uint32_t>(directory_.size()),
      .num_rows = 0,
      .directory_offset = num_bytes_,
      .statistics = statistics_,
      .unused = {},
  };
  for (const FrozenBucket& bucket : directory_) footer.num_rows += bucket.num_rows;
  Array<std::uint8_t> out(directory_bytes + sizeof footer);
  if (directory_bytes > 0) std::memcpy(out.data(), directory_.data(), directory_bytes);
  std::memcpy(out.data() + directory_bytes, &footer, sizeof footer);
  return out;
}

}  // namespace trireme
