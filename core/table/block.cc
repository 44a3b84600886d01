#include "table/block.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "table/apply.h"

namespace trireme {
namespace {

constexpr std::size_t kChunkRows = 2048;  // fewer are not worth waking threads for
constexpr std::size_t kAhead = 16;        // rows whose parts are brought into cache

// Calls function(begin, end) for parts of [0, n).
template <class Function>
void for_chunks(std::size_t n, Pool& pool, const Function& function) {
  pool.run((n + kChunkRows - 1) / kChunkRows, [&](std::size_t chunk) {
    const std::size_t begin = chunk * kChunkRows;
    function(begin, std::min(n, begin + kChunkRows));
  });
}

void check_slots(const char* who, std::span<const std::int32_t> slots, std::size_t num_rows) {
  // Negative slots are large ones. A branch per slot would keep the loop from being vectorized.
  std::uint32_t largest = 0;
  for (const std::int32_t slot : slots) {
    largest = std::max(largest, static_cast<std::uint32_t>(slot));
  }
  if (slots.empty() || largest < num_rows) return;
  throw Error(ErrorCode::kBadRequest, std::string("Table.") + who + ": expected slots in [0, " +
                                          std::to_string(num_rows) + "), found " +
                                          std::to_string(static_cast<std::int32_t>(largest)));
}

// Where the parts of one row are.
struct Parts {
  Parts(const RowLayout& layout, const BlockRows& rows) noexcept
      : rows_(rows),
        dim_(static_cast<std::size_t>(layout.dim())),
        state_floats_(static_cast<std::size_t>(layout.state_floats())) {}

  float* weights(std::size_t slot) const noexcept { return rows_.weights.at(slot); }
  float* state(std::size_t slot) const noexcept { return rows_.state.at(slot); }
  TRIREME_INLINE void fetch(std::size_t slot) const noexcept {
    fetch(weights(slot), dim_);
    fetch(state(slot), state_floats_);
    __builtin_prefetch(rows_.stamps.at(slot), 1);
    if (rows_.shows.data != nullptr) __builtin_prefetch(rows_.shows.at(slot), 1);
  }

 private:
  TRIREME_INLINE static void fetch(const float* floats, std::size_t size) noexcept {
    for (std::size_t i = 0; i < size; i += 16) __builtin_prefetch(floats + i, 1);
    if (size > 0) __builtin_prefetch(floats + size - 1, 1);
  }

  const BlockRows& rows_;
  const std::size_t dim_;
  const std::size_t state_floats_;
};

// Copies planes of `dim` floats with these distances between them; returns where each side ends.
struct Planes {
  const std::uint8_t* from;
  std::uint8_t* to;
};
TRIREME_INLINE Planes copy_planes(Planes at, int num, std::size_t bytes, std::size_t from_step,
                                  std::size_t to_step) noexcept {
  for (int plane = 0; plane < num; ++plane, at.from += from_step, at.to += to_step) {
    std::memcpy(at.to, at.from, bytes);
  }
  return at;
}

// Bytes of the parts of a row.
struct Sizes {
  explicit Sizes(const RowLayout& layout) noexcept
      : planes(layout.state_planes()),
        own(static_cast<std::size_t>(layout.dim()) * sizeof(float)),
        wide(static_cast<std::size_t>(layout.wide_dim()) * sizeof(float)),
        rest(static_cast<std::size_t>(layout.state_floats()) * sizeof(float) -
             own * static_cast<std::size_t>(planes)) {}
  int planes;
  std::size_t own, wide;  // bytes of a plane here, and in a wide row
  std::size_t rest;       // bytes of the floats of the row
};

Score score_of(const BlockRows& rows, std::size_t slot) noexcept {
  const ShowClick& shows = *rows.shows.at(slot);
  return {.show = shows.show,
          .click = shows.click,
          .delta_score = *rows.delta_scores.at(slot),
          .feature = *rows.features.at(slot)};
}

void set_score(const BlockRows& rows, std::size_t slot, const Score& score) noexcept {
  *rows.shows.at(slot) = {.show = score.show, .click = score.click};
  *rows.delta_scores.at(slot) = score.delta_score;
  *rows.features.at(slot) = score.feature;
}

void note(const BlockRows& rows, std::size_t slot, std::size_t i,
          const StatisticsPush& push) noexcept {
  Stamp& stamp = *rows.stamps.at(slot);
  if (push.is_scored()) {
    Score score = score_of(rows, slot);
    push.count(stamp, score, i);
    set_score(rows, slot, score);
  }
  push.mark(stamp);
}

}  // namespace

void split_wide(const RowLayout& layout, const std::uint8_t* wide,
                std::span<const std::int32_t> slots, const BlockRows& to, Pool& pool) {
  check_slots("split_wide", slots, to.num_rows);
  const std::size_t wide_bytes = layout.wide_bytes();
  if (layout.dim() < layout.wide_dim()) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (layout.fits_wide(wide + i * wide_bytes)) continue;
      throw Error(ErrorCode::kBadRequest, "Table.split_wide: expected rows of dim " +
                                              std::to_string(layout.dim()) +
                                              ", found a wider one at " + std::to_string(i));
    }
  }
  const Parts parts(layout, to);
  const Sizes sizes(layout);
  for_chunks(slots.size(), pool, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto slot = static_cast<std::size_t>(slots[i]);
      const std::uint8_t* row = wide + i * wide_bytes;
      std::memcpy(parts.weights(slot), row, sizes.own);
      const Planes state =
          copy_planes({row + sizes.wide, reinterpret_cast<std::uint8_t*>(parts.state(slot))},
                      sizes.planes, sizes.own, sizes.wide, sizes.own);
      std::memcpy(state.to, state.from, sizes.rest);
      const std::uint8_t* statistics = row + layout.wide_stamp_offset();
      std::memcpy(to.stamps.at(slot), statistics, sizeof(Stamp));
      if (!layout.is_scored()) continue;
      Score score;
      std::memcpy(&score, statistics + sizeof(Stamp), sizeof score);
      set_score(to, slot, score);
    }
  });
}

