#include "feed/columns.h"

#include <algorithm>
#include <array>

namespace trireme {
namespace {

constexpr std::size_t kTileRows = 8;  // rows whose keys fill one cache line per feature

// Copies blocks to their places in the columns, any of them at the same time.
class Transposition {
 public:
  Transposition(const Layout& layout, std::span<const Rows> blocks, Pool& pool)
      : layout_(layout), blocks_(blocks), first_rows_(blocks.size() + 1), next_(blocks.size()) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      first_rows_[i + 1] = first_rows_[i] + blocks[i].size();
    }
    pool.run(blocks.size(), [&](std::size_t i) { next_[i] = num_keys_of_block(i); });
    // How many keys of each feature a block has becomes where they begin.
    for (std::size_t f = 0; f < layout.num_features; ++f) {
      for (std::vector<std::int64_t>& next : next_) {
        const std::int64_t count = next[f];
        next[f] = num_keys_;
        num_keys_ += count;
      }
    }
  }

  std::size_t num_rows() const noexcept { return first_rows_.back(); }
  std::size_t num_keys() const noexcept { return static_cast<std::size_t>(num_keys_); }

  void copy_numbers(std::size_t block, std::vector<Array<float>>& out) const {
    const std::size_t num_numbers = layout_.num_numbers();
    const float* column = blocks_[block].numbers();
    for (std::size_t c = 0; c < out.size(); ++c) {
      const std::size_t dim = layout_.dims[c];
      float* to = out[c].data() + first_rows_[block] * dim;
      for (std::size_t b = 0; b < blocks_[block].size(); ++b, to += dim) {
        std::copy_n(column + b * num_numbers, dim, to);
      }
      column += dim;
    }
  }

  // The places of one example's keys lie about a batch apart, often a multiple of the cache's size:
  // written one by one, they would fight for the same lines. So a few rows go feature by feature,
  // and write about a line of each.
  void copy_keys(std::size_t block, Columns& out) {
    const Rows& rows = blocks_[block];
    for (std::size_t begin = 0; begin < rows.size(); begin += kTileRows) {
      Tile tile{rows.counts() + begin * layout_.num_features, {}, {}};
      const std::size_t num_rows = std::min(kTileRows, rows.size() - begin);
      for (std::size_t r = 0; r < num_rows; ++r) {
        tile.keys[r] = rows.keys_of(begin + r);
        tile.weights[r] = rows.weights_of(begin + r);
      }
      std::int64_t* const offsets = out.offsets.data() + first_rows_[block] + begin;
      if (layout_.has_weights) {
        copy_tile<true>(tile, num_rows, next_[block].data(), offsets, out);
      } else {
        copy_tile<false>(tile, num_rows, next_[block].data(), offsets, out);
      }
    }
  }

 private:
  struct Tile {
    const std::uint32_t* counts;
    std::array<const std::uint64_t*, kTileRows> keys;  // the next of each row
    std::array<const float*, kTileRows> weights;
  };

  std::vector<std::int64_t> num_keys_of_block(std::size_t block) const {
    std::vector<std::int64_t> sums(layout_.num_features);
    const std::uint32_t* counts = blocks_[block].counts();
    for (std::size_t b = 0; b < blocks_[block].size(); ++b) {
      for (std::int64_t& sum : sums) sum += *counts++;
    }
    return sums;
  }

  // next: the place of each feature's next key. offsets: those of the first feature's bags.
  template <bool has_weights>
  void copy_tile(Tile& tile, std::size_t num_rows, std::int64_t* next, std::int64_t* offsets,
                 Columns& out) const noexcept {
    const std::size_t num_features = layout_.num_features;
    for (std::size_t f = 0; f < num_features; ++f, offsets += out.num_examples) {
      std::int64_t* keys = out.keys.data() + next[f];
      float* weights = has_weights ? out.weights.data() + next[f] : nullptr;
      for (std::size_t r = 0; r < num_rows; ++r) {
        offsets[r] = keys - out.keys.data();
        std::uint32_t count = tile.counts[r * num_features + f];
        for (; count > 0; --count) {
          *keys++ = static_cast<std::int64_t>(*tile.keys[r]++);
          if constexpr (has_weights) *weights++ = *tile.weights[r]++;
        }
      }
      next[f] = keys - out.keys.data();
    }
  }

  const Layout& layout_;
  std::span<const Rows> blocks_;
  std::vector<std::size_t> first_rows_;          // of each block, and after the last
  std::vector<std::vector<std::int64_t>> next_;  // of each block: the place of each feature's keys
  std::int64_t num_keys_ = 0;
};

StringColumn string_column(std::span<const Rows> blocks, std::size_t column, std::size_t num_rows) {
  std::size_t num_bytes = 0;
  for (const Rows& rows : blocks) num_bytes += rows.strings(column).size();
  StringColumn out{Array<std::uint8_t>(num_bytes), Array<std::int64_t>(num_rows + 1)};
  std::uint8_t* bytes = out.bytes.data();
  std::int64_t* offset = out.offsets.data();
  *offset = 0;
  for (const Rows& rows : blocks) {
    bytes = std::copy(rows.strings(column).begin(), rows.strings(column).end(), bytes);
    for (const std::size_t size : rows.string_sizes(column)) {
      offset[1] = offset[0] + static_cast<std::int64_t>(size);
      ++offset;
    }
  }
  return out;
}

}  // namespace

Columns to_columns(const Layout& layout, std::span<const Rows> blocks, Pool& pool) {
  Transposition work(layout, blocks, pool);
  Columns out;
  out.num_examples = work.num_rows();
  for (const std::size_t dim : layout.dims) out.numbers.emplace_back(out.num_examples * dim);
  out.keys = Array<std::int64_t>(work.num_keys());
  out.offsets = Array<std::int64_t>(layout.num_features * out.num_examples + 1);
  out.offsets[layout.num_features * out.num_examples] = static_cast<std::int64_t>(work.num_keys());
  if (layout.has_weights) out.weights = Array<float>(work.num_keys());
  pool.run(blocks.size(), [&](std::size_t i) {
    work.copy_numbers(i, out.numbers);
    work.copy_keys(i, out);
  });
  for (std::size_t c = 0; c < layout.num_strings; ++c) {
    out.strings.push_back(string_column(blocks, c, out.num_examples));
  }
  return out;
}

}  // namespace trireme
