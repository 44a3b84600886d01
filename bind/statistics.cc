// Row statistics, decayed to a later time, and their score.
#include "store/statistics.h"

#include <limits>
#include <string>
#include <utility>

#include "base/array.h"
#include "base/error.h"
#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

Result1<std::uint32_t> days_since(Array1<const std::uint32_t> times, std::int64_t time) {
  if (time < 0 || time > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorCode::kBadRequest,
                "days_between: expected 0 <= time < 2**32, found " + std::to_string(time));
  }
  Array<std::uint32_t> days(times.size());
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < times.size(); ++i) {
      days.data()[i] = days_between(times.data()[i], static_cast<std::uint32_t>(time));
    }
  }
  return result(std::move(days));
}

Result1<double> decay(double decay_rate, Array1<const std::uint32_t> days) {
  const ScoreRates rates{.decay_rate = decay_rate};
  Array<double> decays(days.size());
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < days.size(); ++i) decays.data()[i] = rates.decay(days.data()[i]);
  }
  return result(std::move(decays));
}

Result1<double> score(Array1<const double> shows, Array1<const double> clicks, double nonclk_coeff,
                      double click_coeff) {
  if (clicks.size() != shows.size()) {
    throw Error(ErrorCode::kBadRequest, "score: expected " + std::to_string(shows.size()) +
                                            " clicks, found " + std::to_string(clicks.size()));
  }
  const ScoreRates rates{.nonclk_coeff = nonclk_coeff, .click_coeff = click_coeff};
  Array<double> scores(shows.size());
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < shows.size(); ++i) {
      scores.data()[i] = rates.score(shows.data()[i], clicks.data()[i]);
    }
  }
  return result(std::move(scores));
}

}  // namespace

void register_statistics(nb::module_& m) {
  m.def("days_between", &days_since, "times"_a.noconvert(), "time"_a,
        R"(Return the whole days of data time from each of `times` to `time`, both in seconds.

0 where one of the two is 0 or `time` is earlier. times: (n,) uint32. Returns (n,) uint32.
Raises BadRequest unless 0 <= time < 2**32.)");
  m.def("decay", &decay, "decay_rate"_a, "days"_a.noconvert(),
        R"(Return decay_rate**days, the factor of a show or click after so many days.

The bits are the same as in shrink and lookup. days: (n,) uint32. Returns (n,) float64.)");
  m.def("score", &score, "shows"_a.noconvert(), "clicks"_a.noconvert(), "nonclk_coeff"_a,
        "click_coeff"_a,
        R"(Return the score of each row: (show - click) * nonclk_coeff + click * click_coeff.

The bits are the same as in the table. shows, clicks: (n,) float64. Returns (n,) float64.
Raises BadRequest if the sizes differ.)");
}

}  // namespace trireme::bind
