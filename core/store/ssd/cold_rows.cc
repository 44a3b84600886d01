#include "store/ssd/cold_rows.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <string>

#include "base/error.h"

namespace trireme::ssd {

ColdRows::ColdRows(PageLog& log, std::span<const RowLayout> layouts, std::uint32_t table)
    : log_(log), layouts_(layouts), table_(table) {
  std::size_t num_rows_max = 0;
  for (int i = 0; i < static_cast<int>(layouts.size()); ++i) {
    num_rows_max = std::max(num_rows_max, rows_per_page(i));
  }
  TRIREME_CHECK(num_rows_max > 0 && num_rows_max <= kNumPageRowsMax);
  words_per_page_ = (num_rows_max + 31) / 32;
}

std::size_t ColdRows::rows_per_page(int row_class) const noexcept {
  return rows_of_page(log_.page_bytes(), layouts_[static_cast<std::size_t>(row_class)].row_bytes());
}

// The bytes of a page, if they were read; else null, and its position is wanted.
const std::byte* ColdRows::bytes_of(const Bucket& bucket, PageNumber number,
                                    std::uint32_t bucket_number, Reads reads,
                                    std::vector<Position>& wanted) const {
  const Position position = bucket.pages[number].position;
  for (const PagesRead& read : reads) {
    const PagesRead::Page* page = read.find(position);
    // Its segment may have been another when it was read.
    if (page == nullptr || page->generation != log_.generation(position)) continue;
    if (page->error != 0) log_.fail(position, *page, bucket_number);
    const PageHeader header = header_of(page->bytes);
    if (header.table != table_ || header.bucket != bucket_number || header.number != number) {
      PagesRead::Page wrong = *page;
      wrong.error = EBADMSG;
      log_.fail(position, wrong, bucket_number);
    }
    return page->bytes;
  }
  wanted.push_back(position);
  return nullptr;
}

ColdRows::Found ColdRows::find(std::uint64_t key, Reads reads, Place& place,
                               std::vector<Position>& wanted) const {
  const std::uint64_t hash = mix64(key);
  const std::uint32_t number = bucket_of_hash(hash);
  const Bucket& bucket = buckets_[number];
  const std::size_t num_wanted = wanted.size();
  bool is_here = false;
  std::exception_ptr failed;  // by a page that may be another key's
  bucket.find(hash, [&](PageNumber page) {
    if (is_here) return;
    const std::byte* bytes = nullptr;
    try {
      bytes = bytes_of(bucket, page, number, reads, wanted);
    } catch (const Error&) {
      failed = std::current_exception();
    }
    if (bytes == nullptr) return;
    const PageHeader header = header_of(bytes);
    const std::uint16_t slot = slot_of(header, bytes, hash);
    is_here = slot < header.num_rows && is_left(bucket, page, slot);
    if (is_here) place = place_of(header, bytes, slot);
  });
  if (is_here) {
    wanted.resize(num_wanted);
    return Found::kHere;
  }
  if (wanted.size() > num_wanted) return Found::kUnread;
  if (failed != nullptr) std::rethrow_exception(failed);
  return Found::kAbsent;
}

bool ColdRows::find_at(Position position, const PagesRead& read, std::uint64_t key,
                       Place& place) const {
  const PagesRead::Page* page = read.find(position);
  if (page == nullptr || page->bytes == nullptr) return false;
  if (page->generation != log_.generation(position)) return false;
  const std::uint64_t hash = mix64(key);
  const PageHeader header = header_of(page->bytes);
  if (header.bucket != bucket_of_hash(hash) || !is_current(header, position)) return false;
  const std::uint16_t slot = slot_of(header, page->bytes, hash);
  if (slot >= header.num_rows) return false;
  if (!is_left(buckets_[header.bucket], header.number, slot)) return false;
  place = place_of(header, page->bytes, slot);
  return true;
}

void ColdRows::prefetch(std::span<const std::uint64_t> keys) const noexcept {
  for (const std::uint64_t key : keys) {
    const std::uint64_t hash = mix64(key);
    const Bucket& bucket = buckets_[bucket_of_hash(hash)];
    bucket.index.prefetch_cell(hash);
    bucket.recent.prefetch_cell(hash);
  }
  for (const std::uint64_t key : keys) {
    const std::uint64_t hash = mix64(key);
    const Bucket& bucket = buckets_[bucket_of_hash(hash)];
    bucket.index.prefetch_entries(hash);
    bucket.recent.prefetch_entries(hash);
  }
}

// The slot of a key with this hash, or the number of rows. mix64 is a bijection.
std::uint16_t ColdRows::slot_of(const PageHeader& header, const std::byte* page,
                                std::uint64_t hash) noexcept {
  std::uint16_t begin = 0, end = header.num_rows;
  while (begin < end) {
    const auto middle = static_cast<std::uint16_t>((begin + end) / 2);
    const std::uint64_t other = mix64(key_of_row(row_of_page(page, header.row_bytes, middle)));
    if (other == hash) return middle;
    other < hash ? begin = static_cast<std::uint16_t>(middle + 1) : end = middle;
  }
  return header.num_rows;
}

// The row is not in its page any more.
void ColdRows::drop(Bucket& bucket, const Place& place) noexcept {
  std::uint32_t& word = bucket.left[place.page * words_per_page_ + place.slot / 32];
  const std::uint32_t bit = 1U << place.slot % 32;
  TRIREME_CHECK((word & bit) != 0);
  word &= ~bit;
  log_.forget(bucket.pages[place.page].position, 1);
  if (num_left(bucket, place.page) == 0) ++bucket.num_free;
}

void ColdRows::take(const Place& place) noexcept {
  Bucket& bucket = buckets_[place.bucket];
  const std::uint64_t hash = mix64(key_of_row(place.row));
  TRIREME_CHECK(bucket.recent.erase(hash, place.page) || bucket.index.erase(hash, place.page));
  drop(bucket, place);
}

void ColdRows::clear(std::uint32_t bucket) noexcept {
  Bucket& own = buckets_[bucket];
  for (std::size_t i = 0; i < own.pages.size(); ++i) {
    if (const std::size_t n = num_left(own, i); n > 0) log_.forget(own.pages[i].position, n);
  }
  own = Bucket{};
}

ColdRows::Pages ColdRows::prepare(std::uint32_t bucket, const Rows& added) const {
  const auto& [rows, classes, uses, time, moved] = added;
  const Bucket& own = buckets_[bucket];
  Pages pages;
  for (std::size_t i = 0; i < rows.size();) {
    const std::size_t end = i + rows_per_page(classes[i]);
    const std::uint8_t row_class = classes[i];
    while (i < std::min(end, rows.size()) && classes[i] == row_class) ++i;
    pages.ends_.push_back(i);
  }
  for (std::size_t i = 0; own.num_free > 0 && i < own.pages.size(); ++i) {
    if (pages.numbers_.size() == pages.size()) break;
    if (num_left(own, i) == 0) pages.numbers_.push_back(static_cast<PageNumber>(i));
  }
  const std::size_t num_new = pages.size() - pages.numbers_.size();
  const std::size_t num_pages = own.pages.size() + num_new;
  if (num_pages > ColdIndex::kNumPagesMax) {
    throw Error(ErrorCode::kResourceExhausted, "ColdRows: expected at most " +
                                                   std::to_string(ColdIndex::kNumPagesMax) +
                                                   " pages of bucket " + std::to_string(bucket) +
                                                   ", found " + std::to_string(num_pages));
  }
  if (num_pages > own.pages.capacity()) {  // by little: memory that is not used costs rows
    pages.pages_.reserve(num_pages + num_pages / 16);
    pages.left_.reserve(pages.pages_.capacity() * words_per_page_);
  }
  for (std::size_t i = 0; i < num_new; ++i) {
    pages.numbers_.push_back(static_cast<PageNumber>(own.pages.size() + i));
  }
  std::vector<ColdIndex::Entry> entries(rows.size());
  for (std::size_t page = 0, i = 0; page < pages.size(); ++page) {
    for (; i < pages.ends_[page]; ++i) {
      entries[i] = {.hash = mix64(key_of_row(rows[i])), .page = pages.numbers_[page]};
    }
  }
  const std::size_t num_recent = own.recent.num_entries() + entries.size();
  pages.has_all_ = num_recent * kRecentShare >= own.num_rows() + entries.size();
  if (pages.has_all_) {
    own.recent.append_to(entries);
    pages.index_ = own.index.with(num_pages, entries);
  } else {
    pages.index_ = own.recent.with(num_pages, entries);
  }
  const std::size_t then =
      pages.index_.bytes() + (pages.has_all_ ? 0 : own.index.bytes()) +
      std::max(own.pages.capacity(), pages.pages_.capacity()) * sizeof(Page) +
      std::max(own.left.capacity(), pages.left_.capacity()) * sizeof own.left[0];
  pages.growth_ = then - std::min(then, bytes(bucket));
  return pages;
}

void ColdRows::put(std::uint32_t bucket, const Rows& added, Pages&& pages, PageLog::Room& room,
                   std::span<std::byte> scratch) noexcept {
  const auto& [rows, classes, uses, time, moved] = added;
  Bucket& own = buckets_[bucket];
  if (pages.pages_.capacity() > own.pages.capacity()) {
    pages.pages_.assign(own.pages.begin(), own.pages.end());
    pages.left_.assign(own.left.begin(), own.left.end());
    own.pages = std::move(pages.pages_);
    own.left = std::move(pages.left_);
  }
  for (std::size_t p = 0, i = 0; p < pages.size(); ++p) {
    const std::size_t begin = i;
    const RowLayout& layout = layouts_[classes[begin]];
    Page page;
    for (; i < pages.ends_[p]; ++i) {
      std::memcpy(scratch.data() + kPageHeaderBytes + (i - begin) * layout.row_bytes(), rows[i],
                  layout.row_bytes());
      page.version = std::max(page.version, layout.stamp(rows[i]).version);
    }
    const PageNumber number = pages.numbers_[p];
    const std::size_t num_rows = i - begin;
    std::memcpy(scratch.data() + uses_offset(layout.row_bytes(), num_rows), &uses[begin], num_rows);
    seal(scratch, {.checksum = 0,
                   .table = table_,
                   .bucket = static_cast<std::uint16_t>(bucket),
                   .number = number,
                   .num_rows = static_cast<std::uint16_t>(num_rows),
                   .row_class = classes[begin],
                   .format = 0,
                   .row_bytes = static_cast<std::uint32_t>(layout.row_bytes()),
                   .time = time});
    page.position = log_.append(room, scratch);
    if (number < own.pages.size()) {
      --own.num_free;
    } else {
      own.pages.emplace_back();
      own.left.resize(own.pages.size() * words_per_page_);
    }
    own.pages[number] = page;
    for (std::size_t word = 0; word < words_per_page_; ++word) {
      const std::size_t first = word * 32;
      const std::size_t n = std::clamp(num_rows, first, first + 32) - first;
      own.left[number * words_per_page_ + word] =
          static_cast<std::uint32_t>((std::uint64_t{1} << n) - 1);
    }
  }
  if (pages.has_all_) {
    own.index = std::move(pages.index_);
    own.recent = ColdIndex();
  } else {
    own.recent = std::move(pages.index_);
  }
  for (const Place& place : moved) take(place);
}

bool ColdRows::is_current(const PageHeader& header, Position position) const noexcept {
  if (header.table != table_ || header.bucket >= kNumBuckets) return false;
  const Bucket& bucket = buckets_[header.bucket];
  return header.number < bucket.pages.size() && num_left(bucket, header.number) > 0 &&
         bucket.pages[header.number].position == position;
}

std::size_t ColdRows::bytes(std::uint32_t bucket) const noexcept {
  const Bucket& own = buckets_[bucket];
  return own.index.bytes() + own.recent.bytes() + own.pages.capacity() * sizeof(Page) +
         own.left.capacity() * sizeof own.left[0];
}

void ColdRows::save(std::uint32_t bucket, ByteWriter& bytes) const {
  const Bucket& own = buckets_[bucket];
  bytes.value(static_cast<std::uint32_t>(own.pages.size()));
  bytes.value(static_cast<std::uint32_t>(words_per_page_));
  for (const Page& page : own.pages) {
    bytes.value(page.position);
    bytes.value(page.version);
  }
  bytes.array(std::span(own.left));
  own.index.save(bytes);
  own.recent.save(bytes);
}

ColdRows::Saved ColdRows::parse(std::uint32_t bucket, ByteReader& bytes) const {
  const auto check = [&](bool is_right) {
    if (is_right) return;
    throw Error(ErrorCode::kCorruption, "ColdRows: expected the pages of bucket " +
                                            std::to_string(bucket) +
                                            ", found what this log of pages has not");
  };
  Saved result;
  Bucket& loaded = result.bucket_;
  const auto num_pages = bytes.value<std::uint32_t>();
  check(num_pages <= ColdIndex::kNumPagesMax && bytes.value<std::uint32_t>() == words_per_page_);
  loaded.pages.resize(num_pages);
  for (Page& page : loaded.pages) {
    page.position = bytes.value<Position>();
    page.version = bytes.value<std::uint32_t>();
  }
  loaded.left.resize(num_pages * words_per_page_);
  bytes.array(std::span(loaded.left));
  std::size_t num_rows = 0;
  for (std::size_t i = 0; i < num_pages; ++i) {
    const std::size_t n = num_left(loaded, i);
    num_rows += n;
    loaded.num_free += n == 0;
    if (n == 0) continue;
    check(log_.has(loaded.pages[i].position));
    result.version_ = std::max(result.version_, loaded.pages[i].version);
  }
  loaded.index = ColdIndex::load(bytes, num_pages);
  loaded.recent = ColdIndex::load(bytes, num_pages);
  check(loaded.num_rows() == num_rows);
  return result;
}

void ColdRows::restore(std::uint32_t bucket, Saved&& saved) noexcept {
  clear(bucket);
  const Bucket& own = saved.bucket_;
  for (std::size_t i = 0; i < own.pages.size(); ++i) {
    if (const std::size_t n = num_left(own, i); n > 0) log_.remember(own.pages[i].position, n);
  }
  buckets_[bucket] = std::move(saved.bucket_);
}

}  // namespace trireme::ssd
