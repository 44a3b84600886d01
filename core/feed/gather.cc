// Design: one kernel per number of vectors in a column block, so that a row of any width is read
// and summed in registers. The last vector of a row overlaps the one before it where the width is
// not a multiple of the vector; the overlapping columns are computed twice, to the same bits, which
// is cheaper than a scalar tail. Rows and gradients are read in random order: each kernel
// prefetches what it will read a little later.
#include "feed/gather.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/isa.h"
#include "feed/bags.h"
#include "feed/chunks.h"

namespace trireme {
namespace {

// Four lanes exist on every x86-64 and ARM CPU. Measured on a CPU with AVX-512, wider vectors gain
// nothing here: the time goes into memory, not into arithmetic.
constexpr std::size_t kLanes = 4;        // floats per vector
constexpr std::size_t kVectorsMax = 16;  // vectors per column block
constexpr std::size_t kBlock = kLanes * kVectorsMax;
constexpr std::size_t kLineFloats = 16;      // floats per cache line
constexpr std::size_t kTile = 64;            // examples whose rows gather copies in turn
constexpr std::size_t kRowsAhead = 32;       // prefetched by gather when it copies
constexpr std::size_t kIdsAhead = 16;        // prefetched by gather from each feature's bags
constexpr std::size_t kPositionsAhead = 16;  // prefetched by scatter
constexpr std::size_t kChunkFloatsMin = std::size_t{1}
                                        << 16;  // less is not worth waking a thread for

using Vec = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

// A part of the columns of a row; width <= kBlock.
struct Columns {
  std::size_t begin;
  std::size_t width;
};

// V vectors that cover `width` floats, or, for V == 0, fewer floats than a vector has.
template <std::size_t V>
class Block {
 public:
  explicit Block(std::size_t width) noexcept : last_(width - kLanes) {}

  void add(const float* from, float weight) noexcept {
    for (std::size_t v = 0; v < V; ++v) {
      sum_[v] += *reinterpret_cast<const Vec*>(from + offset(v)) * weight;
    }
  }
  void store(float* to) const noexcept {
    for (std::size_t v = 0; v < V; ++v) *reinterpret_cast<Vec*>(to + offset(v)) = sum_[v];
  }
  void copy(const float* from, float* to) noexcept {
    for (std::size_t v = 0; v < V; ++v) sum_[v] = *reinterpret_cast<const Vec*>(from + offset(v));
    store(to);
  }

 private:
  std::size_t offset(std::size_t v) const noexcept { return v + 1 < V ? v * kLanes : last_; }

  std::size_t last_;
  Vec sum_[V] = {};
};

template <>
class Block<0> {
 public:
  explicit Block(std::size_t width) noexcept : width_(width) {}

  void add(const float* from, float weight) noexcept {
    for (std::size_t i = 0; i < width_; ++i) sum_[i] += from[i] * weight;
  }
  void store(float* to) const noexcept { std::copy_n(sum_, width_, to); }
  void copy(const float* from, float* to) noexcept { std::copy_n(from, width_, to); }

 private:
  std::size_t width_;
  float sum_[kLanes] = {};
};

TRIREME_INLINE void prefetch(const float* from, std::size_t width) noexcept {
  for (std::size_t i = 0; i < width; i += kLineFloats) __builtin_prefetch(from + i);
  __builtin_prefetch(from + width - 1);
}

struct Gather {
  const float* rows;
  std::size_t num_rows;
  std::size_t dim;
  const BagsOfRows& bags;
  std::size_t num_examples;
  float* out;

  // Examples [begin, end): one row per bag is copied. Returns whether all rows exist. The index is
  // transposed to the order of the output, a tile at a time. Read example by example, its features
  // would be powers of two apart and evict each other from the cache.
  template <std::size_t V>
  bool copy(std::size_t begin, std::size_t end, Columns columns) const {
    const std::size_t num_features = bags.num_features;
    std::vector<std::uint32_t> tile(kTile * num_features);
    float* to = out + begin * num_features * dim + columns.begin;
    Block<V> block(columns.width);
    const Block<V> zero(columns.width);
    bool is_right = true;
    for (std::size_t b = begin; b < end; b += kTile) {
      const std::size_t size = std::min(kTile, end - b);
      for (std::size_t f = 0; f < num_features; ++f) {
        const std::int32_t* const index = bags.index.data() + f * num_examples + b;
        for (std::size_t i = 0; i < size; ++i)
          tile[i * num_features + f] = static_cast<std::uint32_t>(index[i]);
      }
      const std::size_t n = size * num_features;
      for (std::size_t i = 0; i < n; ++i, to += dim) {
        const std::uint32_t ahead = tile[std::min(i + kRowsAhead, n - 1)];
        if (ahead < num_rows) prefetch(rows + ahead * dim + columns.begin, columns.width);
        if (tile[i] < num_rows) [[likely]] {
          block.copy(rows + tile[i] * dim + columns.begin, to);
        } else {
          is_right &= tile[i] == static_cast<std::uint32_t>(-1);
          zero.store(to);
        }
      }
    }
    return is_right;
  }

