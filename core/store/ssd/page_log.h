// Where pages lie: segments, files of 64 MiB to which pages are appended, spread over the devices.
//
// A page is first in a buffer. Full buffers are written while others fill; whoever needs room when
// none is left waits for a write. A page never changes. When all rows of a segment are gone, its
// file is removed, and its number used again; readers of the old one finish first.
//
// Nobody waits for a device longer than the timeout. Memory that a transfer needs which has not
// ended by then is kept until it ends; meanwhile others have less patience with that device.
//
// Threads: any. No lock is held while a thread waits for a device, but for those that wait for the
// same writes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/pages.h"
#include "base/timed_mutex.h"
#include "store/ssd/device.h"
#include "store/ssd/page.h"

namespace trireme::ssd {

// A page's place: the number of its segment times the pages of a segment, plus its number there.
using Position = std::uint32_t;
// Makes them ascending and distinct, as reads take them.
void sort_distinct(std::vector<Position>& positions);

struct PageLogConfig {
  std::size_t page_bytes = kBlockBytes;  // see page_bytes_for
  std::size_t segment_pages = 16384;
  std::size_t buffer_pages = 256;  // written at once
  std::size_t num_buffers = 4;
  std::size_t read_depth = 256;
  std::size_t read_pages = 64;               // of a read that takes no more memory than most
  std::size_t spare_bytes = 0;               // memory of reads that is kept for later ones
  std::chrono::milliseconds timeout{30000};  // of a device
};

class PageLog;

// Pages that were read, ascending by position. Their memory counts among that of the log, which
// outlives them.
class PagesRead {
 public:
  struct Page {
    const std::byte* bytes;    // null: it could not be read
    std::uint64_t generation;  // of its segment; 0: the page was gone
    int error;                 // an errno, EBADMSG if the checksum is wrong; 0: it is whole
    bool is_damaged = false;   // it, and not its device
  };

  // Null if the position was not read.
  const Page* find(Position position) const noexcept;
  bool empty() const noexcept { return positions_.empty(); }

 private:
  friend class PageLog;

  // Memory from the log, to which it goes back.
  class Memory {
   public:
    Memory() = default;
    Memory(PageLog& log, std::size_t num_bytes);
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();
    std::byte* data() const noexcept { return pages_.data(); }
    std::size_t size() const noexcept { return num_bytes_; }

   private:
    PageLog* log_ = nullptr;
    std::size_t num_bytes_ = 0;
    Pages pages_;
  };

  std::vector<Position> positions_;
  std::vector<Page> pages_;
  Memory memory_;
};

class PageLog {
 public:
  // Removes what is left of an earlier log on these devices.
  // Errors: kBadRequest (no devices, a config that does not fit); those of the devices.
  PageLog(std::vector<std::shared_ptr<Device>> devices, const PageLogConfig& config);
  // Waits for transfers in flight, at most a second; the memory of those that do not end is lost,
  // and a line on the standard error says so.
  ~PageLog();
  PageLog(const PageLog&) = delete;
  PageLog& operator=(const PageLog&) = delete;

  // The right to append this many pages without an error. The destructor gives up what is left.
  class Room {
   public:
    Room(Room&& other) noexcept : log_(other.log_), left_(std::exchange(other.left_, 0)) {}
    Room& operator=(Room&&) = delete;
    ~Room();

   private:
    friend class PageLog;
    Room(PageLog& log, std::size_t num_pages) : log_(log), left_(num_pages) {}
    PageLog& log_;
    std::size_t left_;
  };
  // May write, and wait. Requires: at most half of all buffers. Errors: kResourceExhausted: the
  // devices are full. kUnavailable, kDeadlineExceeded: nothing is lost, a later call tries again.
  Room reserve(std::size_t num_pages);
  // Takes space on the devices for this many pages, promised to nobody. Any call may use it.
  // Errors: FullDevice; those of the devices.
  void extend(std::size_t num_pages);
  // Appends a sealed page. Requires: room.
  Position append(Room& room, std::span<const std::byte> page) noexcept;
  // Rows of a page are gone.
  void forget(Position position, std::size_t num_rows) noexcept;

