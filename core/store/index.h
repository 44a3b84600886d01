// The index of a table: for each of its 4096 buckets, a hash table from key to row.
//
// A bucket is an array of 64-byte lines, one cache line per probe. A line holds 12 slots: an 8-bit
// tag (0: free) and a 32-bit reference. A key's home line is computed from bits of its hash that
// neither bucket nor tag use. If the home line is full, the key goes to the next line, and every
// line that it passes counts it. So a search can stop early, and erasing leaves no tombstones (as
// in Facebook's F14; here the next line is the neighbour).
//
// The 64 buckets of a stripe are contiguous in one range of address space. A bucket grows by an
// eighth and moves those after it. So no memory is unused in between, unlike with doubling or a
// fragmented heap.
//
// A line also stores the low 16 bits of the newest version of its rows, so that a search for the
// rows changed since a version skips most lines. Versions only increase, and the 16 bits stand for
// the newest version that ends in them. A line whose rows have not changed for 2^16 versions looks
// newer than it is, never older.
//
// Keys that somebody chose would all have one home. A bucket where a key has passed too many lines
// computes homes in another way from then on: few keys, if any, have one home in several ways.
//
// Invariants: a bucket's lines are at most kLoadPercent full, so every search ends; no key occurs
// twice. Keys are read from the rows. Threads: the data of a stripe is guarded by the stripe's
// lock, which the table holds.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "base/isa.h"
#include "base/pages.h"
#include "store/arenas.h"
#include "store/row.h"

namespace trireme {

inline constexpr std::uint32_t kNumStripes = 64;
inline constexpr std::uint32_t kBucketsPerStripe = kNumBuckets / kNumStripes;

constexpr std::uint32_t stripe_of_hash(std::uint64_t hash) noexcept {
  return bucket_of_hash(hash) / kBucketsPerStripe;
}

struct alignas(64) IndexLine {
  static constexpr std::uint32_t kSlots = 12;

  std::uint8_t tags[kSlots];
  std::uint8_t passed;  // keys that passed this line because it was full; stays at 255
  std::uint8_t unused;
  std::uint16_t version;    // low bits of the newest version of a row here
  Arena::Ref refs[kSlots];  // of a free slot: 0, or a row that was here before

  static std::uint8_t tag_of(std::uint64_t hash) noexcept {
    const auto tag = static_cast<std::uint8_t>(hash);
    return tag | (tag == 0);
  }
  // Bit i is set where tags[i] == tag.
  TRIREME_INLINE std::uint32_t match(std::uint8_t tag) const noexcept;
  // Bit i is set where slot i has a row.
  std::uint32_t used() const noexcept { return ~match(0) & ((1U << kSlots) - 1); }
  // The first slot of a match; any slot if there is none.
  static std::uint32_t first_slot(std::uint32_t match) noexcept {
    return static_cast<std::uint32_t>(std::countr_zero(match | 1U << (kSlots - 1)));
  }
  // The row of a key, null if it is not on this line.
  template <class Rows>
  std::byte* find(std::uint64_t key, std::uint8_t tag, const Rows& rows) const noexcept;
  // Number of versions since the stored one, modulo 2^16.
  std::uint16_t age(std::uint32_t now) const noexcept {
    return static_cast<std::uint16_t>(now - version);
  }
};
static_assert(sizeof(IndexLine) == 64);
inline constexpr IndexLine kEmptyLine{};

class Index {
 public:
  // How buckets grow that have few rows: by a few lines, or to twice their lines, which costs less
  // time and more memory.
  enum class SmallBuckets { kGrowByFew, kDouble };
  Index(const Arenas& arenas, SmallBuckets small);

  // The line where the search for a key begins.
  TRIREME_INLINE const IndexLine* home(std::uint64_t hash) const noexcept {
    const Bucket& bucket = buckets_[bucket_of_hash(hash)];
    return bucket.lines + home_of(hash, bucket);
  }
  // The second row to try for a key, and its line: that of the second slot with the key's tag on
  // the home line, else of the first on the next line; Arena::kNullRef if there is none.
  struct Match {
    const IndexLine* line;
    Arena::Ref ref;
  };
  TRIREME_INLINE Match second_match(std::uint64_t hash) const noexcept;
  // The line that is `distance` after the home line. Requires: distance 0, or the search continues.
  const IndexLine* line_at(std::uint64_t hash, std::uint32_t distance) const noexcept;
  // Whether a key that is not on the line at `distance` may be on the next.
  bool goes_on(std::uint64_t hash, std::uint32_t distance) const noexcept {
    return line_at(hash, distance)->passed != 0 &&
           distance + 1 < buckets_[bucket_of_hash(hash)].num_lines;
  }

