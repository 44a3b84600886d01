// Loops over the elements of a row that the compiler turns into vector instructions.
//
// Inner loops have constant length, so they can be vectorized for any vector width. The order of
// sums is fixed. So the operations on each element are the same for every instruction set.
#pragma once

#include "base/isa.h"

namespace trireme {

// Calls f(j) for every j in [0, dim). The calls must not depend on one another.
template <class F>
TRIREME_INLINE void for_lanes(int dim, const F& f) noexcept {
  int j = 0;
  for (; j + 16 <= dim; j += 16) {
    TRIREME_INDEPENDENT
#pragma GCC unroll 1
    for (int lane = 0; lane < 16; ++lane) f(j + lane);
  }
  if (j + 8 <= dim) {
    TRIREME_INDEPENDENT
#pragma GCC unroll 1
    for (int lane = 0; lane < 8; ++lane) f(j + lane);
    j += 8;
  }
  if (j + 4 <= dim) {
    TRIREME_INDEPENDENT
#pragma GCC unroll 1
    for (int lane = 0; lane < 4; ++lane) f(j + lane);
    j += 4;
  }
  for (; j < dim; ++j) f(j);
}

// The sum of f(j) over j in [0, dim): sixteen partial sums (j modulo 16), then halved four times.
template <class F>
TRIREME_INLINE float sum_lanes(int dim, const F& f) noexcept {
  if (dim == 1) return 0.0F + f(0);  // the same bits as below
  float partial[16] = {};
  int j = 0;
  for (; j + 16 <= dim; j += 16) {
    for (int lane = 0; lane < 16; ++lane) partial[lane] += f(j + lane);
  }
  for (int lane = 0; j + lane < dim; ++lane) partial[lane] += f(j + lane);
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

}  // namespace trireme
