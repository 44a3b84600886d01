#include "fake_device.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/hash.h"

namespace trireme::ssd {

namespace {

constexpr std::size_t kSectorBytes = 512;

using Block = std::array<std::byte, kBlockBytes>;
using Blocks = std::map<std::uint64_t, Block>;  // by their number in the file

}  // namespace

struct FakeDevice::File {
  std::vector<std::byte> bytes;
  // What was on the disk before, of the blocks that were written since the last sync, and of those
  // that a failed sync has lost.
  Blocks before, lost;
  std::set<std::uint64_t> spoiled;  // blocks

  std::span<std::byte> block(std::uint64_t number) {
    return std::span(bytes).subspan(number * kBlockBytes, kBlockBytes);
  }

  void write(std::uint64_t number, std::span<const std::byte> content) {
    if (auto lost_one = lost.extract(number)) {
      before.insert(std::move(lost_one));
    } else if (!before.contains(number)) {
      std::ranges::copy(block(number), before[number].begin());
    }
    std::ranges::copy(content, block(number).begin());
  }
};

class FakeDevice::FakeQueue : public Queue {
 public:
  FakeQueue(std::size_t depth, FakeDevice& device) : depth_(depth), device_(device) {}
  ~FakeQueue() override {
    std::unique_lock lock(device_.mutex_);
    device_.changed_.wait(lock, [&] {
      return device_.faults_.stuck == 0 || std::ranges::none_of(waiting_, &Waiting::is_stuck);
    });
    for (const Waiting& waiting : waiting_) device_.carry_out(waiting.transfer);
    --device_.num_queues_;
  }

  std::size_t depth() const noexcept override { return depth_; }
  std::size_t num_in_flight() const noexcept override { return waiting_.size(); }

  std::size_t submit(std::span<const Transfer> transfers) override {
    for (const Transfer& transfer : transfers) check_transfer(transfer);
    const std::size_t n = std::min(transfers.size(), depth_ - waiting_.size());
    std::lock_guard lock(device_.mutex_);
    for (const Transfer& transfer : transfers.first(n)) {
      waiting_.push_back({transfer, device_.happens(device_.faults_.stuck)});
    }
    return n;
  }

  std::size_t reap(std::span<Finished> finished, std::size_t num_min,
                   std::chrono::milliseconds timeout) override {
    TRIREME_CHECK(num_min <= num_in_flight() && num_min <= finished.size());
    std::lock_guard lock(device_.mutex_);
    const bool may_be_stuck = device_.faults_.stuck > 0;
    const auto is_free = [&](const Waiting& w) { return !(may_be_stuck && w.is_stuck); };
    auto num_free = static_cast<std::size_t>(std::ranges::count_if(waiting_, is_free));
    if (num_free < num_min) {
      throw Error(ErrorCode::kDeadlineExceeded,
                  "Queue.reap: expected " + std::to_string(num_min) + " transfers to end within " +
                      std::to_string(timeout.count()) + " ms, found " + std::to_string(num_free));
    }
    std::size_t n = 0;
    for (; num_free > 0 && n < finished.size(); --num_free) {
      if (n >= num_min && device_.happens(device_.faults_.late)) continue;
      std::uint64_t number = device_.below(num_free);
      const auto chosen = std::ranges::find_if(
          waiting_, [&](const Waiting& w) { return is_free(w) && number-- == 0; });
      finished[n++] = {chosen->transfer.tag, device_.carry_out(chosen->transfer)};
      waiting_.erase(chosen);
    }
    return n;
  }

 private:
  struct Waiting {
    Transfer transfer;
    bool is_stuck;
  };

