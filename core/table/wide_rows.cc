// Table: write_wide, the inverse of read_wide; and what comes from another table.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "store/find.h"
#include "table/table.h"

namespace trireme {
namespace {

// Keys whose rows must be in memory together, in a table with an SSD tier.
constexpr std::size_t kTieredKeys = 256;

constexpr std::size_t kChunkRows = 8192;  // to check: fewer are not worth waking threads for
// How far ahead the rows to write are brought into cache. They are read in order, but the CPU does
// not see it between writes to random places.
constexpr std::size_t kAheadBytes = 2048;

template <class Function>
void for_chunks(std::size_t n, Pool& pool, const Function& function) {
  pool.run((n + kChunkRows - 1) / kChunkRows, [&](std::size_t chunk) {
    function(chunk * kChunkRows, std::min(n, (chunk + 1) * kChunkRows));
  });
}

bool are_zeros(std::span<const std::uint8_t> classes) noexcept {
  std::uint8_t any = 0;
  for (const std::uint8_t row_class : classes) any |= row_class;
  return any == 0;
}

}  // namespace

// The wide rows of a call.
struct Table::WideRows {
  std::span<const std::uint8_t> classes;
  const std::uint8_t* rows;
  std::size_t row_bytes;
  bool is_stamped;           // with the table's version
  Tier::Claims claims = {};  // of their keys

  const std::uint8_t* at(std::size_t position) const noexcept {
    return rows + position * row_bytes;
  }
};

void Table::write_wide(std::span<const WidePart> parts, Pool& pool, bool is_stamped) {
  std::vector<WideRows> wide;
  std::vector<KeysByStripe> groups;
  for (const WidePart& part : parts) check_wide(part, pool);
  for (const WidePart& part : parts) {
    wide.push_back({.classes = part.classes,
                    .rows = part.rows,
                    .row_bytes = row_bytes(),
                    .is_stamped = is_stamped});
    if (!is_stamped) raise_version(newest_of(wide.back(), pool));
    groups.emplace_back(part.keys, pool);
  }
  pool.run(kNumStripes, [&](std::size_t stripe) {
    for (std::size_t i = 0; i < parts.size(); ++i) write_in_stripe(groups[i][stripe], wide[i]);
  });
}

void Table::check_source(const char* who, const Table& from, std::uint32_t first_bucket,
                         std::uint32_t num_buckets) const {
  if (num_buckets > 0) check_bucket(first_bucket);
  if (num_buckets > kNumBuckets - first_bucket) check_bucket(kNumBuckets);
  if (&from == this || !std::ranges::equal(from.classes_.layouts(), classes_.layouts())) {
    throw Error(ErrorCode::kBadRequest, std::string("Table.") + who +
                                            ": expected another table with rows of the same form");
  }
}

void Table::merge(const Table& from, std::uint32_t first_bucket, std::uint32_t num_buckets,
                  Pool& pool, Tier::Claims claims) {
  check_source("merge", from, first_bucket, num_buckets);
  raise_version(from.version());
  pool.run(num_buckets, [&](std::size_t i) {
    const BucketContent content = from.snapshot(first_bucket + static_cast<std::uint32_t>(i));
    const WideRows wide{.classes = content.classes.span(),
                        .rows = content.rows.data(),
                        .row_bytes = row_bytes(),
                        .is_stamped = true,
                        .claims = claims};
    if (claims.empty()) {
      write_in_stripe({.keys = content.keys.span(), .positions = nullptr, .first = 0}, wide);
      return;
    }
    std::vector<std::uint32_t> order(content.keys.size());  // as claims have them
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::sort(order, {}, [&](std::uint32_t j) { return mix64(content.keys[j]); });
    std::vector<std::uint64_t> keys(order.size());
    std::ranges::transform(order, keys.begin(), [&](std::uint32_t j) { return content.keys[j]; });
    write_in_stripe({.keys = keys, .positions = order.data(), .first = 0}, wide);
  });
}

std::unique_ptr<Tier::Claim> Table::claim_rows(const Table& from, Pool& pool) {
  const Tier& tier = need_tier("claim_rows");
  if (from.num_rows() * arenas_.row_bytes() > tier.use().memory_bytes / 2) return nullptr;
  std::vector<std::uint64_t> keys;
  for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    const BucketContent content = from.snapshot(bucket);
    keys.insert(keys.end(), content.keys.data(), content.keys.data() + content.keys.size());
  }
  return claim(keys, pool);
}

