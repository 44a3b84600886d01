#include "frozen/table.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "base/dims.h"
#include "base/error.h"
#include "base/isa.h"
#include "store/dtype.h"

namespace trireme {
namespace {

constexpr std::size_t kBlock = 4096;
// Fewer blocks than this are not worth waking threads for.
constexpr std::size_t kParallelBlocksMin = 4;

[[noreturn]] void wrong(const std::string& expected_and_found) {
  throw Error(ErrorCode::kBadRequest, "FrozenTable: expected " + expected_and_found);
}

// How a row is read: `statistics` float32 numbers, then weights; `width` in all.
struct Float32 {
  template <class Width>
  TRIREME_INLINE static void read(const std::byte* from, float* out, int, Width width) noexcept {
    copy_floats(out, reinterpret_cast<const float*>(from), width);
  }
};

struct Float16 {
  TRIREME_INLINE static void read(const std::byte* from, float* out, int statistics,
                                  int width) noexcept {
    std::memcpy(out, from, statistics * sizeof(float));
    const auto* halves = reinterpret_cast<const std::uint16_t*>(from + statistics * sizeof(float));
    for (int j = 0; j < width - statistics; ++j)
      out[statistics + j] = dtype::Float16::widen(halves[j]);
  }
};

struct Int8 {
  TRIREME_INLINE static void read(const std::byte* from, float* out, int statistics,
                                  int width) noexcept {
    std::memcpy(out, from, statistics * sizeof(float));
    from += statistics * sizeof(float);
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    const auto* codes = reinterpret_cast<const std::int8_t*>(from + sizeof scale);
    for (int j = 0; j < width - statistics; ++j) {
      out[statistics + j] = static_cast<float>(codes[j]) * scale;
    }
  }
};

template <class Function>
void with_encoding(Encoding encoding, const Function& function) {
  if (encoding == Encoding::kFloat32) return function(Float32());
  return encoding == Encoding::kFloat16 ? function(Float16()) : function(Int8());
}

}  // namespace

// A search of up to kBlock keys. Each layer answers the keys that it has; the rest is searched in
// the next layer. As in Finder, the lines and rows of later keys are prefetched while a key is
// compared.
class FrozenTable::Search {
 public:
  explicit Search(std::span<const std::uint64_t> keys) noexcept : keys_(keys) {
    TRIREME_INDEPENDENT
    for (std::size_t i = 0; i < keys.size(); ++i) hashes_[i] = mix64(keys[i]);
    for (std::size_t i = 0; i < keys.size(); ++i) rest_[i] = static_cast<std::uint16_t>(i);
    num_rest_ = keys.size();
  }

  std::span<const std::uint16_t> rest() const noexcept { return {rest_.data(), num_rest_}; }

  // Calls visit(i, row, is_found) for each key of the rest, with a row that is probably the key's;
  // is_found is whether it is. Keys that the layer has are then removed from the rest.
  template <class Visit>
  TRIREME_INLINE void find(const FrozenRows& layer, const Visit& visit) noexcept {
    std::fill_n(rest_.begin() + num_rest_, 2 * kAhead, rest_[num_rest_ - 1]);
    const std::size_t row_bytes = layer.row_bytes();
    const auto fetch_line = [&](std::size_t r) TRIREME_INLINE_LAMBDA {
      const FrozenLine* line = layer.home(hashes_[rest_[r]]);
      lines_[r % kRing] = line;
      __builtin_prefetch(line);
    };
    const auto fetch_row = [&](std::size_t r) TRIREME_INLINE_LAMBDA {
      const std::byte* row = layer.candidate(hashes_[rest_[r]], lines_[r % kRing]);
      rows_[r % kRing] = row;
      for (std::size_t byte = 0; byte < row_bytes - 8; byte += 64) __builtin_prefetch(row + byte);
      __builtin_prefetch(row + row_bytes - 8);
    };
    for (std::size_t r = 0; r < kAhead; ++r) fetch_line(r);
    for (std::size_t r = 0; r < kAhead; ++r) {
      fetch_line(r + kAhead);
      fetch_row(r);
    }
    std::size_t num_left = 0;
    for (std::size_t r = 0; r < num_rest_; ++r) {
      const std::uint16_t i = rest_[r];
      const std::byte* row = rows_[r % kRing];
      const bool is_found = (key_of_row(row) == keys_[i]) & (row != layer.null_row());
      visit(i, row, is_found);
      fetch_line(r + 2 * kAhead);
      fetch_row(r + kAhead);
      rest_[num_left] = i;  // the ring buffer has already read past r
      num_left += !is_found;
    }
    num_rest_ = num_left;
    find_rest(layer, visit);
  }

