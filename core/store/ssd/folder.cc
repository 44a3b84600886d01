#include "store/ssd/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/error.h"

namespace trireme::ssd {

namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

}  // namespace

void check_transfer(const Transfer& transfer) {
  const auto address = reinterpret_cast<std::uintptr_t>(transfer.bytes.data());
  const std::size_t size = transfer.bytes.size();
  if (size > 0 && (address | size | transfer.offset) % kBlockBytes == 0) return;
  throw Error(ErrorCode::kBadRequest,
              "Queue.submit: expected an address, a size and an offset in whole blocks of " +
                  std::to_string(kBlockBytes) + " bytes, found " + std::to_string(size) +
                  " bytes at offset " + std::to_string(transfer.offset) + ", address " +
                  std::to_string(address % kBlockBytes) + " bytes into a block");
}

Folder::Folder(const std::string& path)
    : path_(path), folder_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (folder_ >= 0) return;
  throw Error(ErrorCode::kBadRequest,
              "ssd: expected a folder at " + path + ", found " + text_of(errno));
}

Folder::~Folder() {
  for (const auto& [file, name] : names_) ::close(file);
  ::close(folder_);
}

FileId Folder::create(const std::string& name, std::uint64_t num_bytes) {
  if (is_full(num_bytes)) fail("take " + std::to_string(num_bytes) + " bytes for", name, ENOSPC);
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC;
  const int file = ::openat(folder_, name.c_str(), flags, 0600);
  if (file < 0) fail("make", name, errno);
  int error = ::flock(file, LOCK_EX | LOCK_NB) == 0 ? EINTR : errno;
  while (error == EINTR) error = ::posix_fallocate(file, 0, static_cast<off_t>(num_bytes));
  if (error != 0) {
    ::close(file);
    ::unlinkat(folder_, name.c_str(), 0);
    fail("take " + std::to_string(num_bytes) + " bytes for", name, error);
  }
  return remember(file, name);
}

// Whether the disk says that it has less room. A file system that is asked to take it all the same
// takes what there is, waits for its journal and gives it back: 20 to 200 ms each time, and a pull
// asks some hundred times. One of no size does not count.
bool Folder::is_full(std::uint64_t num_bytes) const noexcept {
  struct statvfs disk{};
  return ::fstatvfs(folder_, &disk) == 0 && disk.f_blocks > 0 &&
         std::uint64_t{disk.f_bfree} * disk.f_frsize < num_bytes;
}

// A lock lasts until the last transfer of its file has ended, which may be after its process has.
bool Folder::claim(FileId file, std::uint64_t num_bytes) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    fail("lock", name_of(file), errno);
  }
  while (::fallocate(file, 0, 0, static_cast<off_t>(num_bytes)) != 0) {
    if (errno == ENOSPC || errno == EDQUOT || errno == EOPNOTSUPP) return false;
    if (errno != EINTR) fail("take space for", name_of(file), errno);
  }
  return true;
}

FileId Folder::open(const std::string& name) {
  const int file = ::openat(folder_, name.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (file < 0) fail("open", name, errno);
  return remember(file, name);
}

FileId Folder::remember(int descriptor, const std::string& name) {
  std::lock_guard lock(mutex_);
  names_[descriptor] = name;
  return descriptor;
}

std::uint64_t Folder::size(FileId file) {
  struct stat status{};
  if (::fstat(file, &status) != 0) fail("read the size of", name_of(file), errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void Folder::close(FileId file) {
  std::lock_guard lock(mutex_);
  names_.erase(file);
  ::close(file);
}

void Folder::sync(FileId file) {
  if (::fdatasync(file) != 0) fail("sync", name_of(file), errno);
}

std::vector<std::string> Folder::names() {
  // A descriptor of its own: two readers must not share a position.
  const int folder = ::openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* entries = folder < 0 ? nullptr : ::fdopendir(folder);
  if (entries == nullptr) {
    const int error = errno;
    if (folder >= 0) ::close(folder);
    fail("list", ".", error);
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(entries)) {
    if (entry->d_type != DT_DIR) names.emplace_back(entry->d_name);
  }
  const int error = errno;
  ::closedir(entries);
  if (error != 0) fail("list", ".", error);
  std::ranges::sort(names);
  return names;
}

void Folder::remove(const std::string& name) {
  if (::unlinkat(folder_, name.c_str(), 0) != 0) fail("remove", name, errno);
}

void Folder::link(const std::string& name, const std::string& further) {
  if (::linkat(folder_, name.c_str(), folder_, further.c_str(), 0) != 0) fail("link", name, errno);
}

void Folder::sync_names() {
  if (::fsync(folder_) != 0) fail("sync", ".", errno);
}

std::string Folder::name_of(FileId file) {
  std::lock_guard lock(mutex_);
  const auto found = names_.find(file);
  return found == names_.end() ? "file " + std::to_string(file) : found->second;
}

void Folder::fail(const std::string& what, const std::string& name, int error) const {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  const std::string message =
      "ssd: expected to " + what + " " + path_ + "/" + name + ", found " + text_of(error);
  if (is_full) throw FullDevice(message);
  throw Error(ErrorCode::kUnavailable, message);
}

Slots::Slots(std::size_t depth) : transfers_(depth) {
  for (std::size_t slot = depth; slot-- > 0;) free_.push_back(static_cast<std::uint32_t>(slot));
}

std::uint32_t Slots::take(const Transfer& transfer) {
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  transfers_[slot] = transfer;
  return slot;
}

Slots::State Slots::note(std::uint32_t slot, std::int64_t result, Finished& finished) {
  Transfer& transfer = transfers_[slot];
  if (result == -EINTR || result == -EAGAIN) return State::kGoesOn;
  int error = result < 0 ? static_cast<int>(-result) : 0;
  if (result >= 0) {
    const auto num_bytes = static_cast<std::size_t>(result);
    transfer.bytes = transfer.bytes.subspan(num_bytes);
    transfer.offset += num_bytes;
    if (!transfer.bytes.empty()) {
      // Half a block cannot be continued: direct I/O takes whole ones.
      if (num_bytes > 0 && num_bytes % kBlockBytes == 0) return State::kGoesOn;
      error = transfer.kind == Transfer::Kind::kRead ? ENODATA : ENOSPC;
    }
  }
  finished = {.tag = transfer.tag, .error = error};
  free_.push_back(slot);
  return State::kEnded;
}

}  // namespace trireme::ssd
