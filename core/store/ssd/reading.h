// A read of pages that is under way; see page_log.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/ssd/device.h"
#include "store/ssd/page_log.h"
#include "store/ssd/segment.h"

namespace trireme::ssd {

// Waits until this many transfers have ended; returns how many have, 0 when the time is over.
std::size_t reap_in_time(Queue& queue, std::span<Finished> finished, std::size_t num_min,
                         std::chrono::milliseconds timeout);
// Waits, so long, until no transfer is in flight. Returns whether that is so.
bool drain(Queue& queue, std::chrono::milliseconds timeout) noexcept;

// Queues of one thread at a time, one for each device.
class PageLog::Reader {
 public:
  Reader(std::span<const std::shared_ptr<Device>> devices, std::size_t depth);

  void add(std::size_t device, const Transfer& transfer) {
    lists_[device].pending.push_back(transfer);
  }
  // Hands over as many as the devices take at a time.
  void submit();
  // Calls ended(finished) for each transfer, which may add others. Returns the device that had not
  // answered when the time was over; none: all transfers have ended.
  template <class Ended>
  std::optional<std::size_t> run(std::chrono::milliseconds timeout, const Ended& ended);

  // Whether a transfer is in flight on the device.
  bool is_busy(std::size_t device) const noexcept {
    return lists_[device].queue->num_in_flight() > 0;
  }
  bool is_busy() const noexcept;
  // Forgets transfers that have ended. Waits for the others, so long.
  void drain(std::chrono::milliseconds timeout) noexcept;

 private:
  struct List {
    std::unique_ptr<Queue> queue;
    std::vector<Transfer> pending;
    std::size_t num_begun = 0;  // of the pending ones
  };
  static void submit(List& list);

  std::vector<List> lists_;
};

// All that must live until the transfers of a read have ended.
struct PageLog::Transfers {
  PagesRead result;
  std::vector<std::shared_ptr<File>> files;  // of the pages to be read; null for the others
  std::unique_ptr<Reader> reader;            // null: no page is to be read
  std::uint64_t num_transfers = 0;
  std::vector<std::uint8_t> num_tries;  // of each page, alone; empty: none has failed
  std::vector<std::shared_ptr<File>> probed;
};

}  // namespace trireme::ssd