 private:
  static constexpr std::size_t kAhead = 64;
  static constexpr std::size_t kRing = 2 * kAhead;

  // Mostly absent keys, whose line does not have their tag. Otherwise a second row with the same
  // tag, or a line with more rows than tags.
  template <class Visit>
  TRIREME_INLINE void find_rest(const FrozenRows& layer, const Visit& visit) noexcept {
    std::size_t num_left = 0;
    for (std::size_t r = 0; r < num_rest_; ++r) {
      const std::uint16_t i = rest_[r];
      const std::byte* row = layer.find(keys_[i], hashes_[i]);
      if (row != nullptr) visit(i, row, true);
      rest_[num_left] = i;
      num_left += row == nullptr;
    }
    num_rest_ = num_left;
  }

  const std::span<const std::uint64_t> keys_;
  std::size_t num_rest_;
  std::array<std::uint64_t, kBlock> hashes_;
  std::array<std::uint16_t, kBlock + 2 * kAhead> rest_;
  std::array<const FrozenLine*, kRing> lines_;
  std::array<const std::byte*, kRing> rows_;
};

FrozenTable::FrozenTable(Layers layers, const FrozenTableConfig& config)
    : layers_(std::move(layers)),
      isa_(choose_isa(config.simd)),
      initializer_(config.initializer, config.init_a, config.init_b, config.seed),
      initial_weights_(config.initial_weights),
      dtype_(dtype_of(config.dtype)) {
  if (layers_.empty()) wrong("at least one layer, found none");
  for (const auto& layer : layers_) {
    const FrozenRows& first = *layers_.front();
    if (layer->dim() != first.dim() || layer->statistics() != first.statistics()) {
      wrong("layers of dim " + std::to_string(first.dim()) + " with " +
            std::to_string(first.statistics()) + " statistics, found " +
            std::to_string(layer->dim()) + " with " + std::to_string(layer->statistics()));
    }
  }
  if (initial_weights_ < 0 || initial_weights_ > layers_.front()->dim()) {
    wrong("0 to " + std::to_string(layers_.front()->dim()) + " initial weights, found " +
          std::to_string(initial_weights_));
  }
  if (const std::size_t buckets = layers_.back()->num_buckets(); buckets != kNumBuckets) {
    wrong("4096 buckets in the last layer, found " + std::to_string(buckets));
  }
}

std::size_t FrozenTable::lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool) const {
  std::atomic<std::size_t> missing{0};
  const auto row_floats = static_cast<std::size_t>(width());
  auto of_block = [&](std::size_t block) {
    const std::size_t begin = block * kBlock;
    missing.fetch_add(lookup_block(keys.subspan(begin, std::min(kBlock, keys.size() - begin)),
                                   out + begin * row_floats),
                      std::memory_order_relaxed);
  };
  const std::size_t num_blocks = (keys.size() + kBlock - 1) / kBlock;
  if (num_blocks < kParallelBlocksMin) {
    for (std::size_t block = 0; block < num_blocks; ++block) of_block(block);
  } else {
    pool.run(num_blocks, of_block);
  }
  return missing;
}

std::size_t FrozenTable::lookup_block(std::span<const std::uint64_t> keys, float* out) const {
  Search search(keys);
  std::size_t missing = 0;
  for (const auto& layer : layers_) {
    if (search.rest().empty()) break;
    with_encoding(layer->encoding(), [&](auto encoding) {
      with_isa(isa_, [&]() TRIREME_INLINE_LAMBDA {
        with_dim(width(), [&](auto width) TRIREME_INLINE_LAMBDA {
          search.find(*layer, [&](std::size_t i, const std::byte* row,
                                  bool is_found) TRIREME_INLINE_LAMBDA {
            float* values = out + static_cast<std::ptrdiff_t>(i) * width;
            encoding.read(layer->values_of(row), values, layer->statistics(), width);
            if (layer->is_removed(row) && is_found) {
              write_absent(keys[i], values);
              ++missing;
            }
          });
        });
      });
    });
  }
  const auto row_floats = static_cast<std::size_t>(width());
  for (const std::uint16_t i : search.rest()) write_absent(keys[i], out + i * row_floats);
  return missing + search.rest().size();
}

void FrozenTable::write_absent(std::uint64_t key, float* values) const noexcept {
  std::fill_n(values, width(), 0.0F);
  float* weights = values + layers_.front()->statistics();
  initializer_.fill(key, weights, initial_weights_);
  to_nearest(dtype_, weights, initial_weights_);
}

}  // namespace trireme
