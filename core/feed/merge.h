// Merges several gradients into one: the contributions of the workers to a step, or of several
// backward passes.
//
// Threads: a pure function; the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "base/array.h"
#include "base/pool.h"

namespace trireme {

struct GradPart {
  std::span<const std::uint64_t> keys;  // (K_i,)
  std::span<const float> grads;         // (K_i, D)
  float scale;                          // each gradient is multiplied by it first; 1 changes no bit
};

struct Merged {
  Array<std::uint64_t>
      keys;            // (K,) the union, in the order of unique() over the concatenated parts
  Array<float> grads;  // (K, D) sums of scale * gradient, in the order of the parts
  Array<std::int32_t> index;  // (sum of K_i,) the row of each part's keys, concatenated
};

// Requires: sizes agree (the binding checks).
// Errors: kBadRequest if the parts have 2^31 keys or more together.
Merged merge(std::span<const GradPart> parts, std::size_t dim, Pool& pool);

}  // namespace trireme
