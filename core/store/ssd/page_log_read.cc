// PageLog: reads, and what is left of those that a device did not end in time.
//
// A device may write into a read's memory as long as a transfer of it is in flight. So a read that
// times out goes to a list with all that it needs, and its caller goes on. The list is short: the
// more reads of a device are on it, the less others wait for that device, until they fail at once.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "store/ssd/reading.h"

namespace trireme::ssd {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kRunPagesMax = 64;  // neighbours that one transfer reads
constexpr std::size_t kLateReadsMax = 6;  // of a device
constexpr std::uint8_t kTriesMax = 4;     // of a page that cannot be read, before and after another
constexpr std::size_t kProbe = 0xFF;      // in a tag, for the number of pages
static_assert(kRunPagesMax < kProbe);

milliseconds until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return std::max(left, milliseconds{0});
}

}  // namespace

void sort_distinct(std::vector<Position>& positions) {
  std::ranges::sort(positions);
  positions.erase(std::ranges::unique(positions).begin(), positions.end());
}

std::size_t reap_in_time(Queue& queue, std::span<Finished> finished, std::size_t num_min,
                         milliseconds timeout) {
  try {
    return queue.reap(finished, num_min, timeout);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadlineExceeded) throw;
    return 0;
  }
}

bool drain(Queue& queue, milliseconds timeout) noexcept {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::array<Finished, 64> finished;
  try {
    while (queue.num_in_flight() > 0) {
      if (reap_in_time(queue, finished, 1, until(deadline)) == 0) break;
    }
  } catch (const Error&) {
    // The system does not tell: they may be in flight.
  }
  return queue.num_in_flight() == 0;
}

PageLog::Reader::Reader(std::span<const std::shared_ptr<Device>> devices, std::size_t depth) {
  for (const auto& device : devices) lists_.emplace_back().queue = device->make_queue(depth);
}

bool PageLog::Reader::is_busy() const noexcept {
  return std::ranges::any_of(lists_, [](const List& l) { return l.queue->num_in_flight() > 0; });
}

void PageLog::Reader::drain(milliseconds timeout) noexcept {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (List& list : lists_) ssd::drain(*list.queue, until(deadline));
}

// The first of the list go first, so that neighbours on the disk are read in their order.
void PageLog::Reader::submit(List& list) {
  list.num_begun += list.queue->submit(std::span(list.pending).subspan(list.num_begun));
  if (list.num_begun < list.pending.size()) return;
  list.pending.clear();
  list.num_begun = 0;
}

void PageLog::Reader::submit() {
  for (List& list : lists_) submit(list);
}

// Waits for many transfers at a time: to wake for each would cost more than to read it.
template <class Ended>
std::optional<std::size_t> PageLog::Reader::run(milliseconds timeout, const Ended& ended) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::array<Finished, 64> finished;
  for (bool is_active = true; is_active;) {
    is_active = false;
    submit();
    for (std::size_t i = 0; i < lists_.size(); ++i) {
      if (is_busy(i)) {
        Queue& queue = *lists_[i].queue;
        const std::size_t num_min = std::min(queue.num_in_flight(), finished.size());
        const std::size_t n = reap_in_time(queue, finished, num_min, until(deadline));
        if (n == 0) return i;
        for (const Finished& one : std::span(finished).first(n)) ended(one);
      }
      is_active |= is_busy(i) || !lists_[i].pending.empty();
    }
  }
  return std::nullopt;
}

PagesRead PageLog::read(std::vector<Position> positions) {
  return begin_read(std::move(positions)).end();
}

PageLog::Reading PageLog::begin_read(std::vector<Position> positions) {
  return {*this, std::move(positions)};
}

PageLog::Reading::Reading(PageLog& log, std::vector<Position> positions)
    : log_(log), transfers_(1) {
  Transfers& own = transfers_.front();
  if (!log_.find_pages(own, std::move(positions))) return;
  patience_ = log_.patience_with(own.files);
  own.reader = log_.take_reader();
  add_all();
  try {
    own.reader->submit();
  } catch (...) {
    if (own.reader->is_busy()) log_.put_off(transfers_);
    throw;
  }
}

PageLog::Reading::Reading(Reading&& other) noexcept
    : log_(other.log_),
      transfers_(std::move(other.transfers_)),
      patience_(other.patience_),
      begin_(other.begin_) {}

