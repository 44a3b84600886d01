#include "store/arena.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::size_t kFewBytes = std::size_t{16} << 20;
constexpr std::size_t kBoundRows = 1'000'000;
constexpr std::size_t kSmallPagesRows = 3'500'000;
constexpr std::size_t kSmallPagesBytesMax = std::size_t{512} << 20;
constexpr std::size_t kReservedBytesMin = std::size_t{64} << 20;

constexpr std::size_t kLast = std::numeric_limits<Arena::Ref>::max();

// Reserves the address space that rows can use, or as much as is available.
Pages reserve(std::size_t row_bytes) {
  std::size_t bytes = std::min(kLast * row_bytes, memory_bytes());
  bytes = round_up(std::max(bytes, kReservedBytesMin), kHugePageBytes);
  for (; bytes / 2 >= kReservedBytesMin; bytes = round_up(bytes / 2, kHugePageBytes)) {
    try {
      return Pages::reserve(bytes, kHugePageBytes);
    } catch (const Error&) {
      // Address space is limited. A smaller table is better than none; allocate() reports when it
      // is full.
    }
  }
  return Pages::reserve(bytes, kHugePageBytes);
}

}  // namespace

Arena::Arena(std::size_t row_bytes)
    : row_bytes_(row_bytes),
      pages_(reserve(row_bytes)),
      num_rows_max_(std::min(pages_.size() / row_bytes, kLast)),
      bound_bytes_(kBoundRows * row_bytes / kHugePageBytes * kHugePageBytes),
      small_pages_bytes_(
          round_up(std::min(kSmallPagesRows * row_bytes, kSmallPagesBytesMax), kHugePageBytes)) {
  TRIREME_CHECK(row_bytes % 8 == 0 && row_bytes <= kRowBytesMax);
  commit(num_rows_);
}

Arena::Reservation::Reservation(Arena& arena, std::size_t num_rows)
    : arena_(arena), num_rows_(num_rows) {
  std::lock_guard lock(arena.mutex_);
  const std::size_t wanted = arena.num_reserved_ + num_rows;
  if (wanted > arena.num_free_ && arena.limit_ != kNoLimit) arena.end_shrink(true);
  arena.commit(arena.num_rows_ + wanted - std::min(wanted, arena.num_free_));
  arena.num_reserved_ = wanted;
}

Arena::Reservation::~Reservation() {
  std::lock_guard lock(arena_.mutex_);
  arena_.num_reserved_ -= num_rows_;
}

void Arena::Reservation::take(std::span<Ref> refs) noexcept {
  std::lock_guard lock(arena_.mutex_);
  TRIREME_CHECK(refs.size() <= num_rows_);
  num_rows_ -= refs.size();
  arena_.num_reserved_ -= refs.size();
  for (Ref& ref : refs) ref = arena_.take();
  arena_.collapse();
}

Arena::Ref Arena::take() noexcept {
  if (num_free_ == 0) return static_cast<Ref>(num_rows_++);
  const Ref ref = free_;
  std::memcpy(&free_, row(ref), sizeof free_);
  --num_free_;
  return ref;
}

// Turns ranges of full small pages into huge pages.
void Arena::collapse() noexcept {
  const std::size_t full = std::min(num_rows_ * row_bytes_, small_pages_bytes_);
  for (; collapsed_bytes_ + kHugePageBytes <= full; collapsed_bytes_ += kHugePageBytes) {
    if (is_huge(collapsed_bytes_)) continue;
    advise(pages_.data() + collapsed_bytes_, kHugePageBytes, PageAdvice::kMakeHuge);
  }
}

void Arena::put(Ref ref) noexcept {
  std::memcpy(row(ref), &free_, sizeof free_);
  free_ = ref;
  ++num_free_;
}

void Arena::free(std::span<const Ref> refs) noexcept {
  std::lock_guard lock(mutex_);
  for (const Ref ref : refs) {
    if (ref < limit_) {
      put(ref);
    } else {
      left_.push_back(ref);  // there is room for all of them
      if (left_.size() == num_rows_ - limit_) end_shrink(false);
    }
  }
}