  // The row of a key, null if absent. For many keys, see Finder.
  std::byte* find(std::uint64_t key) const noexcept;

  // A row, and the low bits of a version: the row's own, or a newer one of the same line.
  struct Entry {
    Arena::Ref ref;
    std::uint16_t version;
  };

  // Ensures that inserting `num_rows` rows into a stripe cannot fail: takes address space, and
  // scratch for reserve(). Errors: kResourceExhausted, std::bad_alloc.
  void prepare(std::uint32_t stripe, std::size_t num_rows, std::vector<Entry>& scratch);
  // What the memory of a stripe depends on.
  struct Size {
    std::size_t num_rows = 0;
    std::size_t num_lines_left = 0;  // that buckets have because they had more rows
    std::size_t bytes = 0;           // taken from the system
  };
  Size size(std::uint32_t stripe) const noexcept;
  // How many bytes more a stripe of this size takes at most when it gets this many rows more. Rows
  // that come meanwhile and were among them leave the sum of both as it is, or lower.
  std::size_t growth(const Size& size, std::size_t num_rows) const noexcept;
  // Makes room for `num_rows` rows in a bucket. Requires: prepare(), and no more than that.
  void reserve(std::uint32_t bucket, std::size_t num_rows, std::uint32_t now,
               std::vector<Entry>& scratch) noexcept;

  // In all functions below, `now` is the newest version of the table.
  // May move the bucket's rows to other lines. Requires: the key is absent, and there is room for
  // it; scratch is that of prepare().
  void insert(std::uint64_t hash, Entry entry, std::uint32_t now,
              std::vector<Entry>& scratch) noexcept;
  // Sets the version of the line of a changed row: to `now`, or to the version of the row that
  // replaced it.
  TRIREME_INLINE void touch(const IndexLine* line, std::uint32_t now) noexcept {
    const auto version = static_cast<std::uint16_t>(now);
    if (line->version != version) const_cast<IndexLine*>(line)->version = version;
  }
  // Requires: the key is present.
  void touch(std::uint64_t key, std::uint32_t version, std::uint32_t now) noexcept;
  // Gives a present key another row, and returns the old one, which the caller frees.
  Arena::Ref replace(std::uint64_t key, Arena::Ref ref) noexcept;
  // Returns whether the key was present; `ref` is then its row, which the caller frees.
  bool erase(std::uint64_t key, Arena::Ref& ref) noexcept;

  // Appends the references of a bucket, in the order of the lines.
  void refs_of(std::uint32_t bucket, std::vector<Arena::Ref>& refs) const {
    refs_since(bucket, 0, 0, refs);
  }
  // The same without lines whose rows have not changed since a version; 0: all lines.
  void refs_since(std::uint32_t bucket, std::uint32_t since, std::uint32_t now,
                  std::vector<Arena::Ref>& refs) const;
  // Gives memory back if a bucket has far fewer rows than it had. Errors: std::bad_alloc, nothing
  // changed.
  void trim(std::uint32_t bucket, std::uint32_t now, std::vector<Entry>& scratch);
  // Forgets a bucket's rows, which the caller frees; its lines stay.
  void clear(std::uint32_t bucket) noexcept;
  // Frees the lines of an empty bucket.
  void release(std::uint32_t bucket) noexcept;

  std::size_t num_rows(std::uint32_t bucket) const noexcept { return num_rows_[bucket]; }
  std::size_t bytes(std::uint32_t stripe) const noexcept {  // taken from the system
    return round_up(num_lines_max_[stripe] * sizeof(IndexLine), kPageBytes);
  }

 private:
  static constexpr std::uint64_t kLoadPercent = 82;

  struct Bucket {                                            // what each search reads
    IndexLine* lines = const_cast<IndexLine*>(&kEmptyLine);  // not written while num_lines is 0
    std::uint32_t num_lines = 0;
    std::uint32_t factor = 1;  // odd; see home_of
  };