PageLog::Reading::~Reading() {
  if (transfers_.empty() || transfers_.front().reader == nullptr) return;
  Reader& reader = *transfers_.front().reader;
  reader.drain(until(deadline()));
  if (reader.is_busy()) log_.put_off(transfers_);
}

// Takes what is in buffers, and finds the files of the other pages. Returns whether there are some.
bool PageLog::find_pages(Transfers& reading, std::vector<Position> positions) {
  const std::size_t page_bytes = config_.page_bytes;
  PagesRead& result = reading.result;
  result.memory_ = PagesRead::Memory(*this, read_bytes(positions.size()));
  result.positions_ = std::move(positions);
  result.pages_.resize(result.positions_.size());
  reading.files.resize(result.positions_.size());
  std::size_t num_reads = 0;
  std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < reading.files.size(); ++i) {
    const auto number = static_cast<std::uint32_t>(result.positions_[i] / config_.segment_pages);
    const std::size_t page = result.positions_[i] % config_.segment_pages;
    std::byte* const bytes = result.memory_.data() + i * page_bytes;
    result.pages_[i] = {.bytes = bytes, .generation = 0, .error = 0};
    if (number >= files_.size() || files_[number] == nullptr) continue;
    // Of an older segment with this number: what a later page here will be is not known yet.
    if (page >= files_[number]->num_pages) continue;
    result.pages_[i].generation = files_[number]->generation;
    const auto buffer =
        std::ranges::find_if(buffers_, [&](const Buffer& b) { return b.has(number, page); });
    if (buffer == buffers_.end()) {
      reading.files[i] = files_[number];
      ++num_reads;
    } else {
      std::memcpy(bytes, buffer->data + (page - buffer->first) * page_bytes, page_bytes);
    }
  }
  counts_.pages_read += num_reads;
  return num_reads > 0;
}

std::unique_ptr<PageLog::Reader> PageLog::take_reader() {
  {
    std::lock_guard lock(mutex_);
    if (!readers_.empty()) {
      auto reader = std::move(readers_.back());
      readers_.pop_back();
      return reader;
    }
  }
  return std::make_unique<Reader>(devices_, config_.read_depth);
}

void PageLog::Reading::add(std::size_t i, std::size_t num_pages) {
  Transfers& own = transfers_.front();
  const std::size_t page_bytes = log_.config_.page_bytes;
  const std::uint64_t page = own.result.positions_[i] % log_.config_.segment_pages;
  own.reader->add(own.files[i]->device_number,
                  {.kind = Transfer::Kind::kRead,
                   .file = own.files[i]->id,
                   .offset = page * page_bytes,
                   .bytes = {own.result.memory_.data() + i * page_bytes, num_pages * page_bytes},
                   .tag = i << 8 | num_pages});
  ++own.num_transfers;
}

// Reads another page of the device, in the place of one that cannot be read: if that works, it is
// not the device. Returns false if no other is known to be readable.
bool PageLog::Reading::add_probe(std::size_t i) {
  Transfers& own = transfers_.front();
  const std::size_t page_bytes = log_.config_.page_bytes, segment = log_.config_.segment_pages;
  std::lock_guard lock(log_.mutex_);
  const auto& [file, page] = log_.readable_[own.files[i]->device_number];
  if (file == nullptr) return false;
  if (file == own.files[i] && page == own.result.positions_[i] % segment) return false;
  own.probed.push_back(file);
  own.reader->add(file->device_number,
                  {.kind = Transfer::Kind::kRead,
                   .file = file->id,
                   .offset = page * page_bytes,
                   .bytes = {own.result.memory_.data() + i * page_bytes, page_bytes},
                   .tag = i << 8 | kProbe});
  return true;
}

void PageLog::Reading::add_all() {
  const std::vector<Position>& positions = transfers_.front().result.positions_;
  const std::vector<std::shared_ptr<File>>& files = transfers_.front().files;
  for (std::size_t i = 0; i < files.size();) {
    std::size_t n = 1;
    if (files[i] != nullptr) {
      while (n < kRunPagesMax && i + n < files.size() && files[i + n] == files[i] &&
             positions[i + n] == positions[i] + n) {
        ++n;
      }
      add(i, n);
    }
    i += n;
  }
}

