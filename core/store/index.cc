#include "store/index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::uint8_t kPassedMax = 255;

}  // namespace

std::byte* StripeIndex::find(std::uint64_t key, const Arena& arena) const noexcept {
  const std::uint64_t hash = mix64(key);
  const std::uint32_t num_lines = std::max(1U, buckets_[bucket_in_stripe(hash)].num_lines);
  for (std::uint32_t distance = 0; distance < num_lines; ++distance) {
    const IndexLine* line = line_at(hash, distance);
    for (std::uint32_t rest = line->match(tag_of(hash)); rest != 0; rest &= rest - 1) {
      std::byte* row = arena.row(line->refs[std::countr_zero(rest)]);
      if (key_of_row(row) == key) return row;
    }
    if (line->passed == 0) break;
  }
  return nullptr;
}

void StripeIndex::insert(std::uint64_t hash, Arena::Ref ref) noexcept {
  for (std::uint32_t distance = 0;; ++distance) {
    auto* line = const_cast<IndexLine*>(line_at(hash, distance));
    if (const std::uint32_t free = line->match(0); free != 0) {
      const int slot = std::countr_zero(free);
      line->tags[slot] = tag_of(hash);
      line->refs[slot] = ref;
      ++buckets_[bucket_in_stripe(hash)].num_rows;
      return;
    }
    line->passed = static_cast<std::uint8_t>(line->passed + (line->passed != kPassedMax));
  }
}

bool StripeIndex::erase(std::uint64_t key, const Arena& arena, Arena::Ref& ref) noexcept {
  const std::uint64_t hash = mix64(key);
  Bucket& bucket = buckets_[bucket_in_stripe(hash)];
  for (std::uint32_t distance = 0; distance < bucket.num_lines; ++distance) {
    auto* line = const_cast<IndexLine*>(line_at(hash, distance));
    for (std::uint32_t rest = line->match(tag_of(hash)); rest != 0; rest &= rest - 1) {
      const int slot = std::countr_zero(rest);
      if (key_of_row(arena.row(line->refs[slot])) != key) continue;
      ref = line->refs[slot];
      line->tags[slot] = 0;
      --bucket.num_rows;
      for (std::uint32_t passed = 0; passed < distance; ++passed) {
        auto* before = const_cast<IndexLine*>(line_at(hash, passed));
        before->passed = static_cast<std::uint8_t>(before->passed - (before->passed != kPassedMax));
      }
      return true;
    }
    if (line->passed == 0) break;
  }
  return false;
}

void StripeIndex::refs_of(std::uint32_t bucket, std::vector<Arena::Ref>& refs) const {
  const Bucket& b = buckets_[bucket];
  refs.reserve(refs.size() + b.num_rows);
  for (std::uint32_t i = 0; i < b.num_lines; ++i) {
    const IndexLine& line = lines()[b.first_line + i];
    for (std::uint32_t slot = 0; slot < IndexLine::kSlots; ++slot) {
      if (line.tags[slot] != 0) refs.push_back(line.refs[slot]);
    }
  }
}

void StripeIndex::clear(std::uint32_t bucket) noexcept {
  Bucket& b = buckets_[bucket];
  std::fill_n(lines() + b.first_line, b.num_lines, IndexLine{});
  b.num_rows = 0;
}

void StripeIndex::release(std::uint32_t bucket) noexcept {
  TRIREME_CHECK(buckets_[bucket].num_rows == 0);
  make_room(bucket, 0);
  num_lines_ = buckets_.back().first_line + buckets_.back().num_lines;
}

std::size_t StripeIndex::num_rows() const noexcept {
  std::size_t n = 0;
  for (const Bucket& bucket : buckets_) n += bucket.num_rows;
  return n;
}

void StripeIndex::reserve(std::uint32_t bucket, std::size_t num_rows, const Arena& arena) {
  const std::uint64_t needed = lines_for(num_rows);
  const std::uint64_t num_lines = buckets_[bucket].num_lines;
  if (needed <= num_lines) return;
  const std::uint64_t grown = std::max(needed, num_lines + num_lines / 10);
  if (num_lines_ - num_lines + grown > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kResourceExhausted,
                "StripeIndex.reserve: expected at most 2^32 lines, found " + std::to_string(grown));
  }
  resize(bucket, static_cast<std::uint32_t>(grown), arena);
}

// Gives a bucket more lines and enters its rows anew.
void StripeIndex::resize(std::uint32_t bucket, std::uint32_t num_lines, const Arena& arena) {
  std::vector<Arena::Ref> refs;
  refs_of(bucket, refs);
  const std::size_t total = num_lines_ - buckets_[bucket].num_lines + num_lines;
  const std::size_t bytes = total * sizeof(IndexLine);
  if (bytes > memory_.size()) memory_.resize(bytes + bytes / 64);
  make_room(bucket, num_lines);
  num_lines_ = static_cast<std::uint32_t>(total);
  clear(bucket);
  constexpr std::size_t kRowsAhead = 16;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    __builtin_prefetch(arena.row(refs[std::min(i + kRowsAhead, refs.size() - 1)]));
    insert(mix64(key_of_row(arena.row(refs[i]))), refs[i]);
  }
}

// Moves the buckets behind this one so that it has `num_lines` lines, whose content is undefined.
void StripeIndex::make_room(std::uint32_t bucket, std::uint32_t num_lines) noexcept {
  Bucket& b = buckets_[bucket];
  const std::uint32_t old_end = b.first_line + b.num_lines;
  const std::uint32_t new_end = b.first_line + num_lines;
  std::memmove(static_cast<void*>(lines() + new_end), lines() + old_end,
               (num_lines_ - old_end) * sizeof(IndexLine));
  b.num_lines = num_lines;
  for (std::uint32_t i = bucket + 1; i < kBucketsPerStripe; ++i) {
    buckets_[i].first_line = buckets_[i].first_line - old_end + new_end;
  }
}

}  // namespace trireme