void Table::copy(const Table& from, std::uint32_t first_bucket, std::uint32_t num_buckets,
                 Pool& pool) {
  check_source("copy", from, first_bucket, num_buckets);
  raise_version(from.version());
  pool.run(num_buckets, [&](std::size_t i) {
    const auto bucket = first_bucket + static_cast<std::uint32_t>(i);
    const BucketContent content = from.snapshot(bucket, 0, 1);
    // All removals get one version: with it a key that has come back would leave a later delta.
    const std::span<const std::uint64_t> keys = content.keys.span();
    std::vector<std::uint64_t> present(keys.begin(), keys.end());
    std::ranges::sort(present);
    std::vector<std::uint64_t> removed;
    std::ranges::copy_if(
        content.removed.span(), std::back_inserter(removed),
        [&](std::uint64_t key) { return !std::ranges::binary_search(present, key); });
    restore(bucket, {.keys = keys,
                     .classes = content.classes.span(),
                     .rows = content.rows.span(),
                     .marks = content.marks,
                     .pending = content.pending.span(),
                     .removed = removed,
                     .removed_at = from.version(),
                     .removed_since = content.removed_since});
  });
}

// All keys are of one stripe.
void Table::write_in_stripe(const Group& all, const WideRows& wide) {
  const std::size_t step = tier_ == nullptr ? all.keys.size() : kTieredKeys;
  for (std::size_t begin = 0; begin < all.keys.size(); begin += step) {
    const std::size_t size = std::min(step, all.keys.size() - begin);
    write_group({.keys = all.keys.subspan(begin, size),
                 .positions = all.positions == nullptr ? nullptr : all.positions + begin,
                 .first = all.first + begin},
                wide);
  }
}

void Table::check_wide(const WidePart& part, Pool& pool) const {
  for_chunks(part.keys.size(), pool, [&](std::size_t begin, std::size_t end) {
    const bool is_plain =
        classes_.size() == 1 && are_zeros(part.classes.subspan(begin, end - begin));
    if (is_plain) return;  // nothing is behind the weights of the only class
    for (std::size_t i = begin; i < end; ++i) {
      const int row_class = part.classes[i];
      if (row_class < classes_.size() &&
          classes_[row_class].fits_wide(part.rows + i * row_bytes())) {
        continue;
      }
      throw Error(ErrorCode::kBadRequest,
                  "Table.check_wide: expected rows of a class in [0, " +
                      std::to_string(classes_.size()) +
                      ") with zeros behind its weights, found another of key " +
                      std::to_string(part.keys[i]) + " and class " + std::to_string(row_class));
    }
  });
}

std::uint32_t Table::newest_of(const WideRows& wide, Pool& pool) const {
  std::atomic<std::uint32_t> newest{0};
  for_chunks(wide.classes.size(), pool, [&](std::size_t begin, std::size_t end) {
    std::uint32_t of_chunk = 0;
    for (std::size_t i = begin; i < end; ++i) {
      of_chunk = std::max(of_chunk, classes_.wide().version_of_wide(wide.at(i)));
    }
    std::uint32_t before = newest;
    while (before < of_chunk && !newest.compare_exchange_weak(before, of_chunk)) {
    }
  });
  return newest;
}

// What was taken before the first row changes.
struct Table::Reserved {
  Arenas::Reservation& rows;
  std::span<Arena::Ref> refs;
  std::vector<Index::Entry>& scratch;
};

