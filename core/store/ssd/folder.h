// The files of a folder, as every device on a real disk has them.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/ssd/device.h"

namespace trireme::ssd {

// File ids are descriptors of files that are open for direct I/O.
class Folder : public Device {
 public:
  // Errors: kBadRequest: there is no such folder. kUnavailable.
  explicit Folder(const std::string& path);
  ~Folder() override;

  FileId create(const std::string& name, std::uint64_t num_bytes) override;
  FileId open(const std::string& name) override;
  std::uint64_t size(FileId file) override;
  bool claim(FileId file, std::uint64_t num_bytes) override;
  void close(FileId file) override;
  void sync(FileId file) override;
  std::vector<std::string> names() override;
  std::string path_of(const std::string& name) const override { return path_ + "/" + name; }
  void remove(const std::string& name) override;
  void link(const std::string& name, const std::string& further) override;
  void sync_names() override;

 private:
  FileId remember(int descriptor, const std::string& name);
  bool is_full(std::uint64_t num_bytes) const noexcept;
  std::string name_of(FileId file);
  [[noreturn]] void fail(const std::string& what, const std::string& name, int error) const;

  const std::string path_;
  int folder_;
  std::mutex mutex_;
  std::unordered_map<FileId, std::string> names_;  // of the open files; guarded by mutex_
};

// Transfers of a queue that are in flight, by slot. A transfer may take several calls: the system
// may move fewer bytes than it was asked for.
class Slots {
 public:
  explicit Slots(std::size_t depth);

  std::size_t depth() const noexcept { return transfers_.size(); }
  std::size_t num_taken() const noexcept { return transfers_.size() - free_.size(); }

  // Requires: fewer than depth() are taken.
  std::uint32_t take(const Transfer& transfer);
  // What is left to transfer.
  const Transfer& rest(std::uint32_t slot) const noexcept { return transfers_[slot]; }

  enum class State { kGoesOn, kEnded };
  // Notes the result of a call, bytes or a negative errno. If the transfer has ended, its slot is
  // free and `finished` is set.
  State note(std::uint32_t slot, std::int64_t result, Finished& finished);

 private:
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> free_;
};

}  // namespace trireme::ssd
