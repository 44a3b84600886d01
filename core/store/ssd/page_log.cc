#include "store/ssd/page_log.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "base/error.h"
#include "store/ssd/reading.h"

namespace trireme::ssd {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLastWait{1000};  // for transfers in flight, when a log ends

std::string text_of(int error) { return std::generic_category().message(error); }

}  // namespace

PageLog::PageLog(std::vector<std::shared_ptr<Device>> devices, const PageLogConfig& config)
    : devices_(std::move(devices)),
      config_(config),
      memory_(config.num_buffers * config.buffer_pages * config.page_bytes) {
  const bool fits = config.page_bytes % kBlockBytes == 0 && config.page_bytes > 0 &&
                    config.buffer_pages > 0 && config.num_buffers >= 2 && config.read_depth > 0 &&
                    config.segment_pages >= config.buffer_pages &&
                    config.segment_pages <= (std::size_t{1} << 24);
  if (devices_.empty() || !fits) {
    throw Error(ErrorCode::kBadRequest,
                "PageLog: expected a device, pages of whole blocks, and segments of at least a "
                "buffer, found " +
                    std::to_string(devices_.size()) + " devices, pages of " +
                    std::to_string(config.page_bytes) + " bytes, buffers of " +
                    std::to_string(config.buffer_pages) + " and segments of " +
                    std::to_string(config.segment_pages) + " pages");
  }
  for (const auto& device : devices_) {
    for (const std::string& name : device->names()) {
      if (name.ends_with(kSegmentSuffix)) device->remove(name);
    }
    writers_.push_back(device->make_queue(config.num_buffers));
  }
  is_late_.resize(devices_.size());
  fails_.resize(devices_.size());
  readable_.resize(devices_.size());
  const std::size_t buffer_bytes = config.buffer_pages * config.page_bytes;
  for (std::size_t i = 0; i < config.num_buffers; ++i) {
    free_buffers_.push_back(memory_.data() + i * buffer_bytes);
  }
}

PageLog::~PageLog() {
  readers_.clear();
  end_transfers();
  std::vector<std::shared_ptr<File>> files = files_;
  files.insert(files.end(), empty_.begin(), empty_.end());
  for (const std::shared_ptr<File>& file : files) {
    try {
      if (file != nullptr) file->device->remove(file->name);
    } catch (const Error&) {
      // The next log on this device removes it.
    }
  }
}

// Waits for the transfers in flight, for a while. What those need that a device does not end is
// never freed: the device may yet write into it.
void PageLog::end_transfers() noexcept {
  const auto deadline = Clock::now() + std::min(config_.timeout, kLastWait);
  const auto left = [&] {
    return std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), milliseconds{0});
  };
  std::size_t num_hung = 0;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    bool has_ended = drain(*writers_[i], left());
    for (Transfers& reading : late_) {
      reading.reader->drain(left());
      has_ended = has_ended && !reading.reader->is_busy(i);
    }
    if (has_ended) continue;
    ++num_hung;
    std::fprintf(stderr, "trireme: the disk of %s does not end its transfers: memory stays taken\n",
                 devices_[i]->path_of("").c_str());
  }
  if (num_hung == 0) return;
  struct Kept {
    std::list<Transfers> late;
    std::vector<std::unique_ptr<Queue>> writers;
    std::deque<Buffer> buffers;
    Pages memory;
  };
  static std::mutex mutex;
  static auto& kept = *new std::list<Kept>;  // not freed when the process ends either
  std::lock_guard lock(mutex);
  kept.push_back({std::move(late_), std::move(writers_), std::move(buffers_), std::move(memory_)});
}

PageLog::Room::~Room() {
  if (left_ == 0) return;
  std::lock_guard lock(log_.mutex_);
  log_.num_reserved_ -= left_;
  log_.changed_.notify_all();
}

// Pages that fit into the open segments.
std::size_t PageLog::pages_left() const noexcept {
  std::size_t n = 0;
  for (const std::uint32_t number : open_) n += config_.segment_pages - files_[number]->num_pages;
  return n;
}

// Pages that can be appended now: a buffer ends with its segment.
std::size_t PageLog::buffer_room() const noexcept {
  std::size_t free = free_buffers_.size();
  std::size_t n = 0;
  bool is_first = true;
  for (const std::uint32_t number : open_) {
    std::size_t left = config_.segment_pages - files_[number]->num_pages;
    if (is_first && !buffers_.empty() && buffers_.back().state == Buffer::State::kFilling) {
      const std::size_t here = buffers_.back().capacity - buffers_.back().num_pages;
      n += here;
      left -= here;
    }
    is_first = false;
    for (; left > 0 && free > 0; --free) {
      const std::size_t here = std::min(left, config_.buffer_pages);
      n += here;
      left -= here;
    }
  }
  return n;
}

