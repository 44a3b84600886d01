#include "store/index.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::uint8_t kPassedMax = 255;

// How far back the versions of lines separate old from new; for an earlier version every line is
// visited.
constexpr std::uint32_t kVersionsTold = 1U << 15;

constexpr std::uint64_t kGrowthMin = 3;
// About as many as a bucket has in a table of 1 M rows.
constexpr std::uint64_t kDoubledMax = 24;

// Lines that a key may pass: more of a larger bucket, whose rows take longer to insert again.
constexpr std::uint64_t passed_max(std::uint64_t num_lines) noexcept { return 64 + num_lines / 64; }

}  // namespace

Index::Index(const Arenas& arenas, SmallBuckets small)
    : arenas_(arenas), doubled_max_(small == SmallBuckets::kDouble ? kDoubledMax : 0) {}

// The new size of a full bucket: an eighth more; for small buckets more than that, so that they do
// not grow for every dozen rows.
std::uint64_t Index::grown(std::uint64_t num_lines) const noexcept {
  const std::uint64_t least = num_lines + kGrowthMin;
  if (least < doubled_max_) return std::clamp(2 * num_lines, least, doubled_max_);
  return std::max(num_lines + num_lines / 8, least);
}

// By how many lines a bucket grows at most, if not by an eighth.
std::uint64_t Index::growth_max() const noexcept { return std::max(doubled_max_, kGrowthMin); }

Index::Place Index::place_of(std::uint64_t key, std::uint64_t hash) const noexcept {
  for (std::uint32_t distance = 0;; ++distance) {
    std::byte* row = line_at(hash, distance)->find(key, IndexLine::tag_of(hash), arenas_);
    if (row != nullptr || !goes_on(hash, distance)) return {.row = row, .distance = distance};
  }
}

std::byte* Index::find(std::uint64_t key) const noexcept { return place_of(key, mix64(key)).row; }

void Index::mark(IndexLine& line, std::uint16_t version, std::uint32_t now) noexcept {
  const auto age = static_cast<std::uint16_t>(now - version);
  if (age < line.age(now)) line.version = version;
}

void Index::touch(std::uint64_t key, std::uint32_t version, std::uint32_t now) noexcept {
  const std::uint64_t hash = mix64(key);
  const IndexLine* line = line_at(hash, place_of(key, hash).distance);
  mark(const_cast<IndexLine&>(*line), static_cast<std::uint16_t>(version), now);
}

std::uint64_t Index::place(std::uint64_t hash, Entry entry, std::uint32_t now) noexcept {
  const std::uint32_t number = bucket_of_hash(hash);
  const Bucket& bucket = buckets_[number];
  std::uint64_t i = home_of(hash, bucket);
  for (std::uint64_t num_passed = 0;; ++num_passed, i = i + 1 < bucket.num_lines ? i + 1 : 0) {
    IndexLine& line = bucket.lines[i];
    if (const std::uint32_t free = line.match(0); free != 0) {
      const std::uint32_t slot = IndexLine::first_slot(free);
      line.tags[slot] = IndexLine::tag_of(hash);
      line.refs[slot] = entry.ref;
      mark(line, entry.version, now);
      ++num_rows_[number];
      return num_passed;
    }
    if (line.passed != kPassedMax) ++line.passed;
  }
}

void Index::insert(std::uint64_t hash, Entry entry, std::uint32_t now,
                   std::vector<Entry>& scratch) noexcept {
  const std::uint32_t number = bucket_of_hash(hash);
  Bucket& bucket = buckets_[number];
  if (place(hash, entry, now) <= passed_max(bucket.num_lines)) return;
  scratch.clear();
  entries_of(number, scratch);
  clear(number);
  bucket.factor = static_cast<std::uint32_t>(mix64(bucket.factor)) | 1;
  insert_again(scratch, now);
}

// Requires: the row is on the line.
std::uint32_t Index::slot_of(const IndexLine& line, std::uint64_t hash,
                             const std::byte* row) const noexcept {
  std::uint32_t slots = line.match(IndexLine::tag_of(hash));
  while (arenas_.row(line.refs[IndexLine::first_slot(slots)]) != row) slots &= slots - 1;
  return IndexLine::first_slot(slots);
}

