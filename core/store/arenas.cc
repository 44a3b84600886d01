#include "store/arenas.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace trireme {

Arenas::Arenas(std::span<const std::size_t> row_bytes)
    : bits_(static_cast<int>(std::bit_width(row_bytes.size() - 1))), mask_((Ref{1} << bits_) - 1) {
  TRIREME_CHECK(!row_bytes.empty() && row_bytes.size() <= std::size_t{kClassesMax});
  for (const std::size_t bytes : row_bytes) {
    const auto last = static_cast<Ref>(std::numeric_limits<Ref>::max() >> bits_);
    arenas_.push_back(std::make_unique<Arena>(bytes, last));
    places_[arenas_.size() - 1] = {.data = arenas_.back()->null_row(), .row_bytes = bytes};
    row_bytes_ = std::max(row_bytes_, bytes);
  }
}

Arenas::Reservation::Reservation(Arenas& arenas, std::span<const std::size_t> num_rows)
    : arenas_(arenas) {
  for (std::size_t i = 0; i < arenas.arenas_.size(); ++i) {
    if (num_rows[i] > 0) of_classes_[i].emplace(*arenas.arenas_[i], num_rows[i]);
  }
}

void Arenas::Reservation::take(int row_class, std::span<Ref> refs) noexcept {
  if (refs.empty()) return;
  of_classes_[static_cast<std::size_t>(row_class)]->take(refs);
  if (arenas_.bits_ == 0) return;
  for (Ref& ref : refs) ref = ref << arenas_.bits_ | static_cast<Ref>(row_class);
}

Arenas::Ref Arenas::Reservation::take(int row_class) noexcept {
  Ref ref;
  take(row_class, {&ref, 1});
  return ref;
}

void Arenas::free(std::span<const Ref> refs) noexcept {
  if (bits_ == 0) return arenas_[0]->free(refs);
  for (const Ref ref : refs) {
    const Ref own = ref >> bits_;
    arenas_[ref & mask_]->free({&own, 1});
  }
}

void Arenas::expect(std::size_t num_rows) noexcept {
  for (const auto& arena : arenas_) arena->expect(num_rows);
}

std::size_t Arenas::bytes() const {
  std::size_t n = 0;
  for (const auto& arena : arenas_) n += arena->bytes();
  return n;
}

}  // namespace trireme