PageLog::Room PageLog::reserve(std::size_t num_pages) {
  TRIREME_CHECK(num_pages * 2 <= config_.num_buffers * config_.buffer_pages);
  remove_empty();
  free_late();
  for (;;) {
    bool lacks_segment;
    {
      std::unique_lock lock(mutex_);
      leave_failed();
      const auto has_room = [&] { return buffer_room() >= num_reserved_ + num_pages; };
      const auto can_go_on = [&] {
        return has_room() || pages_left() < num_reserved_ + num_pages ||
               (!buffers_.empty() && buffers_.front().state != Buffer::State::kFilling);
      };
      if (!changed_.wait_for(lock, config_.timeout, can_go_on)) {  // others hold what is left
        throw Error(ErrorCode::kDeadlineExceeded, "PageLog.reserve: expected room for " +
                                                      std::to_string(num_pages) + " pages within " +
                                                      std::to_string(config_.timeout.count()) +
                                                      " ms, found none");
      }
      if (has_room()) {
        num_reserved_ += num_pages;
        break;
      }
      lacks_segment = pages_left() < num_reserved_ + num_pages;
    }
    if (lacks_segment) {
      add_segment(num_pages);
    } else {
      write_some(true);
    }
  }
  Room room(*this, num_pages);
  write_some(false);
  return room;
}

void PageLog::extend(std::size_t num_pages) {
  remove_empty();
  const auto lacks_segment = [&] {
    std::lock_guard lock(mutex_);
    return pages_left() < num_reserved_ + num_pages;
  };
  while (lacks_segment()) add_segment(num_pages);
}

// Appends no more to segments that cannot be written, as far as that takes no room that was
// promised. Requires: mutex_.
void PageLog::leave_failed() noexcept {
  const std::deque<std::uint32_t> open = open_;
  const auto can_write = [&](std::uint32_t number) { return files_[number]->num_failed == 0; };
  if (std::ranges::all_of(open, can_write)) return;
  const bool ends_buffer = !can_write(open.front()) && !buffers_.empty() &&
                           buffers_.back().state == Buffer::State::kFilling;
  if (ends_buffer) buffers_.back().state = Buffer::State::kFull;
  std::erase_if(open_, [&](std::uint32_t number) { return !can_write(number); });
  if (buffer_room() < num_reserved_) {  // not yet
    open_ = open;
    if (ends_buffer) buffers_.back().state = Buffer::State::kFilling;
    return;
  }
  for (const std::uint32_t number : open) {
    if (!can_write(number)) files_[number]->capacity = files_[number]->num_pages;
  }
}

// Makes a segment on the next device that takes one, for whoever reserves so many pages. Those that
// cannot be written to come last.
void PageLog::add_segment(std::size_t num_pages) {
  const auto write = lock_writers();
  std::uint64_t generation;
  {
    std::lock_guard lock(mutex_);
    // Another thread may have made one meanwhile.
    if (pages_left() >= num_reserved_ + num_pages) return;
    files_.reserve(files_.size() + 1);
    empty_.reserve(empty_.size() + files_.size() + 1);
    generation = ++generation_;
  }
  const std::string name = segment_name(generation);
  const std::uint64_t num_bytes = std::uint64_t{config_.segment_pages} * config_.page_bytes;
  std::vector<std::size_t> order(devices_.size());
  for (std::size_t& at : order) at = next_device_++ % devices_.size();
  ++next_device_;
  std::ranges::stable_partition(order, [&](std::size_t at) { return fails_[at] == 0; });
  for (std::size_t tried = 1;; ++tried) {
    const std::size_t at = order[tried - 1];
    try {
      auto file = std::make_shared<File>(devices_[at], devices_[at]->create(name, num_bytes), name,
                                         generation);
      std::lock_guard lock(mutex_);
      auto slot = std::ranges::find(files_, nullptr);
      if (slot == files_.end()) slot = files_.insert(files_.end(), nullptr);
      file->number = static_cast<std::uint32_t>(slot - files_.begin());
      file->device_number = at;
      file->capacity = config_.segment_pages;
      open_.push_back(file->number);
      *slot = std::move(file);
      changed_.notify_all();
      return;
    } catch (const Error&) {
      if (tried == devices_.size()) throw;
    }
  }
}

