// How often and how lately the rows in memory were used.
//
// The weight of a row is the number of its uses, of which each counts half after a while. It is
// kept as the moment at which it will have fallen to 1: that does not change with time, so that
// rows can be compared without being touched, and a use needs no more than a table of
// log2(2^x + 1) - x. Time is the number of uses of all rows, for what matters is how soon others
// would need a row's memory.
//
// Threads: any. Two uses of one row at the same time may count as one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/pages.h"
#include "store/arena.h"

namespace trireme {

class Uses {
 public:
  explicit Uses(std::size_t num_refs) : moments_(num_refs * kBytesPerRow) {}

  static constexpr std::size_t kBytesPerRow = sizeof(std::uint16_t);

  void begin(Arena::Ref ref) noexcept { set(ref, 0); }  // a row that is used for the first time
  void count(Arena::Ref ref) noexcept {
    const int weight = log_weight(ref);
    set(ref, weight + kMore[static_cast<std::size_t>(weight + kWeightMax)]);
  }
  void copy(Arena::Ref from, Arena::Ref to) noexcept { set(to, log_weight(from)); }
  // Keeps the moments of rows that are not used near enough to be told from later ones: to be
  // called for each row before 500 halvings have passed.
  void keep(Arena::Ref ref) noexcept { set(ref, log_weight(ref)); }

  // The logarithm of the row's weight, in kStep per halving: from -kWeightMax to kWeightMax.
  int log_weight(Arena::Ref ref) const noexcept {
    const auto moment = moment_of(ref).load(std::memory_order_relaxed);
    const int weight = static_cast<std::int16_t>(static_cast<std::uint16_t>(moment - now()));
    return weight < -kWeightMax ? -kWeightMax : weight > kWeightMax ? kWeightMax : weight;
  }

  // Time passes: so many uses, with so many rows in memory.
  void pass(std::size_t num_uses, std::size_t num_rows) noexcept;

 private:
  static constexpr int kStep = 64;
  // 2^5 uses: with more, a row that is never used again would stay for longer, and no others weigh
  // as little as those that leave.
  static constexpr int kWeightMax = 5 * kStep;
  // Each row in memory has been used so many times, on average, when a use counts half. A step of
  // training uses its rows twice: it pulls them and pushes to them.
  static constexpr std::size_t kUsesPerHalving = 20;

  static const std::array<std::uint16_t, 2 * kWeightMax + 1> kMore;

  std::uint16_t now() const noexcept { return now_.load(std::memory_order_relaxed); }
  void set(Arena::Ref ref, int log_weight) noexcept {
    moment_of(ref).store(static_cast<std::uint16_t>(now() + log_weight), std::memory_order_relaxed);
  }
  std::atomic_ref<std::uint16_t> moment_of(Arena::Ref ref) const noexcept {
    return std::atomic_ref(reinterpret_cast<std::uint16_t*>(moments_.data())[ref]);
  }

  const Pages moments_;
  std::atomic<std::uint16_t> now_{0};
  std::atomic<std::size_t> num_uses_{0};  // that are not in now_ yet
};

}  // namespace trireme