  // Reads pages.   positions: ascending, distinct. An error of the device, or a wrong checksum, is
  // noted with the page. A page that fails again and again, while another one of its device can be
  // read, is damaged. Errors: kDeadlineExceeded, kUnavailable; std::bad_alloc.
  PagesRead read(std::vector<Position> positions);
  // The same in two parts, between which a thread can do other work. The destructor waits for the
  // devices as long as end() would have. The log outlives it.
  class Reading;
  Reading begin_read(std::vector<Position> positions);
  // The generation of the segment that the position is in now; 0: none.
  std::uint64_t generation(Position position) const;
  // The error of a page that could not be read, with its file and offset.
  [[noreturn]] void fail(Position position, const PagesRead::Page& page,
                         std::uint32_t bucket) const;

  // The emptiest of the segments that are complete and written.
  struct Segment {
    Position first;
    std::size_t num_pages;
    std::size_t num_rows;       // that are left
    std::size_t num_rows_then;  // when it was written
  };
  std::optional<Segment> emptiest() const;
  // Never again names the segment of a position, some page of which cannot be read.
  void set_aside(Position position) noexcept;
  // A segment to which nothing is appended any more, since writing to it has failed. Its pages can
  // be read; what is not written stays in a buffer until all its rows are gone.
  std::optional<Segment> failed() const;
  // Writes and syncs all that was appended.
  void flush();

  // As long as one holds the log, no segment is removed and no number used again.
  class Hold {
   public:
    explicit Hold(PageLog& log) noexcept;
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    PageLog& log_;
  };
  // A segment as another log can go on with it, from a file of the same content.
  struct SegmentFile {
    std::uint32_t number;
    std::size_t device;
    std::string name;
    std::size_t num_pages;
    std::size_t num_rows_then;
  };
  // Requires: the log is held; flush(), for pages that were appended before it.
  std::vector<SegmentFile> segments() const;
  // Goes on with a segment, whose file is on its device. No row of it counts until remember(). A
  // log to which nothing was appended yet then appends behind the pages of one that is not full.
  // Errors: kBadRequest: its number or name is taken, or the device unknown; kCorruption: the file
  // is too small; those of the device.
  void adopt(const SegmentFile& segment);
  // Whether a page was appended there.
  bool has(Position position) const noexcept;
  // Rows of a page of an adopted segment are left. Requires: has(position).
  void remember(Position position, std::size_t num_rows) noexcept;

  struct Use {
    std::size_t num_segments = 0;
    std::uint64_t bytes = 0;                                     // of the files
    std::uint64_t num_pages = 0;                                 // appended, in segments that exist
    std::uint64_t num_rows = 0;                                  // left in them
    std::uint64_t num_rows_then = 0;                             // written to them
    std::uint64_t pages_read = 0, reads = 0, pages_written = 0;  // since the start
    std::uint64_t num_failed_writes = 0;
    std::size_t num_damaged = 0;  // pages
  };
  Use use() const;
  // What it takes at all times, and for reads that a device has not ended in time.
  std::size_t buffer_bytes() const noexcept {
    return memory_.size() + config_.spare_bytes + late_bytes_;
  }
  std::size_t bytes() const noexcept;  // of memory, those of reads under way included
  // What reads may take at any time; what one of so many pages takes; pages that take no more.
  std::size_t spare_bytes() const noexcept { return config_.spare_bytes; }
  std::size_t read_bytes(std::size_t num_pages) const noexcept;
  std::size_t read_pages() const noexcept { return config_.read_pages; }
  std::chrono::milliseconds timeout() const noexcept { return config_.timeout; }
  std::size_t page_bytes() const noexcept { return config_.page_bytes; }
  std::size_t segment_pages() const noexcept { return config_.segment_pages; }

