// The keys of one call, grouped by stripe, so that each stripe's lock is taken once.
//
// Keys already in stripe order (as `unique` returns them) are used in place; others are copied.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/pool.h"
#include "store/index.h"
#include "table/group.h"

namespace trireme {

class KeysByStripe {
 public:
  // Errors: kBadRequest if there are 2^32 keys or more.
  KeysByStripe(std::span<const std::uint64_t> keys, Pool& pool);

  Group operator[](std::size_t stripe) const noexcept;

 private:
  using Starts = std::array<std::size_t, kNumStripes + 1>;

  std::span<const std::uint64_t> keys_;
  std::unique_ptr<std::uint64_t[]> copied_keys_;
  std::unique_ptr<std::uint32_t[]> positions_;
  Starts starts_{};
};

}  // namespace trireme
