// Rows to bags and back: forward and backward of an embedding lookup.
//
// Shapes: B examples, F features, D columns, K rows, N positions, M occurrences.
// Bags are feature-major (feed/bags.h), outputs example-major: out[b, f] is next to out[b, f + 1].
// Threads: pure functions; the same bits for any number of threads and on any instruction set,
// because each output is summed in order of position, column by column, without fused
// multiply-adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/pool.h"

namespace trireme {

// The ids of all bags of a batch as rows of a matrix.
struct BagsOfRows {
  std::span<const std::int32_t> index;    // (N,) row of each position; -1 adds nothing
  std::span<const std::int64_t> offsets;  // (F*B + 1,), or empty: N = F*B, one position per bag
  std::span<const float> weights;         // (N,), or empty: 1
  std::size_t num_features;               // F
};

// out[b, f] = sum over positions i of bag f*B + b of weights[i] * rows[index[i]]; 0 for an empty
// bag. Requires: sizes agree (the binding checks). Errors: kBadRequest naming a wrong offset or
// row.
void gather(std::span<const float> rows,  // (K, D)
            std::size_t dim, const BagsOfRows& bags,
            std::span<float> out,  // (B, F, D)
            Pool& pool);

// The gradient of gather's output. It may be a part of a wider matrix: example b begins at data + b
// * stride.
struct BagGrads {
  const float* data;         // (B, F, D)
  std::size_t num_examples;  // B
  std::size_t num_features;  // F
  std::size_t dim;           // D
  std::size_t stride;        // >= F * D
};

// Where the gradients of each row come from.
struct RowsOfBags {
  std::span<const std::int32_t> order;   // (M,) positions
  std::span<const std::int32_t> starts;  // (K + 1,) of row k in order
  std::span<const std::int32_t> bags;    // (N,) -1 for none; or empty: position i is bag i
  std::span<const float> weights;        // (N,), or empty: 1
};

// out[k] = sum over p in order[starts[k]] .. order[starts[k + 1] - 1] of weights[p] * grad of the
// bag of p. Requires: sizes agree (the binding checks). Errors: kBadRequest naming a wrong start,
// position or bag.
void scatter(const BagGrads& grad, const RowsOfBags& from,
             std::span<float> out,  // (K, D)
             Pool& pool);

}  // namespace trireme