  const std::size_t depth_;
  FakeDevice& device_;
  std::vector<Waiting> waiting_;
};

FakeDevice::FakeDevice(std::uint64_t seed) : random_(seed) {}
FakeDevice::~FakeDevice() = default;

std::uint64_t FakeDevice::below(std::uint64_t bound) {
  return mix64(random_ += 0x9E3779B97F4A7C15ULL) % bound;
}

bool FakeDevice::happens(double probability) {
  return probability > 0 && static_cast<double>(below(1U << 30)) < probability * (1U << 30);
}

void FakeDevice::set_faults(const Faults& faults) {
  std::lock_guard lock(mutex_);
  faults_ = faults;
  changed_.notify_all();
}

void FakeDevice::crash() {
  std::lock_guard lock(mutex_);
  TRIREME_CHECK(num_queues_ == 0);
  std::set<std::string> all;
  for (const Names& names : {names_, durable_names_}) {
    for (const auto& [name, file] : names) all.insert(name);
  }
  Names kept;
  std::set<File*> files;
  for (const std::string& name : all) {
    const Names& names = happens(0.5) ? names_ : durable_names_;
    const auto file = names.find(name);
    if (file == names.end()) continue;
    kept.insert(*file);
    files.insert(file->second.get());
  }
  for (File* file : files) {
    file->before.merge(file->lost);
    file->lost.clear();
    for (const auto& [number, before] : file->before) {
      // Sectors from the beginning as they were written, the others as before.
      const std::uint64_t choice = below(3);
      const std::size_t num_new = choice == 0   ? 0
                                  : choice == 1 ? kBlockBytes
                                                : kSectorBytes * below(8);
      std::ranges::copy(std::span(before).subspan(num_new),
                        file->block(number).subspan(num_new).begin());
    }
    file->before.clear();
  }
  names_ = durable_names_ = kept;
  open_.clear();
}

void FakeDevice::flip_bit(const std::string& name, std::uint64_t bit) {
  std::lock_guard lock(mutex_);
  named(name)->bytes.at(bit / 8) ^= std::byte{1} << (bit % 8);
}

void FakeDevice::spoil(const std::string& name, std::uint64_t block) {
  std::lock_guard lock(mutex_);
  named(name)->spoiled.insert(block);
}

FakeDevice::Counts FakeDevice::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

std::unique_ptr<Queue> FakeDevice::make_queue(std::size_t depth) {
  TRIREME_CHECK(depth >= 1);
  std::lock_guard lock(mutex_);
  ++num_queues_;
  return std::make_unique<FakeQueue>(depth, *this);
}

FileId FakeDevice::create(const std::string& name, std::uint64_t num_bytes) {
  std::lock_guard lock(mutex_);
  check_writable();
  if (names_.contains(name)) {
    throw Error(ErrorCode::kUnavailable, "ssd: expected to make " + name + ", found it");
  }
  if (!has_space(num_bytes)) {
    throw FullDevice("ssd: expected to take " + std::to_string(num_bytes) + " bytes for " + name +
                     ", found the device full");
  }
  auto file = std::make_shared<File>();
  // What a disk has at a place that was not written yet may be anything.
  file->bytes.assign(num_bytes, static_cast<std::byte>(below(256)));
  names_[name] = file;
  return add_open(std::move(file));
}

bool FakeDevice::claim(FileId file, std::uint64_t num_bytes) {
  std::lock_guard lock(mutex_);
  std::vector<std::byte>& bytes = opened(file).bytes;
  if (num_bytes <= bytes.size()) return true;
  if (!has_space(num_bytes - bytes.size())) return false;
  bytes.resize(num_bytes, static_cast<std::byte>(below(256)));
  return true;
}

bool FakeDevice::has_space(std::uint64_t num_bytes) const {
  std::set<File*> files;
  for (const auto& [name, file] : names_) files.insert(file.get());
  for (const File* file : files) num_bytes += file->bytes.size();
  return num_bytes <= faults_.capacity_bytes;
}

FileId FakeDevice::open(const std::string& name) {
  std::lock_guard lock(mutex_);
  return add_open(named(name));
}

std::uint64_t FakeDevice::size(FileId file) {
  std::lock_guard lock(mutex_);
  return opened(file).bytes.size();
}

void FakeDevice::close(FileId file) {
  std::lock_guard lock(mutex_);
  open_.erase(file);
}

void FakeDevice::sync(FileId file) {
  std::lock_guard lock(mutex_);
  ++counts_.syncs;
  File& synced = opened(file);
  if (happens(faults_.sync_error)) {
    synced.lost.merge(synced.before);
    synced.before.clear();
    throw Error(ErrorCode::kUnavailable, "ssd: expected to sync a file, found EIO");
  }
  synced.before.clear();
}

std::vector<std::string> FakeDevice::names() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, file] : names_) names.push_back(name);
  return names;
}

void FakeDevice::remove(const std::string& name) {
  std::lock_guard lock(mutex_);
  check_writable();
  named(name);
  names_.erase(name);
}

void FakeDevice::check_writable() const {
  if (faults_.is_read_only) throw Error(ErrorCode::kUnavailable, "ssd: found it read-only");
}

void FakeDevice::link(const std::string& name, const std::string& further) {
  std::lock_guard lock(mutex_);
  const FilePtr file = named(name);
  if (!names_.emplace(further, file).second) {
    throw Error(ErrorCode::kUnavailable, "ssd: expected to make " + further + ", found it");
  }
}

void FakeDevice::sync_names() {
  std::lock_guard lock(mutex_);
  if (happens(faults_.sync_error)) {
    throw Error(ErrorCode::kUnavailable, "ssd: expected to sync names, found EIO");
  }
  durable_names_ = names_;
}

FileId FakeDevice::add_open(FilePtr file) {
  open_[next_] = std::move(file);
  return next_++;
}

FakeDevice::File& FakeDevice::opened(FileId file) {
  const auto found = open_.find(file);
  TRIREME_CHECK(found != open_.end());
  return *found->second;
}

FakeDevice::FilePtr& FakeDevice::named(const std::string& name) {
  const auto found = names_.find(name);
  if (found == names_.end()) {
    throw Error(ErrorCode::kUnavailable, "ssd: expected a file " + name + ", found none");
  }
  return found->second;
}

// Returns 0 or an errno.
int FakeDevice::carry_out(const Transfer& transfer) {
  File& file = opened(transfer.file);
  const bool is_read = transfer.kind == Transfer::Kind::kRead;
  ++(is_read ? counts_.reads : counts_.writes);
  const auto spoiled = file.spoiled.lower_bound(transfer.offset / kBlockBytes);
  const bool is_spoiled = spoiled != file.spoiled.end() &&
                          *spoiled * kBlockBytes < transfer.offset + transfer.bytes.size();
  const bool is_gone = is_read && (faults_.num_reads == 0 || faults_.num_reads-- == 0);
  const bool fails = is_spoiled || is_gone || (faults_.is_read_only && !is_read) ||
                     happens(is_read ? faults_.read_error : faults_.write_error);
  for (std::size_t done = 0; done < transfer.bytes.size(); done += kBlockBytes) {
    if (fails && happens(0.5)) continue;
    const std::uint64_t number = (transfer.offset + done) / kBlockBytes;
    if ((number + 1) * kBlockBytes > file.bytes.size()) return is_read ? ENODATA : ENOSPC;
    const std::span<std::byte> part = transfer.bytes.subspan(done, kBlockBytes);
    if (is_read) {
      std::ranges::copy(file.block(number), part.begin());
    } else {
      file.write(number, part);
    }
  }
  (is_read ? counts_.read_bytes : counts_.written_bytes) += transfer.bytes.size();
  return fails ? EIO : 0;
}

}  // namespace trireme::ssd