// Requires: mutex_; an open segment that is not full, and a free buffer.
void PageLog::begin_buffer() noexcept {
  TRIREME_CHECK(!free_buffers_.empty() && !open_.empty());
  const std::shared_ptr<File>& file = files_[open_.front()];
  buffers_.push_back(
      {.file = file,
       .first = file->num_pages,
       .capacity = std::min(config_.buffer_pages, config_.segment_pages - file->num_pages),
       .data = free_buffers_.back(),
       .number = ++num_begun_});
  free_buffers_.pop_back();
}

Position PageLog::append(Room& room, std::span<const std::byte> page) noexcept {
  const PageHeader header = header_of(page.data());
  std::lock_guard lock(mutex_);
  TRIREME_CHECK(room.left_ > 0 && page.size() == config_.page_bytes);
  --room.left_;
  --num_reserved_;
  if (buffers_.empty() || buffers_.back().state != Buffer::State::kFilling) begin_buffer();
  Buffer& buffer = buffers_.back();
  File& file = *buffer.file;
  const std::size_t number = file.num_pages++;
  std::memcpy(buffer.data + buffer.num_pages++ * config_.page_bytes, page.data(), page.size());
  file.num_rows += header.num_rows;
  file.num_rows_then += header.num_rows;
  file.is_synced = false;
  ++counts_.pages_written;
  if (buffer.num_pages == buffer.capacity) {
    buffer.state = Buffer::State::kFull;
    changed_.notify_all();
  }
  if (file.num_pages == config_.segment_pages) open_.pop_front();
  return static_cast<Position>(file.number * config_.segment_pages + number);
}

std::unique_lock<TimedMutex> PageLog::lock_writers() {
  std::unique_lock lock(write_mutex_, config_.timeout);
  if (lock.owns_lock()) return lock;
  throw Error(ErrorCode::kDeadlineExceeded, "PageLog: expected those who write to " +
                                                devices_.front()->path_of("") + " to end within " +
                                                std::to_string(config_.timeout.count()) + " ms");
}

// Begins to write what is full, and frees what has been written. Returns false if another thread is
// at it and this one need not wait.
bool PageLog::write_some(bool must_wait) {
  std::unique_lock<TimedMutex> write;
  if (must_wait) {
    write = lock_writers();
  } else if (write = std::unique_lock(write_mutex_, std::try_to_lock); !write.owns_lock()) {
    return false;
  }
  std::vector<std::pair<std::size_t, Transfer>> transfers;
  std::size_t oldest = devices_.size();  // the device that has been written to for longest
  {
    std::lock_guard lock(mutex_);
    transfers.reserve(buffers_.size());
    for (Buffer& buffer : buffers_) {
      if (buffer.state == Buffer::State::kFilling) continue;
      if (oldest == devices_.size()) oldest = buffer.file->device_number;
      if (buffer.state == Buffer::State::kWriting) continue;
      const std::size_t first = buffer.file->number * config_.segment_pages + buffer.first;
      transfers.emplace_back(buffer.file->device_number,
                             Transfer{.kind = Transfer::Kind::kWrite,
                                      .file = buffer.file->id,
                                      .offset = std::uint64_t{buffer.first} * config_.page_bytes,
                                      .bytes = {buffer.data, buffer.num_pages * config_.page_bytes},
                                      .tag = first});
    }
  }
  const auto set_state = [&](std::uint64_t first, Buffer::State state) {
    std::lock_guard lock(mutex_);
    for (Buffer& buffer : buffers_) {
      if (buffer.file->number * config_.segment_pages + buffer.first == first) buffer.state = state;
    }
  };
  for (const auto& [device, transfer] : transfers) {
    // Before, for a call that fails may have begun it.
    set_state(transfer.tag, Buffer::State::kWriting);
    if (writers_[device]->submit({&transfer, 1}) == 0) {
      set_state(transfer.tag, Buffer::State::kFull);
    }
  }
  std::string failed;
  int error = 0;
  bool has_written = false;
  for (std::size_t device = 0; device < devices_.size(); ++device) {
    const std::size_t in_flight = writers_[device]->num_in_flight();
    if (in_flight == 0) continue;
    std::vector<Finished> finished(in_flight);
    const bool waits = must_wait && device == oldest;
    const std::size_t n =
        waits ? reap_write(device, finished) : writers_[device]->reap(finished, 0, config_.timeout);
    for (const Finished& one : std::span(finished).first(n)) {
      if (one.error != 0) {
        set_state(one.tag, Buffer::State::kFull);  // the next call writes it again
        error = one.error;
        failed = place_of(static_cast<Position>(one.tag));
      }
      fails_[device] = one.error != 0;
      std::lock_guard lock(mutex_);
      counts_.num_failed_writes += one.error != 0;
      const auto buffer = std::ranges::find_if(buffers_, [&](const Buffer& b) {
        return b.file->number * config_.segment_pages + b.first == one.tag;
      });
      File& file = *buffer->file;
      file.num_failed += (one.error != 0) - buffer->has_failed;
      buffer->has_failed = one.error != 0;
      if (one.error != 0 && file.num_rows > 0) continue;  // else nobody needs it
      has_written = true;
      file.num_failed -= buffer->has_failed;
      file.num_written += buffer->num_pages;
      if (is_empty(file)) empty_.push_back(std::move(files_[file.number]));
      free_buffers_.push_back(buffer->data);
      buffers_.erase(buffer);
      changed_.notify_all();
    }
  }
  if (error != 0 && must_wait && !has_written) {
    const std::string message = "PageLog: expected to write " + failed + ", found: ";
    if (error == ENOSPC) throw FullDevice(message + text_of(error));
    throw Error(ErrorCode::kUnavailable, message + text_of(error));
  }
  return true;
}

