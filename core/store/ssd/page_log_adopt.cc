// PageLog: going on with the segments of another log.
#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/error.h"
#include "store/ssd/page_log.h"
#include "store/ssd/segment.h"

namespace trireme::ssd {

PageLog::Hold::Hold(PageLog& log) noexcept : log_(log) {
  std::lock_guard lock(log_.mutex_);
  ++log_.num_holds_;
}

PageLog::Hold::~Hold() {
  std::lock_guard lock(log_.mutex_);
  --log_.num_holds_;
  for (std::shared_ptr<File>& file : log_.files_) {
    if (file != nullptr && log_.is_empty(*file)) log_.empty_.push_back(std::move(file));
  }
}

std::vector<PageLog::SegmentFile> PageLog::segments() const {
  std::vector<SegmentFile> segments;
  std::lock_guard lock(mutex_);
  TRIREME_CHECK(num_holds_ > 0);
  for (const std::shared_ptr<File>& file : files_) {
    if (file == nullptr || file->num_written == 0) continue;
    segments.push_back({.number = file->number,
                        .device = file->device_number,
                        .name = file->name,
                        .num_pages = file->num_written,
                        .num_rows_then = file->num_rows_then});
  }
  return segments;
}

void PageLog::adopt(const SegmentFile& segment) {
  const auto write = lock_writers();
  std::uint64_t generation = 0;
  const char* const end = segment.name.data() + segment.name.size();
  const auto [rest, error] = std::from_chars(segment.name.data(), end, generation, 16);
  const bool is_name = error == std::errc() && std::string_view(rest, end) == kSegmentSuffix;
  bool is_free;
  {
    std::lock_guard lock(mutex_);
    is_free = (segment.number >= files_.size() || files_[segment.number] == nullptr) &&
              std::ranges::none_of(files_, [&](const auto& file) {
                return file != nullptr && file->generation == generation;
              });
  }
  const bool fits = segment.device < devices_.size() && segment.num_pages > 0 &&
                    segment.num_pages <= config_.segment_pages &&
                    segment.number < (std::uint64_t{1} << 32) / config_.segment_pages;
  if (!is_name || !is_free || !fits) {
    throw Error(ErrorCode::kBadRequest,
                "PageLog.adopt: expected a free number and name, one of " +
                    std::to_string(devices_.size()) + " devices and 1 to " +
                    std::to_string(config_.segment_pages) + " pages, found segment " +
                    std::to_string(segment.number) + " (" + segment.name + ") on device " +
                    std::to_string(segment.device) + " with " + std::to_string(segment.num_pages));
  }
  const std::shared_ptr<Device>& device = devices_[segment.device];
  auto file = std::make_shared<File>(device, device->open(segment.name), segment.name, generation);
  const std::uint64_t num_bytes = std::uint64_t{segment.num_pages} * config_.page_bytes;
  if (const std::uint64_t size = device->size(file->id); size < num_bytes) {
    throw Error(ErrorCode::kCorruption, "PageLog: expected " + device->path_of(segment.name) +
                                            " to have " + std::to_string(num_bytes) +
                                            " bytes, found " + std::to_string(size));
  }
  file->number = segment.number;
  file->device_number = segment.device;
  file->capacity = file->num_pages = file->num_written = segment.num_pages;
  file->num_rows_then = segment.num_rows_then;
  const std::uint64_t all_bytes = std::uint64_t{config_.segment_pages} * config_.page_bytes;
  const bool has_room =
      segment.num_pages < config_.segment_pages && device->claim(file->id, all_bytes);
  std::lock_guard lock(mutex_);
  if (files_.size() <= segment.number) files_.resize(segment.number + 1);
  empty_.reserve(empty_.size() + files_.size() + 1);
  generation_ = std::max(generation_, generation);
  next_device_ = segment.device + 1;
  if (has_room) append_to(*file);
  files_[segment.number] = std::move(file);
}

// Goes on in an adopted segment, behind its pages, unless the log has begun elsewhere. What is
// there, a log that has ended wrote, and no snapshot knows it. Of several it is the one with most
// room, for each takes a buffer of its own. Requires: mutex_.
void PageLog::append_to(File& file) {
  if (num_begun_ > 0 || num_reserved_ > 0) return;
  if (open_.empty()) {
    open_.push_back(file.number);
  } else {
    File& other = *files_[open_.front()];
    if (open_.size() > 1 || other.num_pages <= file.num_pages) return;
    other.capacity = other.num_pages;
    open_.front() = file.number;
  }
  file.capacity = config_.segment_pages;
}

bool PageLog::has(Position position) const noexcept {
  const std::size_t number = position / config_.segment_pages;
  std::lock_guard lock(mutex_);
  return number < files_.size() && files_[number] != nullptr &&
         position % config_.segment_pages < files_[number]->num_written;
}

void PageLog::remember(Position position, std::size_t num_rows) noexcept {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<File>& file = files_[position / config_.segment_pages];
  TRIREME_CHECK(file != nullptr);
  file->num_rows += num_rows;
}

}  // namespace trireme::ssd