  // Examples [begin, end): the general case.
  template <std::size_t V>
  bool sum(std::size_t begin, std::size_t end, Columns columns) const noexcept {
    const std::int32_t* const index = bags.index.data();
    const std::int64_t* const offsets = bags.offsets.empty() ? nullptr : bags.offsets.data();
    const float* const weights = bags.weights.empty() ? nullptr : bags.weights.data();
    const std::size_t last = bags.index.size() - 1;
    float* to = out + begin * bags.num_features * dim + columns.begin;
    bool is_right = true;
    for (std::size_t b = begin; b < end; ++b) {
      for (std::size_t f = 0; f < bags.num_features; ++f, to += dim) {
        const std::size_t bag = f * num_examples + b;
        const std::size_t first = offsets ? static_cast<std::size_t>(offsets[bag]) : bag;
        const std::size_t stop = offsets ? static_cast<std::size_t>(offsets[bag + 1]) : bag + 1;
        Block<V> block(columns.width);
        for (std::size_t i = first; i < stop; ++i) {
          // The next examples need the following positions of this feature.
          const auto ahead = static_cast<std::uint32_t>(index[std::min(i + kIdsAhead, last)]);
          if (ahead < num_rows) prefetch(rows + ahead * dim + columns.begin, columns.width);
          const auto row = static_cast<std::uint32_t>(index[i]);
          if (row < num_rows) {
            block.add(rows + row * dim + columns.begin, weights ? weights[i] : 1.0F);
          } else {
            is_right &= index[i] == -1;
          }
        }
        block.store(to);
      }
    }
    return is_right;
  }
};

struct Scatter {
  const BagGrads& grad;
  const RowsOfBags& from;
  std::size_t num_bags;
  std::size_t num_positions;
  std::uint64_t reciprocal;  // of the number of examples
  float* out;

  // Source: Lemire, Kaser, Kurz, "Faster remainder by direct computation", 2019: exact for 32-bit
  // numbers.
  const float* grad_of(std::uint32_t bag) const noexcept {
    __extension__ using uint128 = unsigned __int128;
    const auto quotient = static_cast<std::size_t>((uint128{reciprocal} * bag) >> 64);
    const std::size_t f = grad.num_examples == 1 ? bag : quotient;
    return grad.data + (bag - f * grad.num_examples) * grad.stride + f * grad.dim;
  }

  // The gradient of a position; null if it has no bag or a wrong one.
  const float* grad_at(std::int32_t position, bool& is_right) const noexcept {
    if (static_cast<std::uint32_t>(position) >= num_positions) {
      is_right = false;
      return nullptr;
    }
    const std::int32_t bag =
        from.bags.empty() ? position : from.bags[static_cast<std::size_t>(position)];
    if (static_cast<std::uint32_t>(bag) < num_bags) return grad_of(static_cast<std::uint32_t>(bag));
    is_right &= bag == -1;
    return nullptr;
  }