  static std::uint64_t lines_for(std::uint64_t num_rows) noexcept {
    constexpr std::uint64_t kPerHundredLines = IndexLine::kSlots * kLoadPercent;
    return (num_rows * 100 + kPerHundredLines - 1) / kPerHundredLines;
  }
  std::uint64_t grown(std::uint64_t num_lines) const noexcept;
  std::uint64_t growth_max() const noexcept;
  // The first thirty-two bits of a product of the hash, without the bucket's bits, scaled to the
  // number of lines. With factor 1 they are bits of the hash above the tag's.
  TRIREME_INLINE static std::uint64_t home_of(std::uint64_t hash, const Bucket& bucket) noexcept {
    return ((hash << 12) * bucket.factor >> 32) * bucket.num_lines >> 32;
  }
  // The place of a key's row; null if absent.
  struct Place {
    std::byte* row;
    std::uint32_t distance;  // of its line from the home line
  };
  Place place_of(std::uint64_t key, std::uint64_t hash) const noexcept;
  std::uint32_t slot_of(const IndexLine& line, std::uint64_t hash,
                        const std::byte* row) const noexcept;
  static void mark(IndexLine& line, std::uint16_t version, std::uint32_t now) noexcept;
  void entries_of(std::uint32_t bucket, std::vector<Entry>& entries) const;
  std::size_t num_lines_of_stripe(std::uint32_t stripe) const noexcept;
  void lay_out(std::uint32_t bucket, std::uint32_t num_lines) noexcept;
  // Inserts a row; returns how many lines it has passed.
  std::uint64_t place(std::uint64_t hash, Entry entry, std::uint32_t now) noexcept;
  void insert_again(const std::vector<Entry>& entries, std::uint32_t now) noexcept;

  const Arenas& arenas_;
  const std::uint64_t doubled_max_;        // lines up to which a bucket doubles them
  std::array<Pages, kNumStripes> memory_;  // the lines of a stripe's buckets, in order
  std::array<std::size_t, kNumStripes> num_lines_max_{};  // the most lines used so far
  alignas(64) std::array<Bucket, kNumBuckets> buckets_{};
  std::array<std::uint32_t, kNumBuckets> num_rows_{};
};

TRIREME_INLINE std::uint32_t IndexLine::match(std::uint8_t tag) const noexcept {
  constexpr std::uint32_t kAll = (1U << kSlots) - 1;
#if defined(__SSE2__)
  // Sixteen bytes from `tags` on: the last four are other members, and masked out.
  const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(this));
  const __m128i same = _mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<std::uint32_t>(_mm_movemask_epi8(same)) & kAll;
#else
  std::uint32_t mask = 0;
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    mask |= std::uint32_t{tags[slot] == tag} << slot;
  }
  return mask & kAll;
#endif
}

template <class Rows>
std::byte* IndexLine::find(std::uint64_t key, std::uint8_t tag, const Rows& rows) const noexcept {
  for (std::uint32_t slots = match(tag); slots != 0; slots &= slots - 1) {
    std::byte* row = rows.row(refs[first_slot(slots)]);
    if (key_of_row(row) == key) return row;
  }
  return nullptr;
}

TRIREME_INLINE Index::Match Index::second_match(std::uint64_t hash) const noexcept {
  const Bucket& bucket = buckets_[bucket_of_hash(hash)];
  const std::uint64_t home = home_of(hash, bucket);
  const IndexLine* line = bucket.lines + home;
  const IndexLine* next = bucket.lines + (home + 1 < bucket.num_lines ? home + 1 : 0);
  const std::uint32_t first = line->match(IndexLine::tag_of(hash));
  const std::uint32_t here = first & (first - 1);
  const std::uint32_t slots = here != 0 ? here : next->match(IndexLine::tag_of(hash));
  const IndexLine* found = here != 0 ? line : next;
  const Arena::Ref ref = found->refs[IndexLine::first_slot(slots)];
  return {.line = found, .ref = ref & (0 - Arena::Ref{slots != 0})};
}

inline const IndexLine* Index::line_at(std::uint64_t hash, std::uint32_t distance) const noexcept {
  const Bucket& bucket = buckets_[bucket_of_hash(hash)];
  std::uint64_t line = home_of(hash, bucket) + distance;
  if (line >= bucket.num_lines && line > 0) line -= bucket.num_lines;
  return bucket.lines + line;
}

}  // namespace trireme
