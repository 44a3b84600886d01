// Text eight bytes at a time: digits found and converted without a loop over bytes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trireme {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

inline constexpr std::size_t kWordBytes = 8;

constexpr std::uint64_t repeat(std::uint8_t byte) noexcept { return 0x0101010101010101ULL * byte; }
inline constexpr std::uint64_t kHighBits = repeat(0x80);
inline constexpr std::uint64_t kZeros = repeat('0');

// Requires: 8 bytes can be read.
inline std::uint64_t load_word(const char* p) noexcept {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// The same near the end of the text: zero bytes stand for those after it.
inline std::uint64_t load_word(const char* p, const char* text_end) noexcept {
  const auto size = static_cast<std::size_t>(text_end - p);
  if (size >= kWordBytes) [[likely]] {
    return load_word(p);
  }
  std::uint64_t word = 0;
  std::memcpy(&word, p, size);
  return word;
}

// Position 0..7 of the lowest byte whose high bit is set, 8 for none.
inline unsigned first_mark(std::uint64_t word) noexcept {
  return static_cast<unsigned>(std::countr_zero(word & kHighBits)) >> 3;  // countr_zero(0) is 64
}

// Position 0..7 of the first such byte, 8 for none. (The borrow of a true match can mark later
// bytes wrongly, never earlier ones.)
inline unsigned find_byte(std::uint64_t word, char byte) noexcept {
  const std::uint64_t x = word ^ repeat(static_cast<std::uint8_t>(byte));
  return first_mark((x - repeat(1)) & ~x);
}

// The first such byte in [p, end), or end. Requires: end <= text_end, see load_word.
inline const char* find_byte(const char* p, const char* end, const char* text_end,
                             char byte) noexcept {
  for (; p < end; p += kWordBytes) {
    const unsigned position = find_byte(load_word(p, text_end), byte);
    if (position < kWordBytes) return p + position < end ? p + position : end;
  }
  return end;
}

// How many of the first bytes are decimal digits, 0..8. (A carry marks later bytes only.)
inline unsigned count_digits(std::uint64_t word) noexcept {
  const std::uint64_t x = word ^ kZeros;
  return first_mark((x + repeat(0x80 - 10)) | x);
}

// The first `size` (0..8) characters moved to the end of the word, '0' put before them.
inline std::uint64_t right_align(std::uint64_t word, unsigned size) noexcept {
  if (size == kWordBytes) return word;
  return (word << 8 << (56 - 8 * size)) | (kZeros >> (8 * size));
}

// The number that eight decimal digits write, the most significant in the lowest byte.
inline std::uint64_t decimal_of(std::uint64_t word) noexcept {
  std::uint64_t v = word - kZeros;
  v = v * 10 + (v >> 8);  // bytes 0, 2, 4, 6: numbers below 100
  constexpr std::uint64_t kMask = 0x000000FF000000FFULL;
  v = (v & kMask) * (100 + (1000000ULL << 32)) + (v >> 16 & kMask) * (1 + (10000ULL << 32));
  return v >> 32;
}

// Eight hexadecimal digits, likewise; false if one is not. A byte below 0x80 plus (0x80 - c) has
// its high bit set when it is at least c.
inline bool parse_hex(std::uint64_t word, std::uint64_t& value) noexcept {
  const std::uint64_t lower = word | repeat(0x20);
  const std::uint64_t digit = (word + repeat(0x80 - '0')) & ~(word + repeat(0x80 - '9' - 1));
  const std::uint64_t letter = (lower + repeat(0x80 - 'a')) & ~(lower + repeat(0x80 - 'f' - 1));
  if ((((digit | letter) & ~word) & kHighBits) != kHighBits) return false;
  std::uint64_t v = (word & repeat(0x0F)) + ((letter & kHighBits) >> 7) * 9;
  v = (v << 4 | v >> 8) & 0x00FF00FF00FF00FFULL;
  v = (v << 8 | v >> 16) & 0x0000FFFF0000FFFFULL;
  value = (v << 16 | v >> 32) & 0xFFFFFFFFULL;
  return true;
}

}  // namespace trireme