bool Arena::shrink(std::size_t num_rows) {
  std::lock_guard lock(mutex_);
  if (limit_ != kNoLimit || num_rows == 0 || num_rows >= num_rows_) return false;
  left_.reserve(num_rows_ - num_rows);
  limit_ = num_rows;
  Ref ref = free_;
  for (std::size_t n = std::exchange(num_free_, 0); n > 0; --n) {
    Ref next;
    std::memcpy(&next, row(ref), sizeof next);
    ref >= num_rows ? left_.push_back(ref) : put(ref);
    ref = next;
  }
  if (num_free_ < num_reserved_) {
    end_shrink(true);
    return false;
  }
  if (left_.size() == num_rows_ - num_rows) end_shrink(false);
  return true;
}

void Arena::end_shrink(bool is_abandoned) noexcept {
  const std::size_t limit = limit_.exchange(kNoLimit);
  if (is_abandoned) {
    for (const Ref ref : left_) put(ref);
  } else {
    const std::size_t end = round_up(num_rows_ * row_bytes_, kPageBytes);
    const std::size_t kept = round_up(limit * row_bytes_, kPageBytes);
    give_back(pages_.data() + kept, end - kept);
    num_rows_ = limit;
    collapsed_bytes_ = std::min(collapsed_bytes_, kept / kHugePageBytes * kHugePageBytes);
  }
  left_.clear();
  left_.shrink_to_fit();
}

Arena::Use Arena::use() const {
  std::lock_guard lock(mutex_);
  const std::size_t limit = limit_;
  const std::size_t num_leaving = num_rows_ - std::min(num_rows_, limit) - left_.size();
  return {.num_rows = num_rows_,
          .num_bytes = bytes_of(num_rows_),
          .num_free = num_free_,
          .num_leaving = num_leaving,
          .num_kept = std::min(num_rows_, limit)};
}

std::size_t Arena::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_of(num_rows_);
}

std::size_t Arena::growth(std::size_t num_rows) const {
  std::lock_guard lock(mutex_);
  return bytes_of(num_rows_ + num_rows) - bytes_of(num_rows_);
}

std::size_t Arena::bytes_of(std::size_t num_rows) const noexcept {
  const std::size_t used = num_rows * row_bytes_;
  return round_up(
      used, is_huge((used - 1) / kHugePageBytes * kHugePageBytes) ? kHugePageBytes : kPageBytes);
}

std::size_t Arena::num_rows_ready() const {
  std::lock_guard lock(mutex_);
  return committed_bytes_ / row_bytes_;
}

void Arena::expect(std::size_t num_rows) noexcept {
  std::lock_guard lock(mutex_);
  const std::size_t more = num_rows - std::min(num_rows, num_free_);
  const std::size_t until = std::min(num_rows_ + more, num_rows_max_) * row_bytes_;
  if (committed_bytes_ > expected_until_) expected_from_ = committed_bytes_;
  // The last one may not become full.
  expected_until_ = std::max(expected_until_, until / kHugePageBytes * kHugePageBytes);
}

// Whether the 2 MiB that begin at `offset` are, or will be, taken as a huge page.
bool Arena::is_huge(std::size_t offset) const noexcept {
  const bool is_expected = expected_from_ <= offset && offset < expected_until_;
  const bool is_full_in_time = kFewBytes <= offset && offset < bound_bytes_;
  return is_expected || is_full_in_time || offset >= small_pages_bytes_;
}

// Makes the first `num_rows` rows writable, 2 MiB at a time.
void Arena::commit(std::size_t num_rows) {
  if (num_rows > num_rows_max_) {
    throw Error(ErrorCode::kResourceExhausted,
                "Arena: expected at most " + std::to_string(num_rows_max_) + " rows of " +
                    std::to_string(row_bytes_) + " bytes, found " + std::to_string(num_rows));
  }
  while (committed_bytes_ < num_rows * row_bytes_) {
    std::byte* next = pages_.data() + committed_bytes_;
    make_writable(next, kHugePageBytes);
    advise(next, kHugePageBytes,
           is_huge(committed_bytes_) ? PageAdvice::kHuge : PageAdvice::kSmall);
    committed_bytes_ += kHugePageBytes;
  }
}

}  // namespace trireme
