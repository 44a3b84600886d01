// Tier: finds the rows of keys, wherever they are, and brings them into memory.
#include <algorithm>
#include <deque>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "store/find.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

namespace {

// A fetch: keys that are looked for at a time, and reads that a thread has under way.
constexpr std::size_t kFetchKeys = 512;
constexpr std::size_t kFetchReads = 8;

}  // namespace

// What a call that locks rows has read for them, and room for it. Nobody waits for room while it
// has some, or two calls could wait for each other: who does not get more at once gives up what it
// has.
class Tier::Gathering {
 public:
  // Waits until there is room.
  Gathering(Tier& tier, const Need& need, Wait wait = Wait::kYes)
      : tier_(tier), base_(need), wait_(wait) {
    if (base_.rows > 0) rooms.push_back(tier_.make_room(base_));
  }

  // Reads pages, with room for so many of their rows; or nothing: then all are wanted again.
  // Requires: no lock of the table is held.
  void read(std::vector<ssd::Position> positions, std::size_t num_rows) {
    ssd::sort_distinct(positions);
    const Need more{.stripe = base_.stripe,
                    .rows = num_rows,
                    .read_bytes = tier_.log_.read_bytes(positions.size())};
    if ((left_.rows < more.rows || left_.read_bytes < more.read_bytes) && !add(more)) return;
    left_.rows -= more.rows;
    left_.read_bytes -= more.read_bytes;
    reads.push_back(tier_.log_.read(std::move(positions)));
  }

  // Makes room. Returns false if that took all that was read.
  bool add(const Need& more) {
    try {
      rooms.push_back(tier_.make_room(more, Wait::kNo));
      left_.rows += more.rows;
      left_.read_bytes += more.read_bytes;
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted || wait_ == Wait::kNo) throw;
    }
    reads.clear();
    rooms.clear();
    rooms = tier_.make_room(std::array{base_, more});
    left_ = more;
    return false;
  }

  std::vector<Room> rooms;
  std::vector<ssd::PagesRead> reads;

 private:
  Tier& tier_;
  const Need base_;
  Need left_;  // of it: for pages that are to be read
  Wait wait_;
};

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
  std::vector<Arena::Ref> used;
  if (what) used.reserve(std::min(keys.size(), kFindBlock));
  const auto visit = [&](const std::byte* row) {
    if (!what) return;
    used.push_back(table_.arenas_.ref_of(row));
    uses_.prefetch(used.back());
  };
  const auto find_cold = [&](std::uint64_t key) {
    Place place;
    const std::size_t num_wanted = result.wanted.size();
    switch (cold_.find(key, reads, place, result.wanted)) {
      case ssd::ColdRows::Found::kHere:
        result.here.push_back(place);
        break;
      case ssd::ColdRows::Found::kUnread:
        result.unread.push_back(key);
        result.begins.push_back(num_wanted);
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
    cold_.prefetch(absent);
    for (const Arena::Ref ref : used) note_use(ref, *what);
    num_hits += used.size();
    used.clear();
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
  std::vector<std::uint64_t> keys(places.size());
  std::ranges::transform(places, keys.begin(), [](const Place& p) { return key_of_row(p.row); });
  for (const std::uint64_t key : keys) __builtin_prefetch(table_.index_.home(mix64(key)));
  cold_.prefetch(keys);
  std::size_t num_rows = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    const std::uint64_t key = keys[i];
    if (table_.index_.find(key) != nullptr) continue;
    const RowLayout& layout = table_.classes_[place.row_class];
    const Arena::Ref ref = reservation.take(place.row_class);
    std::memcpy(table_.arenas_.row(ref), place.row, layout.row_bytes());
    const auto version = static_cast<std::uint16_t>(layout.stamp(place.row).version);
    table_.index_.reserve(place.bucket, table_.index_.num_rows(place.bucket) + 1, now, scratch);
    table_.index_.insert(mix64(key), {ref, version}, now, scratch);
    uses_.begin(ref, place.uses, place.time);
    if (what) note_use(ref, *what);
    cold_.take(place);
    ++num_rows;
  }
  return num_rows;
}

Tier::Lock Tier::lock_stripe(std::uint32_t stripe, std::size_t num_new, std::size_t num_bytes,
                             Claims claims) {
  if (!claims.empty() && num_bytes == 0) {
    Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    result.num_new_ = num_new;
    if (use_rooms(result, claims)) return result;
  }
  Room room = make_room({.stripe = stripe, .rows = num_new, .bytes = num_bytes});
  Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
  result.rooms_.push_back(std::move(room));
  return result;
}