// Waits for a write. While one has not ended in time, the others do not wait.
// Errors: kDeadlineExceeded. Requires: write_mutex_.
std::size_t PageLog::reap_write(std::size_t device, std::span<Finished> finished) {
  const milliseconds patience = is_late_[device] ? milliseconds{0} : config_.timeout;
  const std::size_t n = reap_in_time(*writers_[device], finished, 1, patience);
  is_late_[device] = n == 0;
  if (n > 0) return n;
  throw Error(ErrorCode::kDeadlineExceeded,
              "PageLog: expected " + devices_[device]->path_of("") + " to end a write within " +
                  std::to_string(config_.timeout.count()) + " ms, found that it does not answer");
}

void PageLog::forget(Position position, std::size_t num_rows) noexcept {
  std::lock_guard lock(mutex_);
  std::shared_ptr<File>& file = files_[position / config_.segment_pages];
  TRIREME_CHECK(file != nullptr && file->num_rows >= num_rows);
  file->num_rows -= num_rows;
  if (is_empty(*file)) empty_.push_back(std::move(file));
}

// Whether a segment is to be removed. Requires: mutex_.
bool PageLog::is_empty(const File& file) const noexcept {
  return file.num_rows == 0 && file.num_written == file.capacity && num_holds_ == 0;
}

// What cannot be removed waits for the next call: nobody reads it, and other devices have room.
void PageLog::remove_empty() {
  std::vector<std::shared_ptr<File>> left;
  for (;;) {
    std::shared_ptr<File> file;
    {
      std::lock_guard lock(mutex_);
      if (empty_.empty()) break;
      file = std::move(empty_.back());
      empty_.pop_back();
    }
    try {
      file->device->remove(file->name);
    } catch (const Error&) {
      left.push_back(std::move(file));
    }
  }
  if (left.empty()) return;
  std::lock_guard lock(mutex_);
  counts_.num_failed_writes += left.size();
  empty_.reserve(empty_.size() + left.size() + files_.size() + 1);
  std::ranges::move(left, std::back_inserter(empty_));
}

std::uint64_t PageLog::generation(Position position) const {
  const std::size_t number = position / config_.segment_pages;
  std::lock_guard lock(mutex_);
  return number < files_.size() && files_[number] != nullptr ? files_[number]->generation : 0;
}

std::string PageLog::place_of(Position position) const {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<File>& file = files_[position / config_.segment_pages];
  const std::size_t offset = position % config_.segment_pages * config_.page_bytes;
  return file->device->path_of(file->name) + " at offset " + std::to_string(offset);
}

void PageLog::fail(Position position, const PagesRead::Page& page, std::uint32_t bucket) const {
  const std::string what = "PageLog: expected a page of bucket " + std::to_string(bucket) + " in " +
                           place_of(position) + ", found ";
  if (page.error == EBADMSG) {
    throw Error(ErrorCode::kCorruption, what + "one with a wrong checksum");
  }
  if (page.is_damaged) {
    throw Error(
        ErrorCode::kCorruption,
        what + "that it cannot be read, while others of its disk can: " + text_of(page.error));
  }
  throw Error(ErrorCode::kUnavailable, what + "that it cannot be read: " + text_of(page.error));
}

