// A table that answers from frozen rows: those of an export, and over them those of later deltas.
//
// A key is sought in the newest layer first. What none of them has, or what a delta has removed, is
// answered as the training table answers an absent key.
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
  // Of an absent key so many weights are its initial ones, and the others zeros; kept as `dtype`
  // has them, see dtype_of.
  int initial_weights = 0;
  std::string dtype = "float32";
  std::string simd = "auto";  // see choose_isa
};

class FrozenTable {
 public:
  using Layers = std::vector<std::shared_ptr<const FrozenRows>>;

  // layers: newest first. Errors: kBadRequest without layers, for layers of several shapes, for a
  // last layer that lacks buckets, for more initial weights than a
  // row has, and as the initializer's and dtype_of's.
  FrozenTable(Layers layers, const FrozenTableConfig& config);

  // Floats that a lookup writes per key: statistics, and behind them weights.
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
