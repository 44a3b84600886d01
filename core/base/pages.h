// Memory from the operating system, in whole pages. Not for small objects.
//
// Threads: a Pages object belongs to one owner; the memory behind it may be shared.
#pragma once

#include <cstddef>

namespace trireme {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) noexcept {
  return (n + multiple - 1) / multiple * multiple;
}

class Pages {
 public:
  Pages() = default;
  // Zeroed memory. Errors: kResourceExhausted, with the size and the system's reason.
  explicit Pages(std::size_t bytes);
  // Reserves address space without memory, see make_writable. It begins at a multiple of
  // `alignment` (a power of two, at least a page). Errors: kResourceExhausted.
  static Pages reserve(std::size_t bytes, std::size_t alignment);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  // Changes the size and keeps the content. The memory may move. Nothing changes on an error.
  // Requires: not created by reserve(). Errors: kResourceExhausted.
  void resize(std::size_t bytes);

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Turns whole pages of reserved address space into zeroed memory. Errors: kResourceExhausted.
void make_writable(std::byte* data, std::size_t bytes);

// Gives the memory of whole pages back to the system; it is zeros when it is used again.
void give_back(std::byte* data, std::size_t bytes) noexcept;

// The memory of this machine.
std::size_t memory_bytes() noexcept;

// How the system should back a range of whole huge pages. This is advice: if the system ignores it,
// the pages are small.
enum class PageAdvice {
  kSmall,     // take memory in small pages, as it is touched
  kHuge,      // take memory in huge pages
  kMakeHuge,  // the range is in use: replace its small pages by huge ones, keeping the content
};
void advise(std::byte* data, std::size_t bytes, PageAdvice advice) noexcept;

// Advises kHuge for the huge pages that lie within memory of any alignment. Less memory than two
// huge pages is left as it is.
void advise_huge_within(void* data, std::size_t bytes) noexcept;

}  // namespace trireme
