// PagesRead: pages that were read, and their memory.
#include <algorithm>

#include "store/ssd/page_log.h"

namespace trireme::ssd {

// The system makes each page of new memory when it is touched first, which takes longer than to
// read into it. So reads that are not long all take as much, and pass it on.
PagesRead::Memory::Memory(PageLog& log, std::size_t num_bytes) : log_(&log), num_bytes_(num_bytes) {
  std::unique_lock lock(log.spare_mutex_);
  log.bytes_of_reads_ += num_bytes;
  if (num_bytes == log.spare_unit() && !log.spare_.empty()) {
    pages_ = std::move(log.spare_.back());
    log.spare_.pop_back();
    return;
  }
  while (!log.spare_.empty() && !log.has_spare_room()) log.spare_.pop_back();
  lock.unlock();
  try {
    pages_ = Pages(num_bytes);
  } catch (...) {
    lock.lock();
    log.bytes_of_reads_ -= num_bytes;
    throw;
  }
}

PagesRead::Memory& PagesRead::Memory::operator=(Memory&& other) noexcept {
  std::swap(log_, other.log_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(pages_, other.pages_);
  return *this;
}

PagesRead::Memory::~Memory() {
  if (log_ == nullptr) return;
  std::lock_guard lock(log_->spare_mutex_);
  log_->bytes_of_reads_ -= num_bytes_;
  if (num_bytes_ != log_->spare_unit() || pages_.size() == 0) return;
  log_->spare_.push_back(std::move(pages_));
  if (!log_->has_spare_room()) log_->spare_.pop_back();
}

// A read of a few pages takes no more than it needs.
std::size_t PageLog::read_bytes(std::size_t num_pages) const noexcept {
  const std::size_t num_bytes = num_pages * config_.page_bytes;
  return spare_unit() / 2 < num_bytes && num_bytes < spare_unit() ? spare_unit() : num_bytes;
}

// Whether what is spare, and reads under way, take no more than reads may at any time.
// Requires: spare_mutex_.
bool PageLog::has_spare_room() const noexcept {
  return bytes_of_reads_ + spare_.size() * spare_unit() <= config_.spare_bytes;
}

const PagesRead::Page* PagesRead::find(Position position) const noexcept {
  const auto at = std::ranges::lower_bound(positions_, position);
  if (at == positions_.end() || *at != position) return nullptr;
  return &pages_[static_cast<std::size_t>(at - positions_.begin())];
}

}  // namespace trireme::ssd
