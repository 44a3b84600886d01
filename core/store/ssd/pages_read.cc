// PagesRead: pages that were read, and their memory.
#include <algorithm>

#include "store/ssd/page_log.h"

namespace trireme::ssd {

// The system makes each page of new memory when it is touched first, which takes longer than to
// read into it.
PagesRead::Memory::Memory(PageLog& log, std::size_t num_bytes) : log_(&log), num_bytes_(num_bytes) {
  log.bytes_of_reads_ += num_bytes;
  {
    std::lock_guard lock(log.spare_mutex_);
    const auto enough = std::ranges::find_if(
        log.spare_, [&](const Pages& pages) { return pages.size() >= num_bytes; });
    if (enough != log.spare_.end()) {
      pages_ = std::move(*enough);
      log.num_spare_bytes_ -= pages_.size();
      log.spare_.erase(enough);
      return;
    }
  }
  try {
    pages_ = Pages(num_bytes);
  } catch (...) {
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
  log_->bytes_of_reads_ -= num_bytes_;
  std::lock_guard lock(log_->spare_mutex_);
  // Small ones make room: what is large serves any read.
  std::vector<Pages>& spare = log_->spare_;
  while (log_->num_spare_bytes_ + pages_.size() > log_->config_.spare_bytes && !spare.empty()) {
    const auto least = std::ranges::min_element(spare, {}, &Pages::size);
    if (least->size() >= pages_.size()) return;
    log_->num_spare_bytes_ -= least->size();
    spare.erase(least);
  }
  if (log_->num_spare_bytes_ + pages_.size() > log_->config_.spare_bytes) return;
  if (pages_.size() == 0) return;
  log_->num_spare_bytes_ += pages_.size();
  spare.push_back(std::move(pages_));
}

const PagesRead::Page* PagesRead::find(Position position) const noexcept {
  const auto at = std::ranges::lower_bound(positions_, position);
  if (at == positions_.end() || *at != position) return nullptr;
  return &pages_[static_cast<std::size_t>(at - positions_.begin())];
}

}  // namespace trireme::ssd
