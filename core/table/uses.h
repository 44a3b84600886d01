// How often and how lately the rows of a table were used.
//
// The weight of a row is the number of its uses, of which each counts half after a while. Of a row
// in memory it is kept as the moment at which it will have fallen to 1: that does not change with
// time, so that rows can be compared without being touched, and a use needs no more than a table of
// log2(2^x + 1) - x. A row takes its weight along to SSD and back, so that it is known also of rows
// that come to memory now and then. Time is the number of uses of all rows, for what matters is how
// soon others would need a row's memory.
//
// Threads: any. Two uses of one row at the same time may count as one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/isa.h"
#include "base/pages.h"
#include "store/arena.h"

namespace trireme {

class Uses {
 public:
  explicit Uses(std::size_t num_refs) : moments_(num_refs * kBytesPerRow) {}

  static constexpr std::size_t kBytesPerRow = sizeof(std::uint16_t);

  // A row comes to memory: a new one, used once, or one from SSD with what saved() has returned.
  void begin(Arena::Ref ref) noexcept { set(ref, 0); }
  void begin(Arena::Ref ref, std::uint8_t saved, std::uint64_t time) noexcept {
    set(ref, weight_of(saved, time));
  }
  TRIREME_INLINE void prefetch(Arena::Ref ref) const noexcept {
    __builtin_prefetch(moments_.data() + ref * kBytesPerRow, 1);
  }
  void count(Arena::Ref ref) noexcept {
    const std::uint16_t word = word_of(ref).load(std::memory_order_relaxed);
    if ((word & kExpected) != 0) {
      word_of(ref).store(word & kMoment, std::memory_order_relaxed);
    } else {
      add(ref);
    }
  }
  // A use that is to come: it counts now, so that the row is not taken for an unused one meanwhile.
  void expect(Arena::Ref ref) noexcept {
    if ((word_of(ref).load(std::memory_order_relaxed) & kExpected) != 0) return;
    add(ref);
    const std::uint16_t word = word_of(ref).load(std::memory_order_relaxed);
    word_of(ref).store(word | kExpected, std::memory_order_relaxed);
  }
  void copy(Arena::Ref from, Arena::Ref to) noexcept {
    word_of(to).store(word_of(from).load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  // Keeps the moments of rows that are not used near enough to be told from later ones: to be
  // called for each row before 250 halvings have passed.
  void keep(Arena::Ref ref) noexcept {
    if (log_weight(ref) > -kWeightMax) return;
    const std::uint16_t word = word_of(ref).load(std::memory_order_relaxed);
    set(ref, -kWeightMax);
    if ((word & kExpected) == 0) return;
    word_of(ref).store(word_of(ref).load(std::memory_order_relaxed) | kExpected,
                       std::memory_order_relaxed);
  }

  // The logarithm of the row's weight, in kStep per halving: from -kWeightMax to kWeightMax.
  int log_weight(Arena::Ref ref) const noexcept {
    const std::uint16_t word = word_of(ref).load(std::memory_order_relaxed);
    const auto ahead = static_cast<std::uint16_t>(word - static_cast<std::uint16_t>(time()));
    // The highest of the bits of a moment is its sign.
    return clamped(static_cast<std::int16_t>(static_cast<std::uint16_t>(ahead << 1)) >> 1);
  }

  // The weight as a byte, as of time(); and what that has become since.
  std::uint8_t saved(Arena::Ref ref) const noexcept { return byte_of(log_weight(ref)); }
  std::uint8_t saved(std::uint8_t saved_then, std::uint64_t then) const noexcept {
    return byte_of(weight_of(saved_then, then));
  }

  std::uint64_t time() const noexcept { return time_.load(std::memory_order_relaxed); }
  // Time passes: so many uses, with so many rows in memory.
  void pass(std::size_t num_uses, std::size_t num_rows) noexcept;
  // Goes on with the time of an earlier clock, if that is later: to it rows in memory are as old.
  void go_on(std::uint64_t time) noexcept;

 private:
  static constexpr int kStep = 64;
  // 2^6 uses: with more, a row that is never used again would stay for longer, and no others weigh
  // as little as those that leave.
  static constexpr int kWeightMax = 6 * kStep;
  // Each row in memory has been used so many times, on average, when a use counts half. A step of
  // training uses its rows twice: it pulls them and pushes to them.
  static constexpr std::size_t kUsesPerHalving = 60;
  // The weight of a row fits into a byte.
  static constexpr int kByteStep = 4;
  static_assert(2 * kWeightMax / kByteStep <= 0xFF);
  // A word has a moment, and whether a use has been counted that is to come.
  static constexpr std::uint16_t kMoment = 0x7FFF, kExpected = 0x8000;

  static const std::array<std::uint16_t, 2 * kWeightMax + 1> kMore;

  static int clamped(int weight) noexcept {
    return weight < -kWeightMax ? -kWeightMax : weight > kWeightMax ? kWeightMax : weight;
  }
  static std::uint8_t byte_of(int log_weight) noexcept {
    return static_cast<std::uint8_t>((log_weight + kWeightMax + kByteStep / 2) / kByteStep);
  }
  int weight_of(std::uint8_t saved, std::uint64_t then) const noexcept {
    const std::uint64_t now = time();
    const std::uint64_t passed = now > then ? now - then : 0;
    const int lost = passed < 2 * kWeightMax ? static_cast<int>(passed) : 2 * kWeightMax;
    return clamped(saved * kByteStep - kWeightMax - lost);
  }
  void add(Arena::Ref ref) noexcept {
    const int weight = log_weight(ref);
    set(ref, clamped(weight + kMore[static_cast<std::size_t>(weight + kWeightMax)]));
  }
  void set(Arena::Ref ref, int log_weight) noexcept {
    const auto moment = static_cast<std::uint16_t>(time()) + log_weight;
    word_of(ref).store(static_cast<std::uint16_t>(moment) & kMoment, std::memory_order_relaxed);
  }
  std::atomic_ref<std::uint16_t> word_of(Arena::Ref ref) const noexcept {
    return std::atomic_ref(reinterpret_cast<std::uint16_t*>(moments_.data())[ref]);
  }

  const Pages moments_;
  std::atomic<std::uint64_t> time_{0};
  std::atomic<std::size_t> num_uses_{0};  // that are not in time_ yet
};

}  // namespace trireme
