#include "store/arena.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/error.h"

namespace trireme {
namespace {

constexpr std::size_t kSmallSlabs = 256;                      // 512 MiB
constexpr std::size_t kSlabsMax = std::size_t{1} << 20;       // 2 TiB
constexpr std::size_t kChunkBytesMax = std::size_t{1} << 28;  // address space reserved at a time

}  // namespace

Arena::Arena(std::size_t row_bytes)
    : row_bytes_(row_bytes),
      rows_per_slab_(kSlabBytes / row_bytes),
      index_bits_(static_cast<unsigned>(std::bit_width(rows_per_slab_ - 1))),
      index_mask_((Ref{1} << index_bits_) - 1),
      num_slabs_max_(std::min(kSlabsMax, std::size_t{1} << (32 - index_bits_))),
      slab_table_(num_slabs_max_ * sizeof(std::byte*)) {
  TRIREME_CHECK(row_bytes % 8 == 0 && row_bytes <= kRowBytesMax);
}

bool Arena::starts_small(std::size_t slab) const noexcept { return slab < kSmallSlabs; }

void Arena::allocate(std::span<Ref> refs) {
  std::lock_guard lock(mutex_);
  const std::size_t reused = std::min(refs.size(), num_free_);
  const std::size_t carved = refs.size() - reused;
  while ((num_slabs_ - slab_) * rows_per_slab_ - slab_rows_ < carved) add_slab();
  for (std::size_t i = 0; i < reused; ++i) {
    refs[i] = free_;
    std::memcpy(&free_, row(free_), sizeof free_);
  }
  num_free_ -= reused;
  carve(refs.subspan(reused));
}

void Arena::free(std::span<const Ref> refs) noexcept {
  std::lock_guard lock(mutex_);
  for (const Ref ref : refs) {
    std::memcpy(row(ref), &free_, sizeof free_);
    free_ = ref;
  }
  num_free_ += refs.size();
}

std::size_t Arena::bytes() const {
  std::lock_guard lock(mutex_);
  const std::size_t table = round_up(num_slabs_ * sizeof(std::byte*), kPageBytes);
  std::size_t current = 0;
  if (slab_rows_ > 0) {
    current = starts_small(slab_) ? round_up(slab_rows_ * row_bytes_, kPageBytes) : kSlabBytes;
  }
  return slab_ * kSlabBytes + current + table;
}

// Takes rows from the slabs that are there already.
void Arena::carve(std::span<Ref> refs) noexcept {
  for (Ref& ref : refs) {
    ref = static_cast<Ref>(slab_ << index_bits_ | slab_rows_);
    if (++slab_rows_ < rows_per_slab_) continue;
    if (starts_small(slab_)) advise(slabs()[slab_], kSlabBytes, PageAdvice::kMakeHuge);
    ++slab_;
    slab_rows_ = 0;
  }
}

void Arena::add_slab() {
  if (num_slabs_ == num_slabs_max_) {
    throw Error(ErrorCode::kResourceExhausted,
                "Arena: expected at most " + std::to_string(num_slabs_max_ * rows_per_slab_) +
                    " rows of " + std::to_string(row_bytes_) + " bytes in a table, found more");
  }
  if (chunks_.empty() || chunk_used_ == chunks_.back().size()) {
    // Address space doubles with the table; it costs no memory until it is touched.
    const std::size_t bytes =
        std::clamp(std::bit_floor(num_slabs_ | 1) * kSlabBytes, kSlabBytes, kChunkBytesMax);
    chunks_.reserve(chunks_.size() + 1);
    chunks_.emplace_back(bytes, kSlabBytes);
    chunk_used_ = 0;
  }
  std::byte* slab = chunks_.back().data() + chunk_used_;
  chunk_used_ += kSlabBytes;
  advise(slab, kSlabBytes, starts_small(num_slabs_) ? PageAdvice::kSmall : PageAdvice::kHuge);
  slabs()[num_slabs_++] = slab;
}

}  // namespace trireme
