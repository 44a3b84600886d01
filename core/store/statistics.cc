#include "store/statistics.h"

#include "optim/power.h"

namespace trireme {

double ScoreRates::decay(std::uint32_t days) const noexcept { return power(decay_rate, days); }

void StatisticsPush::count(const RowLayout& layout, std::byte* row,
                           std::size_t position) const noexcept {
  const double show = show_click[2 * position];
  const double click = show_click[2 * position + 1];
  Score& score = layout.score(row);
  if (const std::uint32_t days = days_between(layout.stamp(row).time, time); days > 0) {
    const double decay = rates.decay(days);
    score.show *= decay;
    score.click *= decay;
  }
  score.show += show;
  score.click += click;
  score.delta_score = static_cast<float>(score.delta_score + rates.score(show, click));
  if (features != nullptr) score.feature = features[position];
}

}  // namespace trireme
