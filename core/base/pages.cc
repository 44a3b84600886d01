#include "base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

// Builds with a sanitizer have a page behind all memory that nothing may touch.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kGuardBytes = kPageBytes;
#else
constexpr std::size_t kGuardBytes = 0;
#endif

[[noreturn]] void fail(std::size_t bytes) {
  const int error = errno;
  throw Error(ErrorCode::kResourceExhausted,
              "Pages: expected " + std::to_string(bytes) +
                  " bytes from the system, found: " + std::generic_category().message(error));
}

std::byte* map(std::size_t bytes, int protection) {
  void* p = ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail(bytes);
  return static_cast<std::byte*>(p);
}

}  // namespace

Pages::Pages(std::size_t bytes) : bytes_(round_up(bytes, kPageBytes)) {
  if (bytes_ == 0) return;
  data_ = map(bytes_ + kGuardBytes, PROT_READ | PROT_WRITE);
  if (kGuardBytes > 0) ::mprotect(data_ + bytes_, kGuardBytes, PROT_NONE);
}

Pages Pages::reserve(std::size_t bytes, std::size_t alignment) {
  Pages pages;
  pages.bytes_ = round_up(bytes, kPageBytes);
  // The system aligns to small pages only. So reserve more, and release both ends.
  std::byte* raw = map(pages.bytes_ + kGuardBytes + alignment, PROT_NONE);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t head = round_up(address, alignment) - address;
  pages.data_ = raw + head;
  if (head > 0) ::munmap(raw, head);
  if (head < alignment) {
    ::munmap(pages.data_ + pages.bytes_ + kGuardBytes, alignment - head);
  }
  return pages;
}

Pages::~Pages() {
  if (data_ != nullptr) ::munmap(data_, bytes_ + kGuardBytes);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void Pages::resize(std::size_t bytes) {
  bytes = round_up(bytes, kPageBytes);
  if (bytes == bytes_) return;
  if (data_ == nullptr || bytes == 0) {
    *this = Pages(bytes);
    return;
  }
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  // TSan does not know mremap: it would report races between the memory's new owner and threads
  // that used these addresses before. And a mapping does not take its guard along.
  Pages moved(bytes);
  std::memcpy(moved.data_, data_, std::min(bytes, bytes_));
  *this = std::move(moved);
#else
  void* p = ::mremap(data_, bytes_, bytes, MREMAP_MAYMOVE);
  if (p == MAP_FAILED) fail(bytes);
  data_ = static_cast<std::byte*>(p);
  bytes_ = bytes;
#endif
}

void make_writable(std::byte* data, std::size_t bytes) {
  if (::mprotect(data, bytes, PROT_READ | PROT_WRITE) != 0) fail(bytes);
}

void give_back(std::byte* data, std::size_t bytes) noexcept {
  ::madvise(data, bytes, MADV_DONTNEED);
}

std::size_t memory_bytes() noexcept {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

void advise(std::byte* data, std::size_t bytes, PageAdvice advice) noexcept {
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse =
      25;  // Linux 6.1; older kernels return EINVAL and collapse in the background
#endif
  ::madvise(data, bytes, advice == PageAdvice::kSmall ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  if (advice == PageAdvice::kMakeHuge) ::madvise(data, bytes, kCollapse);
}

void advise_huge_within(void* data, std::size_t bytes) noexcept {
  if (bytes < 2 * kHugePageBytes) return;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::size_t begin = round_up(address, kHugePageBytes) - address;
  const std::size_t end = (address + bytes) / kHugePageBytes * kHugePageBytes - address;
  if (begin < end) advise(static_cast<std::byte*>(data) + begin, end - begin, PageAdvice::kHuge);
}

}  // namespace trireme
