// The searches of StripeIndex: part of index.h.
//
// A batch is searched as a pipeline. Stage 1 hashes key t and fetches its line; stage 2, kAhead
// keys later, compares the tags and fetches the candidate rows; stage 3, kAhead keys later again,
// compares the key. So a few dozen cache misses are under way at a time. Keys to be sought on a
// further line are collected and run through it again.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <bit>

#include "store/index.h"

namespace trireme {

inline constexpr IndexLine kEmptyLine{};

inline std::uint32_t IndexLine::match(std::uint8_t tag) const noexcept {
  constexpr std::uint32_t kAll = (1U << kSlots) - 1;
#if defined(__SSE2__)
  // Sixteen bytes from `tags` on: the last four are other members, and masked out.
  const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(this));
  const __m128i same = _mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<std::uint32_t>(_mm_movemask_epi8(same)) & kAll;
#else
  std::uint32_t mask = 0;
  for (std::uint32_t slot = 0; slot < kSlots; ++slot)
    mask |= std::uint32_t{tags[slot] == tag} << slot;
  return mask & kAll;
#endif
}

inline const IndexLine* StripeIndex::line_at(std::uint64_t hash,
                                             std::uint32_t distance) const noexcept {
  const Bucket& bucket = buckets_[bucket_in_stripe(hash)];
  if (bucket.num_lines == 0) return &kEmptyLine;
  const std::uint64_t bits =
      static_cast<std::uint32_t>(hash >> 20);  // below the bucket's, above the tag's
  std::uint64_t line = (bits * bucket.num_lines >> 32) + distance;
  if (line >= bucket.num_lines) line -= bucket.num_lines;
  return lines() + bucket.first_line + line;
}

template <class KeyAt, class Visit, class Further>
void StripeIndex::find_at(std::size_t n, std::uint32_t distance, const Arena& arena,
                          std::size_t row_bytes, const KeyAt& key_at, const Visit& visit,
                          const Further& further) const {
  struct Search {
    const IndexLine* line;
    std::uint32_t tag;
    std::uint32_t candidates;
  };
  constexpr std::size_t kRing = 4 * kAhead;
  Search searches[kRing];
  for (std::size_t t = 0; t < n + 2 * kAhead; ++t) {
    if (t < n) {
      const std::uint64_t hash = mix64(key_at(t));
      Search& search = searches[t % kRing];
      search.line = line_at(hash, distance);
      search.tag = tag_of(hash);
      __builtin_prefetch(search.line);
    }
    if (const std::size_t i = t - kAhead;
        i < n) {  // wraps around to a large number before the stage begins
      Search& search = searches[i % kRing];
      search.candidates = search.line->match(static_cast<std::uint8_t>(search.tag));
      for (std::uint32_t rest = search.candidates; rest != 0; rest &= rest - 1) {
        const std::byte* row = arena.row(search.line->refs[std::countr_zero(rest)]);
        for (std::size_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte);
        __builtin_prefetch(row + row_bytes - 1);
      }
    }
    if (const std::size_t i = t - 2 * kAhead; i < n) {
      const Search& search = searches[i % kRing];
      std::byte* found = nullptr;
      for (std::uint32_t rest = search.candidates; rest != 0 && found == nullptr;
           rest &= rest - 1) {
        std::byte* row = arena.row(search.line->refs[std::countr_zero(rest)]);
        if (key_of_row(row) == key_at(i)) found = row;
      }
      if (found == nullptr && search.line->passed != 0) {
        further(i);
      } else {
        visit(i, found);
      }
    }
  }
}

template <class Visit>
void StripeIndex::find(std::span<const std::uint64_t> keys, const Arena& arena,
                       std::size_t row_bytes, Visit&& visit) const {
  std::vector<std::uint32_t> pending;
  find_at(
      keys.size(), 0, arena, row_bytes, [&](std::size_t i) { return keys[i]; }, visit,
      [&](std::size_t i) { pending.push_back(static_cast<std::uint32_t>(i)); });
  std::vector<std::uint32_t> again;
  for (std::uint32_t distance = 1; !pending.empty(); ++distance, pending.swap(again)) {
    again.clear();
    find_at(
        pending.size(), distance, arena, row_bytes, [&](std::size_t i) { return keys[pending[i]]; },
        [&](std::size_t i, std::byte* row) { visit(pending[i], row); },
        [&](std::size_t i) {
          // Every line of a small bucket may count passed keys: stop after one round.
          const std::uint32_t bucket = bucket_in_stripe(mix64(keys[pending[i]]));
          if (distance + 1 < buckets_[bucket].num_lines) {
            again.push_back(pending[i]);
          } else {
            visit(pending[i], nullptr);
          }
        });
  }
}

}  // namespace trireme
