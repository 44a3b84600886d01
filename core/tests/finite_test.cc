// first_not_finite: every bit pattern of an exponent, at every position of a block.
#include "base/finite.h"

#include <limits>
#include <vector>

#include "check.h"

using namespace trireme;

int main() {
  using Limits = std::numeric_limits<float>;
  const std::vector<float> finite = {
      0.0F,          -0.0F,          Limits::max(),       Limits::lowest(),
      Limits::min(), -Limits::min(), Limits::denorm_min()};
  const std::vector<float> others = {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                                     -Limits::quiet_NaN(), Limits::signaling_NaN()};
  for (const std::size_t size : {0, 1, 7, 1023, 1024, 1025, 3000}) {
    std::vector<float> values(size);
    for (std::size_t i = 0; i < size; ++i) values[i] = finite[i % finite.size()];
    CHECK_EQUAL(first_not_finite(values), size);
    for (std::size_t i = 0; i < size; ++i) {
      const float before = values[i];
      values[i] = others[i % others.size()];
      CHECK_EQUAL(first_not_finite(values), i);
      values[i] = before;
    }
  }
}