 private:
  friend class PagesRead::Memory;
  struct File;
  struct Buffer;
  class Reader;
  struct Transfers;

  std::size_t spare_unit() const noexcept { return config_.read_pages * config_.page_bytes; }
  bool has_spare_room() const noexcept;
  std::size_t pages_left() const noexcept;
  std::size_t buffer_room() const noexcept;
  void begin_buffer() noexcept;
  bool end_buffer() noexcept;
  void add_segment(std::size_t num_pages);
  std::unique_lock<TimedMutex> lock_writers();
  bool write_some(bool must_wait);
  std::size_t reap_write(std::size_t device, std::span<Finished> finished);
  void end_transfers() noexcept;
  bool is_empty(const File& file) const noexcept;
  void leave_failed() noexcept;
  void note_read(Transfers& read);
  void append_to(File& file);
  void remove_empty();
  std::string place_of(Position position) const;
  bool find_pages(Transfers& reading, std::vector<Position> positions);
  std::unique_ptr<Reader> take_reader();
  std::chrono::milliseconds patience_with(std::span<const std::shared_ptr<File>> files);
  std::size_t num_late(std::size_t device) const noexcept;
  void put_off(std::list<Transfers>& reading) noexcept;
  void count_late() noexcept;
  void free_late() noexcept;

  const std::vector<std::shared_ptr<Device>> devices_;
  const PageLogConfig config_;
  Pages memory_;  // of the buffers

  mutable std::mutex mutex_;  // guards what follows, up to write_mutex_
  std::condition_variable changed_;
  std::vector<std::shared_ptr<File>> files_;  // by the segment's number; null: the number is free
  std::deque<std::uint32_t> open_;            // segments that pages can be appended to
  std::deque<Buffer> buffers_;                // the last may be filling
  std::vector<std::byte*> free_buffers_;
  std::uint64_t num_begun_ = 0;               // buffers
  std::vector<std::shared_ptr<File>> empty_;  // to be removed
  std::size_t num_reserved_ = 0;
  std::size_t num_holds_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<std::unique_ptr<Reader>> readers_;  // that no thread uses
  struct Readable {
    std::shared_ptr<File> file;  // null: none is known
    std::size_t page = 0;
  };
  std::vector<Readable> readable_;  // of each device: the page that was read last
  Use counts_;

  TimedMutex write_mutex_;                       // guards what follows; taken before mutex_
  std::vector<std::unique_ptr<Queue>> writers_;  // one for each device
  std::vector<char> is_late_;                    // whether a write has not ended in time
  std::vector<char> fails_;                      // whether the last write has failed
  std::size_t next_device_ = 0;

  mutable std::mutex late_mutex_;  // guards late_; taken after mutex_
  std::list<Transfers> late_;      // of reads that timed out
  std::atomic<std::size_t> num_late_{0}, late_bytes_{0};

  std::mutex spare_mutex_;  // guards what follows
  std::atomic<std::size_t> bytes_of_reads_{0};
  std::vector<Pages> spare_;  // for read_pages each
};

class PageLog::Reading {
 public:
  Reading(Reading&&) noexcept;
  Reading& operator=(Reading&&) = delete;
  ~Reading();

  // Waits for the pages. Called once. Errors: as for read().
  PagesRead end();

 private:
  friend class PageLog;
  Reading(PageLog& log, std::vector<Position> positions);
  std::chrono::steady_clock::time_point deadline() const noexcept { return begin_ + patience_; }
  void add(std::size_t i, std::size_t num_pages);
  bool add_probe(std::size_t i);
  void add_all();

  PageLog& log_;
  std::list<Transfers> transfers_;  // one, which can go to late_ without an error; or none
  std::chrono::milliseconds patience_{0};
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace trireme::ssd
