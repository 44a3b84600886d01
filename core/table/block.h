// Rows of one class in a block: their parts as arrays, numbered by slots. What trireme.device keeps
// on the CPU: each part by itself, or all in wide rows, one behind the other.
//
// A wide row and its parts have the same bits. An update gives a row of a block the bits that
// Table::update gives the row of a table.
//
// Threads: a call divides its slots among the pool's threads, so they must be distinct; nobody else
// uses the block meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/isa.h"
#include "base/pool.h"
#include "optim/rule.h"
#include "store/layout.h"
#include "store/statistics.h"

namespace trireme {

// One part of every row.
template <class T>
struct BlockPart {
  T* data = nullptr;
  std::size_t step = sizeof(T);  // bytes from the part of a row to that of the next

  TRIREME_INLINE T* at(std::size_t slot) const noexcept {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(data) + slot * step);
  }
};

struct BlockRows {
  std::size_t num_rows;               // U
  BlockPart<float> weights;           // (U, D)
  BlockPart<float> state;             // (U, S): planes of D floats, then floats of the row
  BlockPart<Stamp> stamps;            // (U)
  BlockPart<ShowClick> shows;         // (U), as the next two; null if the table is not scored
  BlockPart<float> delta_scores;      // (U)
  BlockPart<std::uint32_t> features;  // (U)
};

// Requires of all: a layout of float32 weights.   slots: (n). Errors: kBadRequest for a slot
// outside [0, U), nothing changed.

// Wide rows to the rows of these slots.   wide: (n, wide_bytes).   Errors: kBadRequest for a row of
// a wider class, nothing changed.
void split_wide(const RowLayout& layout, const std::uint8_t* wide,
                std::span<const std::int32_t> slots, const BlockRows& to, Pool& pool);
// The rows of these slots as wide rows.
void join_wide(const RowLayout& layout, const BlockRows& from, std::span<const std::int32_t> slots,
               std::uint8_t* wide, Pool& pool);
// out: (n, D). Here slots need not be distinct.
void block_weights(const RowLayout& layout, const BlockRows& from,
                   std::span<const std::int32_t> slots, float* out, Pool& pool);
// Applies a step of a rule to the rows of these slots, and notes it in their statistics.   grads:
// (n, D). push: its columns have a place for each of the slots.
void update_block(const RowLayout& layout, const BlockRows& rows,
                  std::span<const std::int32_t> slots, const float* grads, const RuleStep& rule,
                  const StatisticsPush& push, Pool& pool);

}  // namespace trireme
