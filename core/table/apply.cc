// Design: the search finds rows, and the rule updates a few of them at a time. So both are compiled
// once per instruction set, not each rule together with the search. Larger batches are slower:
// while a batch is updated, the search asks for no further rows.
#include "table/apply.h"

#include <algorithm>
#include <array>

#include "store/find.h"
#include "store/row.h"

namespace trireme {
namespace {

// Calls visit(i, line, row, is_found) as Finder does, with the key's number in the group, and
// fetch(i) some keys ahead. Returns the number of absent keys, and writes theirs to `absent`.
template <class Rows, class Fetch, class Visit>
TRIREME_INLINE std::size_t for_rows_of(const GroupUpdate& update, const Rows& rows,
                                       const Fetch& fetch, std::uint32_t* absent,
                                       const Visit& visit) noexcept {
  constexpr std::size_t kAhead = 16;  // gradients to fetch: they are near, but in no order
  const std::span<const std::uint64_t> keys = update.group.keys;
  const std::size_t last = keys.size() - 1;
  std::size_t num_absent = 0;
  Finder finder(rows, update.index, rows.row_bytes());
  for (std::size_t begin = 0; begin < keys.size(); begin += kFindBlock) {
    finder.begin(keys.subspan(begin, std::min(kFindBlock, last + 1 - begin)));
    finder.find(
        [&](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
            TRIREME_INLINE_LAMBDA {
              fetch(std::min(begin + i + kAhead, last));
              visit(begin + i, line, row, is_found);
            },
        [&](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
          if (row == nullptr) {
            absent[num_absent++] = static_cast<std::uint32_t>(begin + i);
          } else {
            visit(begin + i, line, row, true);
          }
        });
  }
  return num_absent;
}

// Rows that were found and are not updated yet.
struct Batch {
  std::array<std::byte*, kBatchRows> rows;
  std::array<const IndexLine*, kBatchRows> lines;
  std::array<std::uint32_t, kBatchRows> numbers;  // of the keys in the group
};

// Calls apply(batch, size) for the rows of the group's keys, a batch at a time, in order; and
// fetch(i) some keys ahead. Returns the number of absent keys, and writes theirs to `absent`.
template <class Rows, class Fetch, class Apply>
TRIREME_INLINE std::size_t for_batches(const GroupUpdate& update, const Rows& rows,
                                       std::uint32_t* absent, const Fetch& fetch,
                                       const Apply& apply) noexcept {
  Batch batch;
  std::size_t size = 0;
  Index& index = update.index;
  const std::uint32_t version = update.statistics.version;
  const std::size_t num_absent = for_rows_of(
      update, rows, fetch, absent,
      [&](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
          TRIREME_INLINE_LAMBDA {
            batch.rows[size] = row;
            if (is_found) index.touch(line, version);
            batch.numbers[size] = static_cast<std::uint32_t>(i);
            size += is_found;  // a branch would be mispredicted for each key that is found later
            if (size == kBatchRows) {
              apply(batch, size);
              size = 0;
            }
          });
  apply(batch, size);
  return num_absent;
}

// Writes what the push says of the statistics of some rows, and marks their lines.
void mark(const GroupUpdate& update, const RowLayout& layout, const Batch& batch, std::size_t begin,
          std::size_t end) noexcept {
  const StatisticsPush statistics = update.statistics;
  const RowLayout of_rows = layout;
  if (statistics.is_scored()) {
    for (std::size_t k = begin; k < end; ++k) {
      statistics.count(of_rows, batch.rows[k], update.group.position(batch.numbers[k]));
    }
  }
  for (std::size_t k = begin; k < end; ++k) {
    statistics.mark(of_rows, batch.rows[k]);
  }
}

// The gradient of a key for a row of this dim: cut, or filled up with zeros in `filled`.
TRIREME_INLINE const float* gradient_for(const GroupUpdate& update, std::size_t position, int dim,
                                         float* filled) noexcept {
  const GradientPart& part = update.part_of(position);
  if (dim <= part.dim) return part.at(position);
  copy_floats(filled, part.at(position), part.dim);
  std::fill(filled + part.dim, filled + dim, 0.0F);
  return filled;
}

// Updates rows of one class. Weights of 16 bits are widened, and rounded when the rule has been
// applied; so none of these rows may occur twice.
void apply_to_class(const GroupUpdate& update, const Batch& batch, std::size_t begin,
                    std::size_t end, const RowLayout& layout) noexcept {
  const int dim = layout.dim();
  const bool is_half = layout.dtype() != Dtype::kFloat32;
  const auto wide_dim = static_cast<std::size_t>(layout.wide_dim());
  std::array<RowUpdate, kBatchRows> rows;
  with_isa(update.isa, [&]() TRIREME_INLINE_LAMBDA {
    for (std::size_t k = begin; k < end; ++k) {
      std::byte* row = batch.rows[k];
      float* const wide = update.scratch + 2 * k * wide_dim;
      if (is_half) layout.read_weights(row, wide, dim);
      rows[k] = {
          is_half ? wide : weights_of_row(row), layout.state(row),
          gradient_for(update, update.group.position(batch.numbers[k]), dim, wide + wide_dim)};
    }
  });
  update.rule.apply(std::span(rows).subspan(begin, end - begin), dim);
  if (is_half) {
    with_isa(update.isa, [&]() TRIREME_INLINE_LAMBDA {
      for (std::size_t k = begin; k < end; ++k) {
        std::byte* row = batch.rows[k];
        round_weights(layout.dtype(), rows[k].weights, row + kWeightsOffset, dim,
                      update.random_of(key_of_row(row)));
      }
    });
  }
  mark(update, layout, batch, begin, end);
}

[[gnu::noinline]] void apply_to_any(const GroupUpdate& update, const Batch& batch, std::size_t size,
                                    Risen& risen) noexcept {
  const auto first = batch.rows.begin();
  for (std::size_t begin = 0; begin < size;) {
    const int row_class = update.arenas.class_of(batch.rows[begin]);
    std::size_t end = begin + 1;
    while (end < size && update.arenas.class_of(batch.rows[end]) == row_class &&
           std::find(first + begin, first + end, batch.rows[end]) == first + end) {
      ++end;
    }
    const RowLayout& layout = update.layouts[static_cast<std::size_t>(row_class)];
    apply_to_class(update, batch, begin, end, layout);
    for (; begin < end; ++begin) {
      if (row_class == risen.head_class &&
          update.statistics.rates.score_of(layout.score(batch.rows[begin])) >= risen.threshold) {
        risen.numbers[risen.size++] = batch.numbers[begin];
      }
    }
  }
}

// Whether the table is scored is known at compile time: a call per row would cost a tenth of the
// speed of the others.
template <bool kIsScored>
TRIREME_INLINE std::size_t apply_plain_rows(const GroupUpdate& update,
                                            std::uint32_t* absent) noexcept {
  const Group group = update.group;
  const RowLayout layout = update.layouts[0];
  const StatisticsPush statistics = update.statistics;
  Index& index = update.index;
  const int dim = layout.dim();
  const float* const grads = update.parts[0].rows;
  const auto gradient_of = [=](std::size_t i) TRIREME_INLINE_LAMBDA {
    return grads + group.position(i) * static_cast<std::size_t>(dim);
  };
  std::array<RowUpdate, kBatchRows> rows;
  std::size_t size = 0;
  const std::size_t num_absent = for_rows_of(
      update, update.arenas.of(0),
      [=](std::size_t i) TRIREME_INLINE_LAMBDA {
        const float* next = gradient_of(i);
        __builtin_prefetch(next);
        __builtin_prefetch(next + dim - 1);
      },
      absent,
      [&](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
          TRIREME_INLINE_LAMBDA {
            float* weights = weights_of_row(row);
            rows[size] = {weights, weights + dim, gradient_of(i)};
            if (!is_found) return;
            if constexpr (kIsScored) statistics.count(layout, row, group.position(i));
            statistics.mark(layout, row);
            index.touch(line, statistics.version);
            if (++size < kBatchRows) return;
            update.rule.apply(rows, dim);
            size = 0;
          });
  update.rule.apply(std::span(rows).first(size), dim);
  return num_absent;
}

}  // namespace

std::size_t apply_plain(const GroupUpdate& update, std::uint32_t* absent) noexcept {
  std::size_t num_absent = 0;
  with_isa(update.isa, [&]() TRIREME_INLINE_LAMBDA {
    if (update.statistics.is_scored()) {
      num_absent = apply_plain_rows<true>(update, absent);
    } else {
      num_absent = apply_plain_rows<false>(update, absent);
    }
  });
  return num_absent;
}

std::size_t apply_any(const GroupUpdate& update, std::uint32_t* absent, Risen& risen) noexcept {
  std::size_t num_absent = 0;
  with_isa(update.isa, [&]() TRIREME_INLINE_LAMBDA {
    num_absent = for_batches(
        update, update.arenas, absent,
        [&](std::size_t i) TRIREME_INLINE_LAMBDA {
          const std::size_t position = update.group.position(i);
          __builtin_prefetch(update.part_of(position).at(position));
        },
        [&](const Batch& batch, std::size_t size)
            TRIREME_INLINE_LAMBDA { apply_to_any(update, batch, size, risen); });
  });
  return num_absent;
}

}  // namespace trireme
