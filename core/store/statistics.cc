#include "store/statistics.h"

#include "base/power.h"

namespace trireme {

double ScoreRates::decay(std::uint32_t days) const noexcept { return power(decay_rate, days); }

}  // namespace trireme