PagesRead PageLog::Reading::end() {
  Transfers& own = transfers_.front();
  PagesRead& result = own.result;
  if (own.reader != nullptr) {
    const std::size_t page_bytes = log_.config_.page_bytes;
    const auto late = own.reader->run(patience_, [&](const Finished& finished) {
      const std::size_t first = finished.tag >> 8, n = finished.tag & 0xFF;
      if (n == kProbe) {
        finished.error == 0 ? add(first, 1) : void(result.pages_[first].error = finished.error);
        return;
      }
      if (finished.error != 0) own.num_tries.resize(own.files.size());
      for (std::size_t i = first; i < first + n; ++i) {
        PagesRead::Page& page = result.pages_[i];
        if (finished.error == 0) {
          page.error = is_whole({page.bytes, page_bytes}) ? 0 : EBADMSG;
        } else if (n > 1 || ++own.num_tries[i] % kTriesMax != 0) {
          add(i, 1);  // the others may be readable, or it too
        } else if (own.num_tries[i] > kTriesMax || !add_probe(i)) {
          page.error = finished.error;
          page.is_damaged = own.num_tries[i] > kTriesMax;
        }
      }
    });
    if (late) {
      const auto file = std::ranges::find_if(
          own.files, [&](const auto& f) { return f != nullptr && f->device_number == *late; });
      throw Error(ErrorCode::kDeadlineExceeded,
                  "PageLog.read: expected the disk of " + (*file)->path() + " to answer within " +
                      std::to_string(patience_.count()) + " ms, found that it does not");
    }
    std::lock_guard lock(log_.mutex_);
    log_.counts_.reads += own.num_transfers;
    log_.note_read(own);
    log_.readers_.push_back(std::move(own.reader));
  }
  for (PagesRead::Page& page : result.pages_) {
    if (page.error != 0 || page.generation == 0) page.bytes = nullptr;
  }
  return std::move(result);
}

// Requires: mutex_.
void PageLog::note_read(Transfers& read) {
  for (std::size_t i = 0; i < read.files.size(); ++i) {
    if (read.files[i] == nullptr) continue;
    File& file = *read.files[i];
    const PagesRead::Page& page = read.result.pages_[i];
    const std::size_t number = read.result.positions_[i] % config_.segment_pages;
    if (page.error == 0) {
      readable_[file.device_number] = {.file = read.files[i], .page = number};
      if (!file.damaged.empty()) file.damaged.erase(number);
    } else if (page.is_damaged || page.error == EBADMSG) {
      file.damaged.insert(number);
    }
  }
}

// How long to wait for the devices of these files. Errors: kDeadlineExceeded: not at all.
milliseconds PageLog::patience_with(std::span<const std::shared_ptr<File>> files) {
  free_late();
  if (num_late_ == 0) return config_.timeout;
  std::size_t num_late_max = 0;
  std::vector<bool> is_seen(devices_.size());
  for (const std::shared_ptr<File>& file : files) {
    if (file == nullptr || is_seen[file->device_number]) continue;
    is_seen[file->device_number] = true;
    const std::size_t n = num_late(file->device_number);
    num_late_max = std::max(num_late_max, n);
    if (n < kLateReadsMax) continue;
    throw Error(ErrorCode::kDeadlineExceeded, "PageLog.read: expected the disk of " + file->path() +
                                                  " to answer, found that it has not ended " +
                                                  std::to_string(n) + " reads yet");
  }
  return config_.timeout / (1 << num_late_max);
}

std::size_t PageLog::num_late(std::size_t device) const noexcept {
  if (num_late_ == 0) return 0;
  std::lock_guard lock(late_mutex_);
  return static_cast<std::size_t>(std::ranges::count_if(
      late_, [&](const Transfers& reading) { return reading.reader->is_busy(device); }));
}

void PageLog::put_off(std::list<Transfers>& reading) noexcept {
  std::lock_guard lock(late_mutex_);
  late_.splice(late_.end(), reading);
  count_late();
}

// Requires: late_mutex_.
void PageLog::count_late() noexcept {
  std::size_t num_bytes = 0;
  for (const Transfers& reading : late_) num_bytes += reading.result.memory_.size();
  late_bytes_ = num_bytes;
  num_late_ = late_.size();
}

// Frees reads that timed out and have ended meanwhile.
void PageLog::free_late() noexcept {
  if (num_late_ == 0) return;
  std::list<Transfers> ended;  // freed without the lock
  std::lock_guard lock(late_mutex_);
  for (auto reading = late_.begin(); reading != late_.end();) {
    const auto next = std::next(reading);
    reading->reader->drain(milliseconds{0});
    if (!reading->reader->is_busy()) ended.splice(ended.end(), late_, reading);
    reading = next;
  }
  count_late();
}

}  // namespace trireme::ssd