Tier::Lock Tier::lock_unclaimed(std::uint32_t stripe, std::span<const std::uint64_t> keys,
                                std::size_t num_new, Wait wait) {
  Gathering gathering(*this, {.stripe = stripe, .rows = num_new}, wait);
  for (;;) {
    Lock result(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    Search found = search(keys, gathering.reads, std::nullopt);  // whoever fetched counted uses
    if (found.wanted.empty()) {
      move_in(stripe, found.here, std::nullopt);
      result.num_new_ = num_new;
      result.rooms_ = std::move(gathering.rooms);
      return result;
    }
    result.lock_.unlock();
    gathering.read(std::move(found.wanted), found.unread.size());
  }
}

Tier::Bucket Tier::lock_bucket(std::uint32_t bucket) {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  Gathering gathering(*this, {.stripe = stripe});
  for (;;) {
    Lock lock(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
    std::vector<ssd::Position> wanted;
    Places places;
    if (cold_.for_rows(bucket, gathering.reads, wanted,
                       [&](const Place& place) { places.push_back(place); })) {
      return {.on_ssd = std::move(places),
              .reads = std::move(gathering.reads),
              .rooms = std::move(gathering.rooms),
              .lock = std::move(lock)};
    }
    lock.lock_.unlock();
    gathering.read(std::move(wanted), 0);
  }
}

// Rows that leave memory for it may be of these buckets, which have more pages then.
void Tier::check_buckets(std::span<const std::uint32_t> buckets) {
  for (std::size_t num_pages = 0;;) {
    std::size_t num_most = 0;
    for (const std::uint32_t bucket : buckets) {
      const std::shared_lock lock(mutex_of_stripe(bucket / kBucketsPerStripe));
      num_most = std::max(num_most, cold_.num_pages(bucket));
    }
    if (num_most <= num_pages) return;
    num_pages = num_most;
    make_room({.read_bytes = log_.read_bytes(num_pages)});
  }
}

// What one thread of a fetch does. While it looks for keys, and moves rows that were read, the
// devices read the next.
class Tier::Fetcher {
 public:
  Fetcher(Tier& tier, For what, Wait wait) : tier_(tier), what_(what), wait_(wait) {}

  void add(std::uint32_t stripe, std::span<const std::uint64_t> keys) {
    std::shared_lock lock(tier_.mutex_of_stripe(stripe));
    Search found = tier_.search(keys, {}, what_);
    lock.unlock();
    const std::size_t pages_max = tier_.log_.read_pages();
    for (std::size_t i = 0; i < found.unread.size(); ++i) {
      if (wanted_.size() >= pages_max) ssd::sort_distinct(wanted_);
      if (wanted_.size() >= pages_max) begin_read();
      if (missing_.empty() || missing_.back().stripe != stripe) {
        missing_.push_back({.stripe = stripe, .keys = {}, .first = {}});
      }
      const std::size_t begin = found.begins[i];
      const std::size_t end =
          i + 1 < found.begins.size() ? found.begins[i + 1] : found.wanted.size();
      missing_.back().keys.push_back(found.unread[i]);
      missing_.back().first.push_back(found.wanted[begin]);
      wanted_.insert(wanted_.end(), &found.wanted[begin], &found.wanted[begin] + (end - begin));
    }
  }

  // Waits for what is under way.
  void end() {
    if (!missing_.empty()) begin_read();
    while (!reads_.empty()) end_read();
  }

 private:
  struct Missing {
    std::uint32_t stripe;
    std::vector<std::uint64_t> keys;
    std::vector<ssd::Position> first;  // of each key: the first page that may have its row
  };
  struct Read {
    std::vector<Room> rooms;
    std::vector<Missing> missing;
    ssd::PageLog::Reading pages;
  };

  void begin_read() {
    ssd::sort_distinct(wanted_);
    std::vector<Missing> missing = std::exchange(missing_, {});
    std::vector<ssd::Position> wanted = std::exchange(wanted_, {});
    const std::size_t read_bytes = tier_.log_.read_bytes(wanted.size());
    std::vector<Need> needs{{.read_bytes = read_bytes}};
    for (const Missing& group : missing) {
      needs.push_back({.stripe = group.stripe, .rows = group.keys.size()});
    }
    while (reads_.size() == kFetchReads || (!reads_.empty() && !is_spare(read_bytes))) {
      end_read();
    }
    if (std::vector<Room> rooms = make_room(needs); !rooms.empty()) {
      reads_.push_back({.rooms = std::move(rooms),
                        .missing = std::move(missing),
                        .pages = tier_.log_.begin_read(std::move(wanted))});
    } else {
      for (const Missing& group : missing) {
        if (what_ != For::kUpdate) tier_.num_refused_ += group.keys.size();
      }
    }
  }

  // Whether what is kept for reads has room for one more. Beyond that a thread reads no further
  // ahead.
  bool is_spare(std::size_t num_bytes) const noexcept {
    return tier_.promised_.read_bytes + num_bytes <= tier_.spare_bytes();
  }

  // None: the rows stay where they are, and can be read there. Whoever wants to change them waits.
  std::vector<Room> make_room(Needs needs) {
    for (;; end_read()) {  // which gives up its room
      const bool waits = what_ == For::kUpdate && wait_ == Wait::kYes && reads_.empty();
      try {
        return tier_.make_room(needs, waits ? Wait::kYes : Wait::kNo);
      } catch (const Error& error) {
        const bool lacks_room = error.code() == ErrorCode::kResourceExhausted ||
                                error.code() == ErrorCode::kUnavailable ||
                                error.code() == ErrorCode::kDeadlineExceeded;
        if (!lacks_room || waits) throw;
        if (reads_.empty()) return {};
      }
    }
  }

  void end_read() {
    Read read = std::move(reads_.front());
    reads_.pop_front();
    const ssd::PagesRead pages = read.pages.end();
    for (const Missing& group : read.missing) {
      Lock lock(&tier_, group.stripe, std::unique_lock(tier_.mutex_of_stripe(group.stripe)));
      const std::size_t n = tier_.move_in(group.stripe, places_of(group, pages), what_);
      if (what_ == For::kLater) tier_.num_fetched_ += n;
    }
  }

  // Where the rows are. Requires: the stripe's lock.
  Places places_of(const Missing& group, const ssd::PagesRead& pages) const {
    Places places(group.keys.size());
    std::size_t num_found = 0;
    std::vector<std::uint64_t> others;
    for (std::size_t i = 0; i < group.keys.size(); ++i) {
      const bool is_there =
          tier_.cold_.find_at(group.first[i], pages, group.keys[i], places[num_found]);
      is_there ? void(++num_found) : others.push_back(group.keys[i]);
    }
    places.resize(num_found);
    if (others.empty()) return places;
    const Search found = tier_.search(others, {&pages, 1}, std::nullopt);
    places.insert(places.end(), found.here.begin(), found.here.end());
    return places;
  }

  Tier& tier_;
  const For what_;
  const Wait wait_;  // of an update
  std::vector<Missing> missing_;
  std::vector<ssd::Position> wanted_;
  std::deque<Read> reads_;
};

void Tier::fetch(std::span<const std::uint64_t> keys, Pool& pool, For what, Wait wait) {
  const KeysByStripe groups(keys, pool);
  std::atomic<std::uint32_t> next{0};
  pool.run(static_cast<std::size_t>(pool.threads()), [&](std::size_t) {
    Fetcher fetcher(*this, what, wait);
    for (std::uint32_t stripe; (stripe = next++) < kNumStripes;) {
      const std::span<const std::uint64_t> all = groups[stripe].keys;
      for (std::size_t begin = 0; begin < all.size(); begin += kFetchKeys) {
        fetcher.add(stripe, all.subspan(begin, std::min(kFetchKeys, all.size() - begin)));
      }
    }
    fetcher.end();
  });
}

void Tier::save_places(std::uint32_t bucket, ByteWriter& bytes) const {
  bytes.value(uses_.time());
  cold_.save(bucket, bytes);
}

Tier::SavedPlaces Tier::parse_places(std::uint32_t bucket, ByteReader& bytes) const {
  const auto time = bytes.value<std::uint64_t>();
  return {.time = time, .rows = cold_.parse(bucket, bytes)};
}

void Tier::restore_places(std::uint32_t bucket, SavedPlaces&& places) noexcept {
  uses_.go_on(places.time);
  cold_.restore(bucket, std::move(places.rows));
}

}  // namespace trireme
