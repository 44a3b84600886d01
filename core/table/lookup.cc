// Table: lookup, contains and statistics, which only read.
//
// Keys are searched in the order of the call, a block at a time, under the shared locks of the
// block's stripes: one or two locks if the keys are in bucket order. Sorting the keys first would
// cost more than the locks do.
#include <algorithm>
#include <atomic>
#include <bit>

#include "base/copy.h"
#include "base/dims.h"
#include "store/find.h"
#include "table/table.h"

namespace trireme {
namespace {

// Fewer blocks than this are not worth waking threads for.
constexpr std::size_t kParallelBlocksMin = 4;

// Rows of more bytes are not read again while they are in cache.
constexpr std::size_t kCachedBytes = std::size_t{16} << 20;

// Keys whose rows are read from SSD together, without going through memory.
constexpr std::size_t kReadKeys = 256;

}  // namespace

// Holds the shared locks of several stripes, taken in the order of the stripes. Writers hold one
// lock at a time. So there is no deadlock.
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
template <class Rows, class Visit, class Settle>
void Table::find_all(const Rows& rows, std::span<const std::uint64_t> keys, std::size_t row_bytes,
                     Pool& pool, const Visit& visit, const Settle& settle) const {
  auto find_block = [&](std::size_t block) {
    with_isa(isa_, [&]() TRIREME_INLINE_LAMBDA {
      const std::size_t begin = block * kFindBlock;
      Finder finder(rows, index_, row_bytes);
      const SharedLocks locks(
          *this, finder.begin(keys.subspan(begin, std::min(kFindBlock, keys.size() - begin))));
      const Visit visit_here = visit;  // a local copy, which the compiler can keep in registers
      finder.find([=](std::size_t i, const IndexLine*, const std::byte* row, bool)
                      TRIREME_INLINE_LAMBDA { visit_here(begin + i, row); },
                  [&](std::size_t i, const IndexLine*, const std::byte* row)
                      TRIREME_INLINE_LAMBDA { settle(begin + i, row); });
      order_streamed();
    });
  };
  const std::size_t num_blocks = (keys.size() + kFindBlock - 1) / kFindBlock;
  if (num_blocks < kParallelBlocksMin) {
    for (std::size_t block = 0; block < num_blocks; ++block) find_block(block);
  } else {
    pool.run(num_blocks, find_block);
  }
}

// Calls visit(i, row) for each key whose row is in memory, visit_on_ssd(i, row, row_class) for each
// whose row is on SSD, absent(i) for the others.
template <class Rows, class Visit, class VisitOnSsd, class Absent>
void Table::read_rows(const Rows& rows, std::span<const std::uint64_t> keys, std::size_t row_bytes,
                      Pool& pool, const Visit& visit, const VisitOnSsd& visit_on_ssd,
                      const Absent& absent) const {
  if (tier_ != nullptr) tier_->fetch(keys, pool);
  Array<std::size_t> left(tier_ != nullptr ? keys.size() : 0);
  std::atomic<std::size_t> num_left{0};
  find_all(rows, keys, row_bytes, pool, visit, [&](std::size_t i, const std::byte* row) {
    if (row != nullptr) return visit(i, row);
    if (tier_ == nullptr || !tier_->may_have(keys[i])) return absent(i);
    left[num_left.fetch_add(1, std::memory_order_relaxed)] = i;
  });
  left.truncate(num_left);
  read_on_ssd(keys, left.span(), visit_on_ssd, absent);
}

// Calls visit(i, row, row_class) for each key that has a row, absent(i) for the others.
template <class Visit, class Absent>
void Table::read_all(std::span<const std::uint64_t> keys, std::size_t row_bytes, Pool& pool,
                     const Visit& visit, const Absent& absent) const {
  read_rows(
      arenas_, keys, row_bytes, pool,
      [=, this](std::size_t i, const std::byte* row)
          TRIREME_INLINE_LAMBDA { visit(i, row, arenas_.class_of(row)); },
      visit, absent);
}

template <class Visit, class Absent>
void Table::read_on_ssd(std::span<const std::uint64_t> keys, std::span<const std::size_t> left,
                        const Visit& visit, const Absent& absent) const {
  std::vector<std::uint64_t> some;
  for (std::size_t begin = 0; begin < left.size(); begin += kReadKeys) {
    const auto positions = left.subspan(begin, std::min(kReadKeys, left.size() - begin));
    some.clear();
    for (const std::size_t i : positions) some.push_back(keys[i]);
    tier_->read(some, [&](std::size_t i, const std::byte* row, int row_class) {
      row == nullptr ? absent(positions[i]) : visit(positions[i], row, row_class);
    });
  }
}

std::size_t Table::lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool,
                          int row_class) const {
  check_class("lookup", row_class);
  return classes_.is_plain() ? lookup_plain(keys, out, pool)
                             : lookup_any(keys, out, pool, classes_[row_class].dim());
}