Arena::Ref Index::replace(std::uint64_t key, Arena::Ref ref) noexcept {
  const std::uint64_t hash = mix64(key);
  const auto [row, distance] = place_of(key, hash);
  auto& line = const_cast<IndexLine&>(*line_at(hash, distance));
  return std::exchange(line.refs[slot_of(line, hash, row)], ref);
}

bool Index::erase(std::uint64_t key, Arena::Ref& ref) noexcept {
  const std::uint64_t hash = mix64(key);
  const auto [row, distance] = place_of(key, hash);
  if (row == nullptr) return false;
  auto& line = const_cast<IndexLine&>(*line_at(hash, distance));
  const std::uint32_t slot = slot_of(line, hash, row);
  ref = line.refs[slot];
  line.tags[slot] = 0;
  --num_rows_[bucket_of_hash(hash)];
  for (std::uint32_t i = 0; i < distance; ++i) {
    auto& before = const_cast<IndexLine&>(*line_at(hash, i));
    if (before.passed != kPassedMax) --before.passed;
  }
  return true;
}

void Index::refs_since(std::uint32_t bucket, std::uint32_t since, std::uint32_t now,
                       std::vector<Arena::Ref>& refs) const {
  const Bucket& b = buckets_[bucket];
  const bool tells = since != 0 && now - since < kVersionsTold;
  if (!tells) refs.reserve(refs.size() + num_rows_[bucket]);
  for (std::uint32_t i = 0; i < b.num_lines; ++i) {
    const IndexLine& line = b.lines[i];
    if (tells && line.age(now) >= now - since) continue;
    for (std::uint32_t used = line.used(); used != 0; used &= used - 1) {
      refs.push_back(line.refs[IndexLine::first_slot(used)]);
    }
  }
}

void Index::entries_of(std::uint32_t bucket, std::vector<Entry>& entries) const {
  const Bucket& b = buckets_[bucket];
  for (std::uint32_t i = 0; i < b.num_lines; ++i) {
    const IndexLine& line = b.lines[i];
    for (std::uint32_t used = line.used(); used != 0; used &= used - 1) {
      entries.push_back({.ref = line.refs[IndexLine::first_slot(used)], .version = line.version});
    }
  }
}

void Index::clear(std::uint32_t bucket) noexcept {
  Bucket& b = buckets_[bucket];
  std::fill_n(b.lines, b.num_lines, IndexLine{});
  num_rows_[bucket] = 0;
}

void Index::release(std::uint32_t bucket) noexcept {
  TRIREME_CHECK(num_rows_[bucket] == 0);
  lay_out(bucket, 0);
}

void Index::prepare(std::uint32_t stripe, std::size_t num_rows, std::vector<Entry>& scratch) {
  // A bucket grows when it is full, by an eighth of what is full then, or by growth_max(). So
  // however often it grows, it ends with at most so many more than are full, both rounded up.
  const std::uint64_t num_full = num_lines_of_stripe(stripe) + lines_for(num_rows);
  const std::uint64_t lines_max = num_full + num_full / 8 + (growth_max() + 2) * kBucketsPerStripe;
  if (lines_max > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kResourceExhausted,
                "Index.prepare: expected fewer than 2^32 lines in a stripe, found " +
                    std::to_string(lines_max));
  }
  const std::size_t bytes = lines_max * sizeof(IndexLine);
  if (bytes > memory_[stripe].size()) {
    memory_[stripe].resize(bytes + bytes / 8);
    lay_out(stripe * kBucketsPerStripe, buckets_[stripe * kBucketsPerStripe].num_lines);
  }
  std::size_t rows_max = 0;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    rows_max = std::max<std::size_t>(rows_max, num_rows_[stripe * kBucketsPerStripe + i]);
  }
  scratch.reserve(rows_max + num_rows);
}

Index::Size Index::size(std::uint32_t stripe) const noexcept {
  Size size{.bytes = bytes(stripe)};
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    const std::uint32_t bucket = stripe * kBucketsPerStripe + i;
    const std::uint32_t num_rows = num_rows_[bucket], all_lines = buckets_[bucket].num_lines;
    const std::uint64_t num_lines = num_rows == 0 ? 0 : grown(lines_for(num_rows) - 1);
    size.num_rows += num_rows;
    size.num_lines_left += all_lines > num_lines ? all_lines - num_lines : 0;
  }
  return size;
}

