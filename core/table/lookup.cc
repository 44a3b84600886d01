// Table: lookup, contains, statistics and addresses: what only reads.
//
// Keys are taken as they come, a block at a time, under the shared locks of the stripes that the
// block needs: one or two if the keys are in bucket order. Putting them in order first would cost
// more than the locks do.
#include <algorithm>
#include <atomic>
#include <bit>

#include "base/dims.h"
#include "store/find.h"
#include "table/table.h"

namespace trireme {
namespace {

// Fewer blocks than this are not worth waking threads for.
constexpr std::size_t kParallelBlocksMin = 4;

}  // namespace

// Holds the shared locks of several stripes, taken in their order; writers hold one at a time. So
// no cycle can form.
class Table::SharedLocks {
 public:
  SharedLocks(const Table& table, std::uint64_t stripes) : table_(table), stripes_(stripes) {
    for (std::uint64_t rest = stripes; rest != 0; rest &= rest - 1) mutex_of(rest).lock_shared();
  }
  ~SharedLocks() {
    for (std::uint64_t rest = stripes_; rest != 0; rest &= rest - 1) mutex_of(rest).unlock_shared();
  }
  SharedLocks(const SharedLocks&) = delete;
  SharedLocks& operator=(const SharedLocks&) = delete;

 private:
  StripeMutex& mutex_of(std::uint64_t stripes) const noexcept {
    return table_.stripes_[static_cast<std::size_t>(std::countr_zero(stripes))];
  }
  const Table& table_;
  const std::uint64_t stripes_;
};

// See Finder: visit and settle are called with the key's position in `keys`.
template <class Visit, class Settle>
void Table::find_all(std::span<const std::uint64_t> keys, std::size_t row_bytes, Pool& pool,
                     const Visit& visit, const Settle& settle) const {
  auto find_block = [&](std::size_t block) {
    with_isa(isa_, [&]() TRIREME_INLINE_LAMBDA {
      const std::size_t begin = block * Finder::kBlock;
      Finder finder(arena_, index_, row_bytes);
      const SharedLocks locks(
          *this, finder.begin(keys.subspan(begin, std::min(Finder::kBlock, keys.size() - begin))));
      const Visit visit_here = visit;  // a copy that the compiler can keep in registers
      finder.find([=](std::size_t i, const IndexLine*, const std::byte* row, bool)
                      TRIREME_INLINE_LAMBDA { visit_here(begin + i, row); },
                  [&](std::size_t i, const IndexLine*, const std::byte* row)
                      TRIREME_INLINE_LAMBDA { settle(begin + i, row); });
    });
  };
  const std::size_t num_blocks = (keys.size() + Finder::kBlock - 1) / Finder::kBlock;
  if (num_blocks < kParallelBlocksMin) {
    for (std::size_t block = 0; block < num_blocks; ++block) find_block(block);
  } else {
    pool.run(num_blocks, find_block);
  }
}

std::size_t Table::lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool) const {
  std::atomic<std::size_t> missing{0};
  with_dim(dim(), [&](auto dim) {
    const auto copy = [=](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA {
      copy_floats(out + static_cast<std::ptrdiff_t>(i) * dim, weights_of_row(row), dim);
    };
    const auto settle = [&](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA {
      if (row != nullptr) return copy(i, row);
      missing.fetch_add(1, std::memory_order_relaxed);
      write_absent(keys[i], out + static_cast<std::ptrdiff_t>(i) * dim);
    };
    find_all(keys, kWeightsOffset + static_cast<std::size_t>(dim) * sizeof(float), pool, copy,
             settle);
  });
  return missing;
}

void Table::write_absent(std::uint64_t key, float* weights) const noexcept {
  if (absent_is_zero_) {
    std::fill_n(weights, dim(), 0.0F);
  } else {
    initializer_.fill(key, weights, dim());
  }
}

void Table::contains(std::span<const std::uint64_t> keys, bool* out, Pool& pool) const {
  find_all(
      keys, sizeof(std::uint64_t), pool,
      [&](std::size_t i, const std::byte*) TRIREME_INLINE_LAMBDA { out[i] = true; },
      [&](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA { out[i] = row != nullptr; });
}

void Table::statistics(std::span<const std::uint64_t> keys, double* out, const Moment& now,
                       Pool& pool) const {
  check_scored("statistics");
  const auto write = [=, this](std::size_t i, const std::byte* row) {
    const ShowClick found = now.effective(layout_.stamp(row), layout_.score(row), policy_.rates);
    out[2 * i] = found.show;
    out[2 * i + 1] = found.click;
  };
  find_all(keys, layout_.row_bytes(), pool, write, [=](std::size_t i, const std::byte* row) {
    if (row != nullptr) return write(i, row);
    out[2 * i] = 0.0;
    out[2 * i + 1] = 0.0;
  });
}

void Table::addresses(std::span<const std::uint64_t> keys, const float** out, Pool& pool) const {
  find_all(
      keys, sizeof(std::uint64_t), pool,
      [&](std::size_t i, const std::byte* row)
          TRIREME_INLINE_LAMBDA { out[i] = weights_of_row(row); },
      [&](std::size_t i, const std::byte* row)
          TRIREME_INLINE_LAMBDA { out[i] = row != nullptr ? weights_of_row(row) : nullptr; });
}

}  // namespace trireme
