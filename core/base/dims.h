// Loops over the weights of a row, compiled for the common dims and once for any dim.
#pragma once

#include <type_traits>

#include "base/isa.h"

namespace trireme {

// Calls function(dim): dim is a std::integral_constant for the common dims, else an int.
template <class Function>
TRIREME_INLINE void with_dim(int dim, const Function& function) {
  switch (dim) {
    case 8:
      return function(std::integral_constant<int, 8>());
    case 16:
      return function(std::integral_constant<int, 16>());
    case 32:
      return function(std::integral_constant<int, 32>());
    case 64:
      return function(std::integral_constant<int, 64>());
    default:
      return function(dim);
  }
}

}  // namespace trireme
