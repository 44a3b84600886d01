// A file of a page log; see page_log.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "store/ssd/device.h"
#include "store/ssd/page_log.h"

namespace trireme::ssd {

inline constexpr std::string_view kSegmentSuffix = ".rows";

inline std::string segment_name(std::uint64_t generation) {
  std::array<char, 32> name;
  std::snprintf(name.data(), name.size(), "%012llx", static_cast<unsigned long long>(generation));
  return name.data() + std::string(kSegmentSuffix);
}

// A segment. Closed when nobody reads it any more.
struct PageLog::File {
  File(std::shared_ptr<Device> on, FileId file, std::string called, std::uint64_t made_as)
      : device(std::move(on)), id(file), name(std::move(called)), generation(made_as) {}
  ~File() { device->close(id); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::string path() const { return device->path_of(name); }

  const std::shared_ptr<Device> device;
  const FileId id;
  const std::string name;
  const std::uint64_t generation;
  // Guarded by the log's mutex.
  std::uint32_t number = 0;
  std::size_t device_number = 0;
  std::size_t capacity = 0;   // in pages
  std::size_t num_pages = 0;  // appended
  std::size_t num_written = 0;
  std::size_t num_rows = 0;  // left
  std::size_t num_rows_then = 0;
  bool is_synced = true;
  bool is_aside = false;
  std::size_t num_failed = 0;     // buffers that could not be written
  std::set<std::size_t> damaged;  // pages, until they can be read
};

// Pages that are appended to a file together.
struct PageLog::Buffer {
  enum class State { kFilling, kFull, kWriting };

  std::shared_ptr<File> file;
  std::size_t first;  // page of the segment
  std::size_t capacity;
  std::byte* data;
  std::uint64_t number;  // they are begun in this order
  std::size_t num_pages = 0;
  State state = State::kFilling;
  bool has_failed = false;  // the last write of it

  bool has(std::uint32_t segment, std::size_t page) const noexcept {
    return file->number == segment && first <= page && page < first + num_pages;
  }
};

}  // namespace trireme::ssd
