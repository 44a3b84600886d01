// A device in memory that does on purpose what disks do at their worst, the same for the same seed.
//
// It loses what was not synced when it crashes: each block that was written since is there, or as
// it was before, or torn between the two at a sector; each name that was made or removed since is
// there or not. Transfers fail, end in any order, late, or not until the faults are changed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "store/ssd/device.h"

namespace trireme::ssd {

class FakeDevice : public Device {
 public:
  // Probabilities in [0, 1].
  struct Faults {
    double read_error = 0;   // of a transfer: EIO
    double write_error = 0;  // the same; some of its blocks may have been written
    double sync_error = 0;   // EIO; as on Linux the next sync may succeed, and what this one lost
                             // stays lost
    double late = 0;         // of a transfer at each reap that can do without it
    double stuck = 0;        // of a transfer: it does not end while this is above 0, and neither
                             // does the destructor of its queue
    std::uint64_t num_reads = std::numeric_limits<std::uint64_t>::max();  // then all fail
    bool is_read_only = false;  // no file can be made or removed either
    std::uint64_t capacity_bytes = std::numeric_limits<std::uint64_t>::max();
  };

  explicit FakeDevice(std::uint64_t seed);
  ~FakeDevice() override;

  void set_faults(const Faults& faults);
  // Loses what a crash may lose. Files that were open are closed. Requires: no queue exists.
  void crash();
  // Inverts a bit of a file, as a disk does that does not notice.
  void flip_bit(const std::string& name, std::uint64_t bit);
  // From here on no transfer of this block of a file succeeds: EIO.
  void spoil(const std::string& name, std::uint64_t block);

  // Calls that reached the disk since the start.
  struct Counts {
    std::uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0, syncs = 0;
  };
  Counts counts() const;

  std::unique_ptr<Queue> make_queue(std::size_t depth) override;
  FileId create(const std::string& name, std::uint64_t num_bytes) override;
  FileId open(const std::string& name) override;
  std::uint64_t size(FileId file) override;
  bool claim(FileId file, std::uint64_t num_bytes) override;
  void close(FileId file) override;
  void sync(FileId file) override;
  std::vector<std::string> names() override;
  std::string path_of(const std::string& name) const override { return name; }
  void remove(const std::string& name) override;
  void link(const std::string& name, const std::string& further) override;
  void sync_names() override;

 private:
  class FakeQueue;
  struct File;
  using FilePtr = std::shared_ptr<File>;
  using Names = std::map<std::string, FilePtr>;

  bool happens(double probability);
  std::uint64_t below(std::uint64_t bound);
  FileId add_open(FilePtr file);
  void check_writable() const;
  bool has_space(std::uint64_t num_bytes) const;
  File& opened(FileId file);
  FilePtr& named(const std::string& name);
  int carry_out(const Transfer& transfer);

  mutable std::mutex mutex_;  // guards everything below
  std::uint64_t random_;
  Faults faults_;
  std::condition_variable changed_;  // faults_
  Counts counts_;
  Names names_, durable_names_;
  std::map<FileId, FilePtr> open_;
  FileId next_ = 0;
  int num_queues_ = 0;
};

}  // namespace trireme::ssd
