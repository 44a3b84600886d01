// Tier: finds the rows of keys, wherever they are, and brings them into memory.
#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "store/find.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

namespace {

// A fetch: tasks for the threads of a pool, each for some stripes; keys that are looked for at a
// time; and pages that are read at a time, as many as keep a device busy, but a small part of the
// budget.
constexpr std::size_t kFetchTasks = 16;
constexpr std::size_t kFetchKeys = 512;
constexpr std::size_t kFetchPages = 1024;
constexpr std::size_t kFetchShare = 64;

void sort_distinct(std::vector<ssd::Position>& positions) {
  std::ranges::sort(positions);
  positions.erase(std::ranges::unique(positions).begin(), positions.end());
}

}  // namespace

ssd::PagesRead Tier::read_pages(std::vector<ssd::Position> positions) const {
  sort_distinct(positions);
  return log_.read(std::move(positions));
}

// Pages in memory that was promised. Requires: no lock of the table is held.
Tier::Pages Tier::read_into_room(std::vector<ssd::Position> positions) {
  sort_distinct(positions);
  Room room = make_room(0, positions.size() * log_.page_bytes());
  return {.room = std::move(room), .read = log_.read(std::move(positions))};
}

const std::byte* Tier::row_in_memory(std::uint64_t key) const noexcept {
  return table_.index_.find(key);
}

int Tier::class_of(const std::byte* row) const noexcept { return table_.arenas_.class_of(row); }

std::size_t Tier::num_rows_in_memory() const {
  std::size_t n = 0;
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const Arena::Use use = table_.arenas_.of(i).use();
    n += use.num_rows - use.num_free;
  }
  return n;
}

// Looks for keys of one stripe. what: the use to count, if any. Requires: the stripe's lock.
Tier::Search Tier::search(std::span<const std::uint64_t> keys,
                          std::span<const ssd::PagesRead> reads, std::optional<For> what) const {
  Search result;
  std::uint64_t num_hits = 0;
  const auto visit = [&](const std::byte* row) {
    if (!what) return;
    ++num_hits;
    note_use(table_.arenas_.ref_of(row), *what);
  };
  const auto find_cold = [&](std::uint64_t key) {
    Place place;
    switch (cold_.find(key, reads, place, result.wanted)) {
      case ssd::ColdRows::Found::kHere:
        result.here.push_back(place);
        break;
      case ssd::ColdRows::Found::kUnread:
        result.unread.push_back(key);
        break;
      case ssd::ColdRows::Found::kAbsent:
        break;
    }
  };
  std::vector<std::uint64_t> absent;
  absent.reserve(std::min(keys.size(), kFindBlock));
  for (std::size_t begin = 0; begin < keys.size(); begin += kFindBlock) {
    const auto block = keys.subspan(begin, std::min(kFindBlock, keys.size() - begin));
    absent.clear();
    Finder finder(table_.arenas_, table_.index_, sizeof(std::uint64_t));
    finder.begin(block);
    finder.find(
        [&](std::size_t, const IndexLine*, const std::byte* row, bool is_found) {
          if (is_found) visit(row);
        },
        [&](std::size_t i, const IndexLine*, const std::byte* row) {
          row == nullptr ? absent.push_back(block[i]) : visit(row);
        });
    for (const std::uint64_t key : absent) find_cold(key);
  }
  if (what && *what != For::kLater) {
    uses_.pass(num_hits + result.unread.size(), num_rows_in_memory());
  }
  if (what == For::kRead) {
    num_hits_ += num_hits;
    num_misses_ += result.unread.size();
  }
  return result;
}

void Tier::note_use(Arena::Ref ref, For what) const noexcept {
  what == For::kLater ? uses_.expect(ref) : uses_.count(ref);
}

// Copies rows from pages to memory, and forgets the pages'. A row may be there twice. what: the use
// to count, if any. Returns how many. Requires: the stripe's lock, exclusive; room for them.
std::size_t Tier::move_in(std::uint32_t stripe, const Places& places, std::optional<For> what) {
  if (places.empty()) return 0;
  std::array<std::size_t, Arenas::kClassesMax> counts{};
  for (const Place& place : places) ++counts[static_cast<std::size_t>(place.row_class)];
  Arenas::Reservation reservation(table_.arenas_, counts);
  std::vector<Index::Entry> scratch;
  table_.index_.prepare(stripe, places.size(), scratch);
  const std::uint32_t now = table_.version();
  std::size_t num_rows = 0;
  for (const Place& place : places) {
    const std::uint64_t key = key_of_row(place.row);
    if (table_.index_.find(key) != nullptr) continue;
    const RowLayout& layout = table_.classes_[place.row_class];
    const Arena::Ref ref = reservation.take(place.row_class);
    std::memcpy(table_.arenas_.row(ref), place.row, layout.row_bytes());
    const auto version = static_cast<std::uint16_t>(layout.stamp(place.row).version);
    table_.index_.reserve(place.bucket, table_.index_.num_rows(place.bucket) + 1, now, scratch);
    table_.index_.insert(mix64(key), {ref, version}, now);
    uses_.begin(ref, place.uses, place.time);
    if (what) note_use(ref, *what);
    cold_.take(place);
    ++num_rows;
  }
  return num_rows;
}

