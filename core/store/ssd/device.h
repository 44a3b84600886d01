// The device under cold rows: a folder of files that are read and written in blocks, many at a
// time.
//
// Three kinds: `uring_device` (io_uring), `pool_device` (threads that call pread and pwrite, where
// io_uring is forbidden, as by Docker's default profile) and `FakeDevice` (memory with faults).
//
// Files have a fixed size, whose space is taken when they are made: a full disk is an error then,
// not in the middle of a write. What was written is durable when sync() has returned, and a file's
// name when sync_names() has; after a crash, later writes are there whole, in part or not at all.
//
// Threads: any thread may call a Device. A Queue belongs to one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace trireme::ssd {

// Offsets, sizes and addresses of transfers are multiples of it: they pass the page cache by.
inline constexpr std::size_t kBlockBytes = 4096;

using FileId = int;

struct Transfer {
  enum class Kind { kRead, kWrite };
  Kind kind;
  FileId file;
  std::uint64_t offset;
  std::span<std::byte> bytes;  // read into, or written from; belongs to the queue until reaped
  std::uint64_t tag;           // returned with the result
};

struct Finished {
  std::uint64_t tag;
  int error;  // 0: all bytes were transferred; else an errno, ENODATA beyond the end of the file
};

// The transfers in flight of one caller. The destructor waits for them, for the device writes into
// memory of the caller.
class Queue {
 public:
  virtual ~Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Transfers that may be in flight.
  virtual std::size_t depth() const noexcept = 0;
  virtual std::size_t num_in_flight() const noexcept = 0;

  // Begins the first of these transfers, as many as the depth allows; returns how many. They run in
  // any order. Errors: kBadRequest for a transfer that is empty or not in whole blocks.
  virtual std::size_t submit(std::span<const Transfer> transfers) = 0;

  // Waits until at least `num_min` of the transfers in flight have ended, and returns how many were
  // written to `finished`. Requires: num_min at most num_in_flight() and the size of `finished`.
  // Errors: kDeadlineExceeded: fewer had ended in time; none is lost.
  virtual std::size_t reap(std::span<Finished> finished, std::size_t num_min,
                           std::chrono::milliseconds timeout) = 0;

 protected:
  Queue() = default;
};

// A disk is full. Who finds no room in memory for it does not find any by asking for less at a
// time.
class FullDevice : public Error {
 public:
  explicit FullDevice(const std::string& message) : Error(ErrorCode::kResourceExhausted, message) {}
};

// Errors of all methods that touch the disk: FullDevice, or kUnavailable; they name the file.
class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Requires: depth >= 1. The device outlives its queues.
  virtual std::unique_ptr<Queue> make_queue(std::size_t depth) = 0;

  // Makes a file of this size, whose content is undefined; it must not exist.
  virtual FileId create(const std::string& name, std::uint64_t num_bytes) = 0;
  virtual FileId open(const std::string& name) = 0;
  virtual std::uint64_t size(FileId file) = 0;
  // Takes what the first bytes of a file lack of their space, to write there. Returns false: there
  // is none, or another process writes to the file: one that made or claimed it and has not closed
  // it, or has been killed while transfers were in flight that have not ended.
  virtual bool claim(FileId file, std::uint64_t num_bytes) = 0;
  // Requires: no transfer of the file is in flight.
  virtual void close(FileId file) = 0;
  // After an error what was written since the last sync() may be lost, whatever a later one says.
  virtual void sync(FileId file) = 0;

  virtual std::vector<std::string> names() = 0;  // of the files, sorted
  virtual std::string path_of(const std::string& name) const = 0;
  virtual void remove(const std::string& name) = 0;
  // Gives a file a further name.
  virtual void link(const std::string& name, const std::string& further) = 0;
  virtual void sync_names() = 0;

 protected:
  Device() = default;
};

// The files of a folder, which must exist. Errors: kUnavailable: the system does not offer io_uring
// as of Linux 5.11, or forbids it; the message says which.
std::unique_ptr<Device> uring_device(const std::string& folder);

// Requires: num_threads >= 1.
std::unique_ptr<Device> pool_device(const std::string& folder, int num_threads);

// Errors: kBadRequest, naming the transfer.
void check_transfer(const Transfer& transfer);

}  // namespace trireme::ssd
