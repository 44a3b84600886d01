// How a push changes the statistics of a row, and how they decay.
//
//   score(show, click) = (show - click) * nonclk_coeff + click * click_coeff
//   push:  show = show * decay_rate^(days since the last push) + pushed show;  click likewise
//          delta_score += score(pushed show, pushed click);  time = max(time, the push's)
//   read:  show * decay_rate^(days since the last push)
//
// Days are whole days of data time. So rows decay without being written. Source: Paddle's
// CtrCommonAccessor, which multiplies every row once a day.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/isa.h"
#include "store/layout.h"

namespace trireme {

inline constexpr std::uint32_t kSecondsPerDay = 86'400;

// Days from one data time to another; 0 from a row whose pushes had none.
constexpr std::uint32_t days_between(std::uint32_t from, std::uint32_t to) noexcept {
  return from == 0 || to <= from ? 0 : to / kSecondsPerDay - from / kSecondsPerDay;
}

struct ScoreRates {
  double nonclk_coeff = 0.1;
  double click_coeff = 1.0;
  double decay_rate = 1.0;  // per day

  double score(double show, double click) const noexcept {
    return (show - click) * nonclk_coeff + click * click_coeff;
  }
  double score_of(const Score& statistics) const noexcept {
    return score(statistics.show, statistics.click);
  }
  double decay(std::uint32_t days) const noexcept;
};

struct ShowClick {
  double show;
  double click;
};

// The data time at which statistics are read.
struct DataTime {
  std::uint32_t time;  // seconds
  bool day_over;       // at the end of that day: shows and clicks have decayed once more

  ShowClick effective(const Stamp& stamp, const Score& score,
                      const ScoreRates& rates) const noexcept {
    const double decay = rates.decay(days_between(stamp.time, time) + (day_over ? 1 : 0));
    return {.show = score.show * decay, .click = score.click * decay};
  }
};

// The part of a push that concerns statistics.
struct StatisticsPush {
  ScoreRates rates;
  std::uint32_t version;
  std::uint32_t time;             // 0: the data has none
  const float* show_click;        // (K, 2) by position in the call; null if not scored
  const std::uint32_t* features;  // (K); null: features stay

  bool is_scored() const noexcept { return show_click != nullptr; }
  // Adds the push's statistics of a key. Requires: is_scored(); mark() is called after.
  void count(const RowLayout& layout, std::byte* row, std::size_t position) const noexcept {
    count(layout.stamp(row), layout.score(row), position);
  }
  void count(const Stamp& stamp, Score& score, std::size_t position) const noexcept {
    const double show = show_click[2 * position];
    const double click = show_click[2 * position + 1];
    if (const std::uint32_t days = days_between(stamp.time, time); days > 0) {
      const double decay = rates.decay(days);
      score.show *= decay;
      score.click *= decay;
    }
    score.show += show;
    score.click += click;
    score.delta_score = static_cast<float>(score.delta_score + rates.score(show, click));
    if (features != nullptr) score.feature = features[position];
  }
  TRIREME_INLINE void mark(const RowLayout& layout, std::byte* row) const noexcept {
    mark(layout.stamp(row));
  }
  TRIREME_INLINE void mark(Stamp& stamp) const noexcept {
    stamp.version = version;
    stamp.time = std::max(stamp.time, time);
  }
};

}  // namespace trireme
