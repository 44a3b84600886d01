// Which of some numbers are not finite.
#pragma once

#include <cstddef>
#include <span>

namespace trireme {

// The position of the first value that is NaN or infinite; values.size() if all are finite.
std::size_t first_not_finite(std::span<const float> values) noexcept;

}  // namespace trireme