// All or nothing: every operation that can fail runs before the first row changes.
void Table::write_group(const Group& group, const WideRows& wide) {
  const std::size_t n = group.keys.size();
  const std::uint32_t stripe = stripe_of_hash(mix64(group.keys[0]));
  const Tier::Lock lock = lock_rows(stripe, group.keys, group.keys.size(), wide.claims);
  std::array<std::size_t, Arenas::kClassesMax> counts{};
  if (classes_.size() == 1) {
    counts[0] = n;
  } else {
    for (std::size_t i = 0; i < n; ++i) ++counts[wide.classes[group.position(i)]];
  }
  Arenas::Reservation reservation(arenas_, counts);
  std::vector<Index::Entry> scratch;
  index_.prepare(stripe, n, scratch);
  Array<std::uint32_t> others(n);  // keys without a row, or with one of another class
  Array<Arena::Ref> refs(n);
  // From here on nothing fails.
  std::size_t num_others = 0;
  const std::uint32_t now = version();
  const auto write = [&](std::size_t i, std::byte* row) TRIREME_INLINE_LAMBDA {
    const std::size_t position = group.position(i);
    const RowLayout& layout = classes_[wide.classes[position]];
    const std::uint8_t* const ahead = wide.at(position) + kAheadBytes;
    for (std::size_t at = 0; at < wide.row_bytes; at += 64) __builtin_prefetch(ahead + at);
    layout.read_wide(row, wide.at(position));
    if (wide.is_stamped) layout.stamp(row).version = now;
  };
  const auto replace = [&](std::size_t i, const IndexLine* line, std::byte* row)
                           TRIREME_INLINE_LAMBDA {
                             if (arenas_.class_of(row) != wide.classes[group.position(i)]) {
                               others[num_others++] = static_cast<std::uint32_t>(i);
                               return;
                             }
                             write(i, row);
                             index_.touch(line, now);
                           };
  const auto replace_all = [&](const auto& rows) {
    with_isa(isa_, [&]() TRIREME_INLINE_LAMBDA {
      for (std::size_t begin = 0; begin < n; begin += kFindBlock) {
        Finder finder(rows, index_, arenas_.row_bytes());
        finder.begin(group.keys.subspan(begin, std::min(kFindBlock, n - begin)));
        finder.find(
            [&](std::size_t i, const IndexLine* line, std::byte* row, bool is_found)
                TRIREME_INLINE_LAMBDA {
                  if (is_found) replace(begin + i, line, row);
                },
            [&](std::size_t i, const IndexLine* line, std::byte* row) TRIREME_INLINE_LAMBDA {
              if (row != nullptr) return replace(begin + i, line, row);
              others[num_others++] = static_cast<std::uint32_t>(begin + i);
            });
      }
    });
  };
  if (arenas_.num_classes() == 1) {
    replace_all(arenas_.of(0));
  } else {
    replace_all(arenas_);
  }
  if (num_others == 0) return;
  insert_wide(group, others.span().first(num_others), wide,
              {.rows = reservation, .refs = refs.span(), .scratch = scratch}, write);
}

// Inserts the rows of some of the group's keys. A key may occur twice, or have a row of another
// class, which goes.   numbers: of the keys.   refs: room for as many.
template <class Write>
void Table::insert_wide(const Group& group, std::span<const std::uint32_t> numbers,
                        const WideRows& wide, Reserved reserved, const Write& write) noexcept {
  std::array<std::size_t, kBucketsPerStripe> num_new{};
  std::array<std::size_t, Arenas::kClassesMax> num_taken{};
  for (const std::uint32_t i : numbers) {
    ++num_new[bucket_of(group.keys[i]) % kBucketsPerStripe];
    ++num_taken[wide.classes[group.position(i)]];
  }
  const std::uint32_t now = version();
  const std::uint32_t first_bucket = stripe_of_hash(mix64(group.keys[0])) * kBucketsPerStripe;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if (num_new[i] == 0) continue;
    index_.reserve(first_bucket + i, index_.num_rows(first_bucket + i) + num_new[i], now,
                   reserved.scratch);
  }
  std::array<std::span<Arena::Ref>, Arenas::kClassesMax> left;  // of the rows that were taken
  for (std::size_t i = 0, begin = 0; i < num_taken.size(); begin += num_taken[i++]) {
    left[i] = reserved.refs.subspan(begin, num_taken[i]);
    reserved.rows.take(static_cast<int>(i), left[i]);
  }
  for (const std::uint32_t i : numbers) {
    const std::uint64_t key = group.keys[i];
    const std::uint8_t row_class = wide.classes[group.position(i)];
    std::byte* row = index_.find(key);
    if (row != nullptr && arenas_.class_of(row) == row_class) {
      write(i, row);
      continue;
    }
    if (Arena::Ref old; row != nullptr && index_.erase(key, old)) arenas_.free({&old, 1});
    const Arena::Ref ref = left[row_class].front();
    left[row_class] = left[row_class].subspan(1);
    row = arenas_.row(ref);
    std::memcpy(row, &key, sizeof key);
    write(i, row);
    index_.insert(mix64(key), {ref, static_cast<std::uint16_t>(now)}, now, reserved.scratch);
    if (tier_ != nullptr) tier_->uses().begin(ref);
    admission_.settle(key);
  }
  for (const std::span<Arena::Ref> rest : left) arenas_.free(rest);
}

}  // namespace trireme