// A bucket grows when its rows need one line more than it has. So it has at most
// grown(lines_for(rows) - 1) lines, or those that it had before.
std::size_t Index::growth(const Size& size, std::size_t num_rows) const noexcept {
  if (num_rows == 0) return 0;
  const std::size_t all = size.num_rows + num_rows;
  const std::uint64_t num_lines = lines_for(all) + lines_for(all) / 8 + 1 + size.num_lines_left +
                                  growth_max() * std::min<std::size_t>(all, kBucketsPerStripe);
  const std::size_t then = round_up(num_lines * sizeof(IndexLine), kPageBytes);
  return std::max(then, size.bytes) - size.bytes;
}

// Gives a bucket more lines, if necessary, and inserts its rows again.
void Index::reserve(std::uint32_t bucket, std::size_t num_rows, std::uint32_t now,
                    std::vector<Entry>& scratch) noexcept {
  const std::uint64_t num_lines = buckets_[bucket].num_lines;
  if (lines_for(num_rows) <= num_lines) return;
  scratch.clear();
  entries_of(bucket, scratch);
  lay_out(bucket, static_cast<std::uint32_t>(std::max(lines_for(num_rows), grown(num_lines))));
  clear(bucket);
  insert_again(scratch, now);
}

void Index::insert_again(const std::vector<Entry>& entries, std::uint32_t now) noexcept {
  constexpr std::size_t kRowsAhead = 64;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    __builtin_prefetch(arenas_.row(entries[std::min(i + kRowsAhead, entries.size() - 1)].ref));
    place(mix64(key_of_row(arenas_.row(entries[i].ref))), entries[i], now);
  }
}

void Index::trim(std::uint32_t bucket, std::uint32_t now, std::vector<Entry>& scratch) {
  const std::uint32_t num_rows = num_rows_[bucket];
  const std::uint64_t num_lines = num_rows == 0 ? 0 : grown(lines_for(num_rows));
  if (num_lines * 2 > buckets_[bucket].num_lines) return;
  scratch.clear();
  scratch.reserve(num_rows);
  entries_of(bucket, scratch);
  lay_out(bucket, static_cast<std::uint32_t>(num_lines));
  clear(bucket);
  insert_again(scratch, now);
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  const std::size_t end = round_up(num_lines_max_[stripe] * sizeof(IndexLine), kPageBytes);
  num_lines_max_[stripe] = num_lines_of_stripe(stripe);
  const std::size_t kept = round_up(num_lines_max_[stripe] * sizeof(IndexLine), kPageBytes);
  give_back(memory_[stripe].data() + kept, end - kept);
}

std::size_t Index::num_lines_of_stripe(std::uint32_t stripe) const noexcept {
  std::size_t n = 0;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    n += buckets_[stripe * kBucketsPerStripe + i].num_lines;
  }
  return n;
}

// Sets the number of lines of one bucket, whose content is then undefined. Moves the buckets after
// it, and updates the pointers of all buckets of the stripe, whose memory may have moved.
void Index::lay_out(std::uint32_t bucket, std::uint32_t num_lines) noexcept {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  auto* lines = reinterpret_cast<IndexLine*>(memory_[stripe].data());
  const std::size_t all_lines = num_lines_of_stripe(stripe);
  TRIREME_CHECK((all_lines - buckets_[bucket].num_lines + num_lines) * sizeof(IndexLine) <=
                memory_[stripe].size());
  std::size_t at = 0;
  for (std::uint32_t i = stripe * kBucketsPerStripe; i < (stripe + 1) * kBucketsPerStripe; ++i) {
    Bucket& b = buckets_[i];
    if (i == bucket) {
      const std::size_t behind = all_lines - at - b.num_lines;
      if (behind > 0) {
        std::memmove(static_cast<void*>(lines + at + num_lines), lines + at + b.num_lines,
                     behind * sizeof(IndexLine));
      }
      b.num_lines = num_lines;
    }
    b.lines = b.num_lines > 0 ? lines + at : const_cast<IndexLine*>(&kEmptyLine);
    at += b.num_lines;
  }
  num_lines_max_[stripe] = std::max(num_lines_max_[stripe], at);
}

}  // namespace trireme
