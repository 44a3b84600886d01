// A table of frozen rows: those of an export, overlaid by those of later deltas.
//
// A key is searched in the newest layer first. A key that no layer has, or that a delta has
// removed, gets what the training table returns for an absent key.
// Threads: nothing changes after the constructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/isa.h"
#include "base/pool.h"
#include "frozen/rows.h"
#include "optim/initializer.h"
#include "store/dtype.h"

namespace trireme {

struct FrozenTableConfig {
  std::string initializer = "uniform";
  float init_a = 0.0F;
  float init_b = 0.0F;
  std::uint64_t seed = 0;
  // An absent key has this many initial weights, rounded to `dtype` (see dtype_of); its other
  // weights are zeros.
  int initial_weights = 0;
  std::string dtype = "float32";
  std::string simd = "auto";  // see choose_isa
};

class FrozenTable {
 public:
  using Layers = std::vector<std::shared_ptr<const FrozenRows>>;

  // layers: newest first. Errors: kBadRequest without layers, for layers of different shapes, for a
  // last layer that lacks buckets, for more initial weights than a row has; and those of the
  // initializer and dtype_of.
  FrozenTable(Layers layers, const FrozenTableConfig& config);

  // Floats that a lookup writes per key: statistics, then weights.
  int width() const noexcept { return layers_.front()->statistics() + layers_.front()->dim(); }

  // As Table::lookup; the statistics of an absent key are zeros.
  // keys: (N).  out: (N, width).  Returns how many were absent.
  std::size_t lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool) const;

 private:
  class Search;

  std::size_t lookup_block(std::span<const std::uint64_t> keys, float* out) const;
  void write_absent(std::uint64_t key, float* values) const noexcept;

  const Layers layers_;
  const Isa isa_;
  const Initializer initializer_;
  const int initial_weights_;
  const Dtype dtype_;
};

}  // namespace trireme