std::size_t Table::lookup_plain(std::span<const std::uint64_t> keys, float* out, Pool& pool) const {
  std::atomic<std::size_t> missing{0};
  with_dim(classes_[0].dim(), [&](auto dim) {
    const auto copy = [=](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA {
      copy_floats(out + static_cast<std::ptrdiff_t>(i) * dim, weights_of_row(row), dim);
    };
    const auto absent = [&](std::size_t i) {
      missing.fetch_add(1, std::memory_order_relaxed);
      write_absent(keys[i], out + static_cast<std::ptrdiff_t>(i) * dim, dim);
    };
    const std::size_t bytes = kWeightsOffset + static_cast<std::size_t>(dim) * sizeof(float);
    read_rows(
        arenas_.of(0), keys, bytes, pool, copy,
        [=](std::size_t i, const std::byte* row, int) { copy(i, row); }, absent);
  });
  return missing;
}

std::size_t Table::lookup_any(std::span<const std::uint64_t> keys, float* out, Pool& pool,
                              int dim) const {
  std::atomic<std::size_t> missing{0};
  read_all(
      keys, classes_.wide().weights_end(), pool,
      [=, this](std::size_t i, const std::byte* row, int row_class) TRIREME_INLINE_LAMBDA {
        const RowLayout& layout = classes_[row_class];
        float* weights = out + static_cast<std::ptrdiff_t>(i) * dim;
        const int size = std::min(dim, layout.dim());
        layout.read_weights(row, weights, size);
        std::fill(weights + size, weights + dim, 0.0F);
      },
      [&](std::size_t i) {
        missing.fetch_add(1, std::memory_order_relaxed);
        write_absent(keys[i], out + static_cast<std::ptrdiff_t>(i) * dim, dim);
      });
  return missing;
}

// Writes the initial weights of an absent key: only the head's weight if rows begin as heads.
void Table::write_absent(std::uint64_t key, float* weights, int dim) const noexcept {
  if (absent_is_zero_) {
    std::fill_n(weights, dim, 0.0F);
    return;
  }
  initializer_.fill(key, weights, dim);
  if (classes_.head() >= 0) std::fill(weights + 1, weights + dim, 0.0F);
  to_nearest(classes_.wide().dtype(), weights, dim);
}

void Table::contains(std::span<const std::uint64_t> keys, bool* out, Pool& pool) const {
  read_all(
      keys, sizeof(std::uint64_t), pool,
      [=](std::size_t i, const std::byte*, int) TRIREME_INLINE_LAMBDA { out[i] = true; },
      [=](std::size_t i) { out[i] = false; });
}

template <bool kIsStreamed>
void Table::read_plain(std::span<const std::uint64_t> keys, std::uint8_t* row_classes,
                       std::uint8_t* out, Pool& pool) const {
  const std::size_t bytes = row_bytes();
  const auto read = [=](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA {
    row_classes[i] = 0;
    if constexpr (kIsStreamed) {
      stream_row(out + i * bytes, row + kWeightsOffset, bytes);
    } else {
      copy_row(out + i * bytes, row + kWeightsOffset, bytes);
    }
  };
  find_all(arenas_.of(0), keys, arenas_.row_bytes(), pool, read,
           [=](std::size_t i, const std::byte* row) TRIREME_INLINE_LAMBDA {
             if (row != nullptr) return read(i, row);
             row_classes[i] = kNoClass;
             std::fill_n(out + i * bytes, bytes, std::uint8_t{0});
           });
}

void Table::read_wide(std::span<const std::uint64_t> keys, std::uint8_t* row_classes,
                      std::uint8_t* out, Pool& pool) const {
  if (tier_ == nullptr && classes_.is_plain() && classes_.wide().is_wide()) {
    const bool has_words = (reinterpret_cast<std::uintptr_t>(out) | row_bytes()) % 8 == 0;
    return has_words && keys.size() * row_bytes() > kCachedBytes
               ? read_plain<true>(keys, row_classes, out, pool)
               : read_plain<false>(keys, row_classes, out, pool);
  }
  read_all(
      keys, arenas_.row_bytes(), pool,
      [=, this](std::size_t i, const std::byte* row, int row_class) {
        row_classes[i] = static_cast<std::uint8_t>(row_class);
        classes_[row_class].write_wide(row, out + i * row_bytes());
      },
      [=, this](std::size_t i) {
        row_classes[i] = kNoClass;
        std::fill_n(out + i * row_bytes(), row_bytes(), std::uint8_t{0});
      });
}

void Table::statistics(std::span<const std::uint64_t> keys, double* out, const DataTime& now,
                       Pool& pool) const {
  check_scored("statistics");
  read_all(
      keys, arenas_.row_bytes(), pool,
      [=, this](std::size_t i, const std::byte* row, int row_class) {
        const RowLayout& layout = classes_[row_class];
        const ShowClick found = now.effective(layout.stamp(row), layout.score(row), policy_.rates);
        out[2 * i] = found.show;
        out[2 * i + 1] = found.click;
      },
      [=](std::size_t i) {
        out[2 * i] = 0.0;
        out[2 * i + 1] = 0.0;
      });
}

}  // namespace trireme