void join_wide(const RowLayout& layout, const BlockRows& from, std::span<const std::int32_t> slots,
               std::uint8_t* wide, Pool& pool) {
  check_slots("join_wide", slots, from.num_rows);
  const std::size_t wide_bytes = layout.wide_bytes();
  const Parts parts(layout, from);
  const Sizes sizes(layout);
  for_chunks(slots.size(), pool, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto slot = static_cast<std::size_t>(slots[i]);
      std::uint8_t* row = wide + i * wide_bytes;
      if (sizes.own < sizes.wide) std::memset(row, 0, layout.wide_stamp_offset());
      std::memcpy(row, parts.weights(slot), sizes.own);
      const Planes state =
          copy_planes({reinterpret_cast<const std::uint8_t*>(parts.state(slot)), row + sizes.wide},
                      sizes.planes, sizes.own, sizes.own, sizes.wide);
      std::memcpy(state.to, state.from, sizes.rest);
      std::uint8_t* statistics = row + layout.wide_stamp_offset();
      std::memcpy(statistics, from.stamps.at(slot), sizeof(Stamp));
      if (!layout.is_scored()) continue;
      const Score score = score_of(from, slot);
      std::memcpy(statistics + sizeof(Stamp), &score, sizeof score);
    }
  });
}

void block_weights(const RowLayout& layout, const BlockRows& from,
                   std::span<const std::int32_t> slots, float* out, Pool& pool) {
  check_slots("block_weights", slots, from.num_rows);
  const Parts parts(layout, from);
  const auto dim = static_cast<std::size_t>(layout.dim());
  for_chunks(slots.size(), pool, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const float* ahead =
          parts.weights(static_cast<std::size_t>(slots[std::min(i + kAhead, end - 1)]));
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + dim - 1);
      copy_floats(out + i * dim, parts.weights(static_cast<std::size_t>(slots[i])), layout.dim());
    }
  });
}

void update_block(const RowLayout& layout, const BlockRows& rows,
                  std::span<const std::int32_t> slots, const float* grads, const RuleStep& rule,
                  const StatisticsPush& push, Pool& pool) {
  check_slots("update_block", slots, rows.num_rows);
  const Parts parts(layout, rows);
  const int dim = layout.dim();
  for_chunks(slots.size(), pool, [&](std::size_t begin, std::size_t end) {
    std::array<RowUpdate, kBatchRows> batch;
    for (std::size_t i = begin; i < std::min(end, begin + kAhead); ++i) {
      parts.fetch(static_cast<std::size_t>(slots[i]));
    }
    for (std::size_t i = begin; i < end;) {
      const std::size_t size = std::min(kBatchRows, end - i);
      for (std::size_t k = 0; k < size; ++k, ++i) {
        if (i + kAhead < end) parts.fetch(static_cast<std::size_t>(slots[i + kAhead]));
        const auto slot = static_cast<std::size_t>(slots[i]);
        batch[k] = {parts.weights(slot), parts.state(slot),
                    grads + i * static_cast<std::size_t>(dim)};
        note(rows, slot, i, push);
      }
      rule.apply(std::span(batch).first(size), dim);
    }
  });
}

}  // namespace trireme