  // Rows [begin, end). Returns whether all starts, positions and bags are right.
  template <std::size_t V>
  bool sum(std::size_t begin, std::size_t end, Columns columns) const noexcept {
    const float* const weights = from.weights.empty() ? nullptr : from.weights.data();
    const std::size_t num_occurrences = from.order.size();
    const float* found[kPositionsAhead];  // the gradient of occurrence o is at o % kPositionsAhead
    bool is_right = true;
    const auto look = [&](std::size_t o) {
      const float* const at = grad_at(from.order[o], is_right);
      if (at != nullptr) prefetch(at + columns.begin, columns.width);
      found[o % kPositionsAhead] = at;
    };
    const auto head = static_cast<std::size_t>(from.starts[begin]);
    for (std::size_t o = head; o < std::min(head + kPositionsAhead, num_occurrences); ++o) look(o);
    for (std::size_t k = begin; k < end; ++k) {
      Block<V> block(columns.width);
      const auto first = static_cast<std::size_t>(from.starts[k]);
      const auto stop = static_cast<std::size_t>(from.starts[k + 1]);
      if (first > stop || stop > num_occurrences) return false;
      for (std::size_t o = first; o < stop; ++o) {
        const float* const at = found[o % kPositionsAhead];
        if (at != nullptr) block.add(at + columns.begin, weights ? weights[from.order[o]] : 1.0F);
        if (o + kPositionsAhead < num_occurrences) look(o + kPositionsAhead);
      }
      block.store(out + k * grad.dim + columns.begin);
    }
    return is_right;
  }
};

// Calls run.operator()<V>(columns) for each column block with the V that covers it.
template <class Run>
bool for_each_block(std::size_t dim, Run&& run) {
  bool is_right = true;
  for (std::size_t begin = 0; begin < dim; begin += kBlock) {
    const Columns columns{begin, std::min(kBlock, dim - begin)};
    const std::size_t vectors = columns.width < kLanes ? 0 : (columns.width + kLanes - 1) / kLanes;
    [&]<std::size_t... V>(std::index_sequence<V...>) {
      ((vectors == V ? void(is_right &= run.template operator()<V>(columns)) : void()), ...);
    }(std::make_index_sequence<kVectorsMax + 1>());
  }
  return is_right;
}

[[noreturn]] void throw_wrong_index(const Gather& gather) {
  const auto index = gather.bags.index;
  const auto wrong = std::find_if(index.begin(), index.end(), [&](std::int32_t row) {
    return row < -1 || row >= static_cast<std::int64_t>(gather.num_rows);
  });
  throw Error(ErrorCode::kBadRequest, "gather: expected index of -1 to " +
                                          std::to_string(gather.num_rows) + " - 1, found " +
                                          std::to_string(*wrong) + " at " +
                                          std::to_string(wrong - index.begin()));
}

// Throws an error that names `value` unless it lies in [low, high].
void expect_between(const char* what, std::size_t at, std::int64_t value, std::int64_t low,
                    std::int64_t high) {
  if (low <= value && value <= high) return;
  throw Error(ErrorCode::kBadRequest, "scatter: expected " + std::string(what) + "[" +
                                          std::to_string(at) + "] of " + std::to_string(low) +
                                          " to " + std::to_string(high) + ", found " +
                                          std::to_string(value));
}

void throw_wrong_occurrences(const Scatter& scatter) {
  const RowsOfBags& from = scatter.from;
  for (std::size_t k = 0; k < from.starts.size(); ++k) {
    const std::int32_t low = k == 0 ? 0 : from.starts[k - 1];
    expect_between("starts", k, from.starts[k], low, static_cast<std::int64_t>(from.order.size()));
  }
  for (std::size_t o = 0; o < from.order.size(); ++o) {
    expect_between("order", o, from.order[o], 0,
                   static_cast<std::int64_t>(scatter.num_positions) - 1);
  }
  for (std::size_t i = 0; i < from.bags.size(); ++i) {
    expect_between("bags", i, from.bags[i], -1, static_cast<std::int64_t>(scatter.num_bags) - 1);
  }
}

}  // namespace

void gather(std::span<const float> rows, std::size_t dim, const BagsOfRows& bags,
            std::span<float> out, Pool& pool) {
  if (!bags.offsets.empty()) check_offsets("gather", bags.offsets, bags.index.size());
  if (out.empty()) return;
  const std::size_t width = bags.num_features * dim;
  const Gather gather{rows.data(), rows.size() / dim, dim, bags, out.size() / width, out.data()};
  const bool is_copy = bags.offsets.empty() && bags.weights.empty();
  const std::size_t chunks =
      std::min(gather.num_examples,
               num_chunks(std::max(out.size(), bags.index.size() * dim), kChunkFloatsMin, pool, 4));
  std::atomic<bool> is_right = true;
  pool.run(chunks, [&](std::size_t c) {
    const std::size_t begin = chunk_begin(gather.num_examples, c, chunks);
    const std::size_t end = chunk_begin(gather.num_examples, c + 1, chunks);
    const bool done = for_each_block(dim, [&]<std::size_t V>(Columns columns) {
      return is_copy ? gather.copy<V>(begin, end, columns) : gather.sum<V>(begin, end, columns);
    });
    if (!done) is_right = false;
  });
  if (!is_right) throw_wrong_index(gather);
}

void scatter(const BagGrads& grad, const RowsOfBags& from, std::span<float> out, Pool& pool) {
  if (out.empty()) return;
  const std::size_t num_rows = out.size() / grad.dim;
  const std::size_t num_bags = grad.num_examples * grad.num_features;
  const std::size_t num_positions = from.bags.empty() ? num_bags : from.bags.size();
  const std::uint64_t reciprocal =
      grad.num_examples == 0 ? 0 : ~std::uint64_t{0} / grad.num_examples + 1;
  const Scatter scatter{grad, from, num_bags, num_positions, reciprocal, out.data()};
  const std::size_t chunks =
      num_chunks(from.order.size() * grad.dim + out.size(), kChunkFloatsMin, pool, 4);
  // Rows are cut so that the chunks have about the same number of occurrences.
  const auto row_of_chunk = [&](std::size_t c) -> std::size_t {
    if (c == 0) return 0;
    if (c == chunks) return num_rows;
    const auto target = static_cast<std::int32_t>(chunk_begin(from.order.size(), c, chunks));
    return std::lower_bound(from.starts.begin(), from.starts.end() - 1, target) -
           from.starts.begin();
  };
  std::atomic<bool> is_right = true;
  pool.run(chunks, [&](std::size_t c) {
    const std::size_t begin = row_of_chunk(c);
    const std::size_t end = row_of_chunk(c + 1);
    const bool done = for_each_block(grad.dim, [&]<std::size_t V>(Columns columns) {
      return scatter.sum<V>(begin, end, columns);
    });
    if (!done) is_right = false;
  });
  if (!is_right) throw_wrong_occurrences(scatter);
}

}  // namespace trireme
