// Searches in open hash tables among keys that somebody may have chosen.
//
// Whoever writes the data chooses its keys, and knows how they are hashed: n keys that were chosen
// to have one home take n^2 steps. So tables count the steps of their searches. After more than
// random keys ever take, the rest is done in another way: sorted (feed/distinct, feed/partition,
// table/buckets), in a tree (feed/unique, table/slot_index), or with other homes (store/index,
// table/pending_counts).
#pragma once

#include <cstddef>

namespace trireme {

// For each key of a table that is made for one call.
inline constexpr std::size_t kStepsPerKey = 16;

}  // namespace trireme
