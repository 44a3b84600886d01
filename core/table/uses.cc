#include "table/uses.h"

#include <algorithm>
#include <cmath>

namespace trireme {

const std::array<std::uint16_t, 2 * Uses::kWeightMax + 1> Uses::kMore = [] {
  std::array<std::uint16_t, 2 * kWeightMax + 1> more{};
  for (int i = 0; i <= 2 * kWeightMax; ++i) {
    const double weight = double(i - kWeightMax) / kStep;
    const double sum = std::log2(std::exp2(weight) + 1) - weight;
    more[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(std::lround(sum * kStep));
  }
  return more;
}();

void Uses::pass(std::size_t num_uses, std::size_t num_rows) noexcept {
  const std::size_t step = std::max<std::size_t>(num_rows * kUsesPerHalving / kStep, 1);
  std::size_t sum = num_uses_.fetch_add(num_uses, std::memory_order_relaxed) + num_uses;
  if (sum < step) return;
  // Whoever else has added meanwhile goes on with what is left.
  if (!num_uses_.compare_exchange_strong(sum, sum % step, std::memory_order_relaxed)) return;
  time_.fetch_add(std::min<std::size_t>(sum / step, kStep), std::memory_order_relaxed);
}

void Uses::go_on(std::uint64_t time) noexcept {
  std::uint64_t now = time_.load(std::memory_order_relaxed);
  while (now < time && !time_.compare_exchange_weak(now, time, std::memory_order_relaxed)) {
  }
}

}  // namespace trireme
