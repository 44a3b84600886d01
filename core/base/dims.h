// Loops over the weights of a row, compiled for the usual dims besides the general case.
#pragma once

#include <type_traits>

#include "base/isa.h"

namespace trireme {

// Calls function(dim): with a std::integral_constant where dim is a usual one, else with the int.
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
