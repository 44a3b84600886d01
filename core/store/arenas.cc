#include "store/arenas.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {

Arenas::Arenas(std::span<const std::size_t> row_bytes) : classes_(row_bytes.size()) {
  TRIREME_CHECK(!row_bytes.empty() && row_bytes.size() <= std::size_t{kClassesMax});
  for (const std::size_t bytes : row_bytes) {
    arenas_.push_back(std::make_unique<Arena>(bytes));
    row_bytes_ = std::max(row_bytes_, bytes);
  }
  // The first chunk of each, so that reference 0 is row 0 of class 0; all of a single class.
  for (int i = 0; i < num_classes(); ++i) add_chunks(i, 1);
  if (num_classes() == 1) add_chunks(0, of(0).num_rows_max());
}

// Makes references for the first `num_rows` rows of a class. Errors: kResourceExhausted.
void Arenas::add_chunks(int row_class, std::size_t num_rows) {
  const auto index = static_cast<std::size_t>(row_class);
  const Arena& arena = of(row_class);
  std::lock_guard lock(mutex_);
  Class& own = classes_[index];
  while (own.num_chunks << kChunkBits < num_rows) {
    if (num_chunks_ == kNumChunks) {
      throw Error(ErrorCode::kResourceExhausted,
                  "Arenas: expected at most 2^32 rows in all row classes, found more");
    }
    const std::size_t first = own.num_chunks << kChunkBits;
    chunks_[num_chunks_] = {.data = arena.null_row() + first * arena.row_bytes(),
                            .row_bytes = static_cast<std::uint32_t>(arena.row_bytes()),
                            .number = static_cast<std::uint16_t>(own.num_chunks),
                            .row_class = static_cast<std::uint8_t>(row_class)};
    own.chunks[own.num_chunks++] = static_cast<std::uint16_t>(num_chunks_++);
  }
}

Arenas::Reservation::Reservation(Arenas& arenas, std::span<const std::size_t> num_rows)
    : arenas_(arenas) {
  for (std::size_t i = 0; i < arenas.arenas_.size(); ++i) {
    if (num_rows[i] == 0) continue;
    Arena& arena = *arenas.arenas_[i];
    of_classes_[i].emplace(arena, num_rows[i]);
    arenas.add_chunks(static_cast<int>(i), std::min(arena.num_rows_ready(), arena.num_rows_max()));
  }
}

void Arenas::Reservation::take(int row_class, std::span<Ref> refs) noexcept {
  if (refs.empty()) return;
  const auto index = static_cast<std::size_t>(row_class);
  of_classes_[index]->take(refs);
  if (arenas_.num_classes() == 1) return;
  const std::uint16_t* chunks = arenas_.classes_[index].chunks.get();
  for (Ref& ref : refs) ref = Ref{chunks[ref >> kChunkBits]} << kChunkBits | (ref & kInChunk);
}

Arenas::Ref Arenas::Reservation::take(int row_class) noexcept {
  Ref ref;
  take(row_class, {&ref, 1});
  return ref;
}

void Arenas::free(std::span<const Ref> refs) noexcept {
  if (num_classes() == 1) return arenas_[0]->free(refs);
  for (const Ref ref : refs) {
    const Chunk& chunk = chunks_[ref >> kChunkBits];
    const Ref own = Ref{chunk.number} << kChunkBits | (ref & kInChunk);
    arenas_[chunk.row_class]->free({&own, 1});
  }
}

Arenas::Ref Arenas::ref_of(const std::byte* row) const noexcept {
  const int row_class = class_of(row);
  const Arena& arena = of(row_class);
  const auto own =
      static_cast<Ref>(static_cast<std::size_t>(row - arena.null_row()) / arena.row_bytes());
  if (num_classes() == 1) return own;
  const Class& chunks = classes_[static_cast<std::size_t>(row_class)];
  return Ref{chunks.chunks[own >> kChunkBits]} << kChunkBits | (own & kInChunk);
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