Tier::Lock Tier::lock_stripe(std::uint32_t stripe, std::size_t num_new, std::size_t num_bytes) {
  Room room = make_room(num_new, num_bytes);
  Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
  result.room_ = std::move(room);
  return result;
}

Tier::Lock Tier::lock_rows(std::uint32_t stripe, std::span<const std::uint64_t> keys) {
  Room room = make_room(keys.size());
  std::vector<Room> rooms;  // of the reads
  std::vector<ssd::PagesRead> reads;
  for (;;) {
    Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    Search found = search(keys, reads, std::nullopt);  // prepare() counts uses
    if (found.wanted.empty()) {
      move_in(stripe, found.here, std::nullopt);
      result.room_ = std::move(room);
      return result;
    }
    result.lock_.unlock();
    Pages pages = read_into_room(std::move(found.wanted));
    rooms.push_back(std::move(pages.room));
    reads.push_back(std::move(pages.read));
  }
}

Tier::Bucket Tier::lock_bucket(std::uint32_t bucket) {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  const auto all = [](std::uint32_t) { return true; };
  std::vector<Room> rooms;
  std::vector<ssd::PagesRead> reads;
  for (;;) {
    Lock lock(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    std::vector<ssd::Position> wanted;
    Places places;
    if (cold_.for_rows(bucket, reads, wanted, all,
                       [&](const Place& place) { places.push_back(place); })) {
      return {.on_ssd = std::move(places),
              .reads = std::move(reads),
              .rooms = std::move(rooms),
              .lock = std::move(lock)};
    }
    lock.lock_.unlock();
    Pages pages = read_into_room(std::move(wanted));
    rooms.push_back(std::move(pages.room));
    reads.push_back(std::move(pages.read));
  }
}

void Tier::fetch(std::span<const std::uint64_t> keys, Pool& pool, For what) {
  const KeysByStripe groups(keys, pool);
  const std::size_t pages_max =
      std::clamp<std::size_t>(memory_bytes_ / kFetchShare / log_.page_bytes(), 1, kFetchPages);
  auto fetch_stripes = [&](std::size_t task) {
    constexpr std::size_t kStripes = kNumStripes / kFetchTasks;
    std::vector<Missing> missing;
    std::vector<ssd::Position> wanted;
    for (std::size_t stripe = task * kStripes; stripe < (task + 1) * kStripes; ++stripe) {
      const std::span<const std::uint64_t> all = groups[stripe].keys;
      for (std::size_t begin = 0; begin < all.size(); begin += kFetchKeys) {
        std::shared_lock lock(mutex_of_stripe(static_cast<std::uint32_t>(stripe)));
        Search found =
            search(all.subspan(begin, std::min(kFetchKeys, all.size() - begin)), {}, what);
        lock.unlock();
        if (found.unread.empty()) continue;
        wanted.insert(wanted.end(), found.wanted.begin(), found.wanted.end());
        missing.push_back({static_cast<std::uint32_t>(stripe), std::move(found.unread)});
        if (wanted.size() >= pages_max) sort_distinct(wanted);
        if (wanted.size() < pages_max) continue;
        move_in(missing, std::exchange(wanted, {}), what);
        missing.clear();
      }
    }
    if (!missing.empty()) move_in(missing, std::move(wanted), what);
  };
  pool.run(kFetchTasks, fetch_stripes);
}

// Reads pages, and moves rows from them to memory.
void Tier::move_in(std::span<const Missing> missing, std::vector<ssd::Position> wanted, For what) {
  sort_distinct(wanted);
  std::size_t num_rows = 0;
  for (const Missing& group : missing) num_rows += group.keys.size();
  Room room;
  try {
    room = make_room(num_rows, wanted.size() * log_.page_bytes());
  } catch (const Error& error) {
    const bool lacks_room = error.code() == ErrorCode::kResourceExhausted ||
                            error.code() == ErrorCode::kUnavailable ||
                            error.code() == ErrorCode::kDeadlineExceeded;
    if (what == For::kUpdate || !lacks_room) throw;
    // They stay where they are, and can be read there. Whoever wants to change them gets the error.
    num_refused_ += num_rows;
    return;
  }
  const ssd::PagesRead read = log_.read(std::move(wanted));
  for (const Missing& group : missing) {
    Lock lock(this, group.stripe, std::unique_lock(mutex_of_stripe(group.stripe)));
    const Search found = search(group.keys, {&read, 1}, std::nullopt);
    const std::size_t n = move_in(group.stripe, found.here, what);
    if (what == For::kLater) num_fetched_ += n;
  }
}

void Tier::save_places(std::uint32_t bucket, std::vector<std::uint8_t>& bytes) const {
  ByteWriter writer(bytes);
  writer.value(uses_.time());
  cold_.save(bucket, writer);
}

Tier::SavedPlaces Tier::parse_places(std::uint32_t bucket,
                                     std::span<const std::uint8_t> bytes) const {
  ByteReader reader(bytes);
  const auto time = reader.value<std::uint64_t>();
  return {.time = time, .rows = cold_.parse(bucket, reader)};
}

void Tier::restore_places(std::uint32_t bucket, SavedPlaces&& places) noexcept {
  uses_.go_on(places.time);
  cold_.restore(bucket, std::move(places.rows));
}

}  // namespace trireme