std::optional<PageLog::Segment> PageLog::failed() const {
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<File>& file : files_) {
    if (file == nullptr || file->num_failed == 0 || file->num_pages < file->capacity) continue;
    if (file->is_aside || file->num_rows == 0) continue;
    return Segment{.first = static_cast<Position>(file->number * config_.segment_pages),
                   .num_pages = file->capacity,
                   .num_rows = file->num_rows,
                   .num_rows_then = file->num_rows_then};
  }
  return {};
}

std::optional<PageLog::Segment> PageLog::emptiest() const {
  std::lock_guard lock(mutex_);
  const File* best = nullptr;
  const auto is_emptier = [](const File& a, const File& b) {
    return a.num_rows * b.num_rows_then < b.num_rows * a.num_rows_then;
  };
  for (const std::shared_ptr<File>& file : files_) {
    if (file == nullptr || file->num_written < file->capacity) continue;
    if (file->is_aside || file->num_rows == 0) continue;
    if (num_late(file->device_number) > 0) continue;
    if (best == nullptr || is_emptier(*file, *best)) best = file.get();
  }
  if (best == nullptr) return {};
  return Segment{.first = static_cast<Position>(best->number * config_.segment_pages),
                 .num_pages = best->capacity,
                 .num_rows = best->num_rows,
                 .num_rows_then = best->num_rows_then};
}

void PageLog::set_aside(Position position) noexcept {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<File>& file = files_[position / config_.segment_pages];
  if (file != nullptr) file->is_aside = true;
}

// Ends the buffer that is filling, if what was promised fits into the others. Requires: mutex_.
bool PageLog::end_buffer() noexcept {
  if (buffers_.empty() || buffers_.back().state != Buffer::State::kFilling) return true;
  buffers_.back().state = Buffer::State::kFull;
  if (buffer_room() >= num_reserved_) return true;
  buffers_.back().state = Buffer::State::kFilling;
  return false;
}

void PageLog::flush() {
  std::uint64_t last;  // the buffer that was begun last
  std::vector<std::shared_ptr<File>> files;
  const auto deadline = std::chrono::steady_clock::now() + config_.timeout;
  for (std::unique_lock lock(mutex_);;) {
    last = num_begun_;
    if (end_buffer()) break;
    if (buffers_.front().state != Buffer::State::kFilling) {
      lock.unlock();
      write_some(true);
      lock.lock();
    } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      throw Error(ErrorCode::kDeadlineExceeded,
                  "PageLog.flush: expected those who hold room for " +
                      std::to_string(num_reserved_) + " pages to append or give it up within " +
                      std::to_string(config_.timeout.count()) + " ms");
    }
  }
  {
    std::lock_guard lock(mutex_);
    std::ranges::copy_if(files_, std::back_inserter(files),
                         [](const auto& file) { return file != nullptr && !file->is_synced; });
  }
  const auto is_written = [&] {
    std::lock_guard lock(mutex_);
    return std::ranges::none_of(buffers_, [&](const Buffer& b) { return b.number <= last; });
  };
  while (!is_written()) write_some(true);
  for (const std::shared_ptr<File>& file : files) {
    std::size_t num_written;
    {
      std::lock_guard lock(mutex_);
      num_written = file->num_written;
    }
    file->device->sync(file->id);
    std::lock_guard lock(mutex_);
    file->is_synced = file->num_pages == num_written;
  }
  for (const auto& device : devices_) device->sync_names();
}

PageLog::Use PageLog::use() const {
  std::lock_guard lock(mutex_);
  Use use = counts_;
  for (const std::shared_ptr<File>& file : files_) {
    if (file == nullptr) continue;
    ++use.num_segments;
    use.bytes += std::uint64_t{config_.segment_pages} * config_.page_bytes;
    use.num_pages += file->num_pages;
    use.num_rows += file->num_rows;
    use.num_rows_then += file->num_rows_then;
    use.num_damaged += file->damaged.size();
  }
  return use;
}

std::size_t PageLog::bytes() const noexcept {
  return memory_.size() + std::max(config_.spare_bytes, bytes_of_reads_.load());
}

}  // namespace trireme::ssd
