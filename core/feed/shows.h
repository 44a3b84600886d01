// Statistics of the keys of a batch: how often each was shown and clicked, and which feature it
// came from.
//
// Shapes: B examples, F features, K rows.
// Threads: a pure function; the same bits for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/pool.h"
#include "feed/gather.h"

namespace trireme {

struct ExampleShows {
  std::span<const float> show_click;        // (B, 2), or empty: each example is one show, no click
  std::size_t num_examples;                 // B
  std::span<const std::uint32_t> features;  // (F,) the identifier of each feature
};

// show_click[k] = sum of the show and click of the examples of row k's occurrences, in order;
// feature[k] = that of the first occurrence. Positions without a bag are ignored; a row without
// other positions has feature 0. Requires: sizes agree (the binding checks). Errors: kBadRequest
// naming a wrong start, position or bag.
void sum_shows(const ExampleShows& examples, const RowsOfBags& from,
               std::span<float> show_click,       // (K, 2)
               std::span<std::uint32_t> feature,  // (K,)
               Pool& pool);

}  // namespace trireme
