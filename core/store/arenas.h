// The rows of a table whose row classes differ in size: an arena for each class.
//
// A reference identifies a row in all arenas. Its low bits are the class, as many bits as the
// number of classes needs. With one class it equals the arena's reference.
//
// Threads: as for Arena.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/arena.h"

namespace trireme {

class Arenas {
 public:
  using Ref = Arena::Ref;
  static constexpr int kClassesMax = 16;

  // row_bytes: of each class. Requires: 1 to kClassesMax of them. Errors: kResourceExhausted.
  explicit Arenas(std::span<const std::size_t> row_bytes);

  int num_classes() const noexcept { return static_cast<int>(arenas_.size()); }
  const Arena& of(int row_class) const noexcept {
    return *arenas_[static_cast<std::size_t>(row_class)];
  }

  std::byte* row(Ref ref) const noexcept {
    const Place& place = places_[ref & mask_];
    return place.data + std::size_t{ref >> bits_} * place.row_bytes;
  }
  int class_of(Ref ref) const noexcept { return static_cast<int>(ref & mask_); }
  // Requires: the row belongs to one of the arenas.
  int class_of(const std::byte* row) const noexcept {
    int row_class = num_classes() - 1;
    while (row_class > 0 && !of(row_class).has(row)) --row_class;
    return row_class;
  }
  std::byte* null_row() const noexcept { return places_[0].data; }
  std::size_t row_bytes() const noexcept { return row_bytes_; }  // of the largest class

  // The right to take rows of each class without an error. The destructor gives up rows that were
  // not taken.
  class Reservation {
   public:
    // num_rows: of each class. Errors: kResourceExhausted.
    Reservation(Arenas& arenas, std::span<const std::size_t> num_rows);

    // Fills `refs` with rows whose content is undefined. Requires: at most as many as are left.
    void take(int row_class, std::span<Ref> refs) noexcept;
    Ref take(int row_class) noexcept;

   private:
    const Arenas& arenas_;
    std::array<std::optional<Arena::Reservation>, kClassesMax> of_classes_;
  };

  void free(std::span<const Ref> refs) noexcept;
  // Announces that about this many more rows will be taken, of any classes.
  void expect(std::size_t num_rows) noexcept;
  std::size_t bytes() const;  // memory taken from the system

 private:
  struct Place {
    std::byte* data = nullptr;
    std::size_t row_bytes = 0;
  };

  const int bits_;
  const Ref mask_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::array<Place, kClassesMax> places_;  // where the rows of each are
  std::size_t row_bytes_ = 0;
};

}  // namespace trireme
