// The SSD tier of a table: rows that are used seldom lie in pages on SSD, the others in memory.
//
// A row is in one of the two; which one is no part of the table's state, and no result depends on
// it. What changes rows first makes those that it needs hot, under the stripe's lock; no lock is
// held while pages are read. What only reads may do without.
//
// Memory is bounded by a budget, over rows, both indexes, buffers and reads. Whoever needs room
// for rows promises it beforehand. If it is not there, a hand goes round the buckets: of each it
// moves the rows that were used least since to SSD, whole pages at a time, and cleans old segments
// as far as that needs it.
//
// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/pages.h"
#include "base/pool.h"
#include "store/arenas.h"
#include "store/index.h"
#include "store/ssd/cold_rows.h"
#include "store/ssd/device.h"
#include "store/ssd/page_log.h"
#include "table/stripe.h"
#include "table/uses.h"

namespace trireme {

class Table;

struct TierConfig {
  std::vector<std::shared_ptr<ssd::Device>> devices;  // none: all rows are in memory
  std::size_t memory_bytes = 0;                       // of the table
  std::uint32_t number = 0;                           // of the table, in its pages
  std::size_t segment_bytes = std::size_t{64} << 20;
  std::size_t buffer_bytes = std::size_t{1} << 20;  // written at once
  std::size_t read_bytes = std::size_t{16} << 20;   // of reads, kept for them at all times
  std::chrono::milliseconds timeout{30000};         // of a device
};

class Tier {
 public:
  using Place = ssd::ColdRows::Place;
  using Places = std::vector<Place>;

  // The table outlives it. Errors: kBadRequest: the budget is below what the tier itself needs; and
  // those of the devices.
  Tier(Table& table, const TierConfig& config);

  // What buffers and reads take at all times.   row_bytes: of the largest class.
  static std::size_t buffer_bytes(const TierConfig& config, std::size_t row_bytes) noexcept;

  struct Need {
    std::uint32_t stripe = 0;    // of the rows
    std::size_t rows = 0;        // of any class, in memory, with what finds them there
    std::size_t bytes = 0;       // of anything else
    std::size_t read_bytes = 0;  // of pages
  };
  using Needs = std::span<const Need>;
  // The promise that what is needed fits into the budget.
  class Room {
   public:
    Room() = default;
    Room(Tier& tier, const Need& need) noexcept;
    Room(Room&& other) noexcept { *this = std::move(other); }
    Room& operator=(Room&& other) noexcept;
    ~Room();
    std::size_t num_rows() const noexcept { return need_.rows; }
    // Takes this many rows out of it. Requires: it has them.
    Room split(std::size_t num_rows) noexcept;

   private:
    friend class Tier;
    void grant() noexcept;
    void revoke() noexcept;

    Tier* tier_ = nullptr;
    Need need_;
    bool is_granted_ = false;
  };
  // Moves rows to SSD as far as that is needed, and waits for what other calls give up as long as
  // for a device. What only reads, and no more than is kept for reads, needs no row to leave: then
  // it waits for other reads also if the devices take no row. If there would be none at all,
  // whoever waits makes the table forget which keys were removed. Requires: no lock of the table is
  // held; whoever waits has no room. Errors: kResourceExhausted: the budget is too small, or the
  // devices are full; kUnavailable, kDeadlineExceeded.
  enum class Wait { kNo, kYes };
  std::vector<Room> make_room(Needs needs, Wait wait = Wait::kYes);
  Room make_room(const Need& need, Wait wait = Wait::kYes) {
    return std::move(make_room({&need, 1}, wait).front());
  }

  // Whether all that is in memory is within the budget, if need be when rows have left it.
  // Requires: no lock of the table is held.
  bool has_room();
  // Errors: as for make_room: more is in memory.
  void check_room() { make_room(Need{}, Wait::kNo); }
  // Sets the budget, and keeps it when it returns. Errors: as above; the budget stays.
  void set_memory(std::size_t num_bytes);

  // A stripe's exclusive lock, and the room for what is done under it.
  class Lock {
   public:
    Lock(Tier* tier, std::uint32_t stripe, std::unique_lock<StripeMutex> lock) noexcept
        : tier_(tier), stripe_(stripe), lock_(std::move(lock)) {}
    Lock(Lock&&) = default;
    ~Lock() {
      if (tier_ != nullptr && lock_.owns_lock()) tier_->note(stripe_);
    }
    // For how many new rows there is room; more than anybody needs without a tier.
    std::size_t num_new() const noexcept { return num_new_; }

   private:
    friend class Tier;
    Tier* tier_;
    std::uint32_t stripe_;
    std::size_t num_new_ = std::numeric_limits<std::size_t>::max();
    std::vector<Room> rooms_;  // given up after the lock
    std::unique_lock<StripeMutex> lock_;
  };
  // What a change needs that must not fail when it is made: the rows of its keys stay in memory as
  // long as there is a claim of them, and there is room for those that have none.
  class Claim;
  using Claims = std::span<Claim* const>;
  // Null if all claims together would take more than half of the memory for rows: then the change
  // makes room for one stripe after the other, for the largest of which there is room now, and on
  // SSD for all; or for one bucket, where others have taken that.
  // Errors: those of make_room, for which it waits; a page that cannot be read; FullDevice.
  std::unique_ptr<Claim> claim(std::span<const std::uint64_t> keys, Pool& pool);
  // Room for as many rows as buckets will be restored with; null if there is none, or all claims
  // together would take too much.   num_rows: of each bucket.
  std::unique_ptr<Claim> claim_buckets(std::span<const std::uint32_t, kNumBuckets> num_rows);

  // Locks a stripe when all rows of these keys are in memory, with room for `num_new` more. What
  // the claims have for the stripe is used, once; with enough of it nothing is read, and nothing
  // waits for a device.
  Lock lock_rows(std::uint32_t stripe, std::span<const std::uint64_t> keys, std::size_t num_new,
                 Claims claims = {});
  // Locks the stripe of a bucket, with all that is in the bucket.
  struct Bucket;
  Bucket lock_bucket(std::uint32_t bucket);
  // Whether there is room now to lock any of these buckets so. Errors: those of make_room.
  void check_buckets(std::span<const std::uint32_t> buckets);
  // Forgets a row on SSD that was found under the lock.
  void take(const Place& place) noexcept { cold_.take(place); }
  // Locks a stripe, with room for new rows, and for more to find rows on SSD. With enough of what
  // claims have for the rows nothing waits for a device.
  Lock lock_stripe(std::uint32_t stripe, std::size_t num_new, std::size_t num_bytes,
                   Claims claims = {});

  // Brings the rows of keys into memory, and counts their use. Rows that find no room stay on SSD.
  enum class For {
    kRead,
    kUpdate,  // a use, but neither a hit nor a miss; no room is an error, as for make_room
    kLater,   // a use that is to come
  };
  void fetch(std::span<const std::uint64_t> keys, Pool& pool, For what = For::kRead,
             Wait wait = Wait::kYes);
  // Whether a key that has no row in memory may have one on SSD. Requires: the stripe's lock.
  bool may_have(std::uint64_t key) const { return cold_.may_have(key); }
  // Calls visit(i, row, row_class) under a lock for the row of each key, wherever it is; row is
  // null if the key has none. Errors: those of make_room; a page that cannot be read.
  using VisitRow = std::function<void(std::size_t i, const std::byte* row, int row_class)>;
  void read(std::span<const std::uint64_t> keys, const VisitRow& visit);

  // Reads the rows of a bucket that are on SSD, some pages at a time: copies them, and says at the
  // end which of the copies have stayed what they were. All is called under the stripe's shared
  // lock. Errors: as for read().
  struct Scan {
    // Whether to read a page whose newest version this is.
    std::function<bool(std::uint32_t version)> keep;
    // Copies a row, or does without it and returns false.
    std::function<bool(const Place&)> copy;
    // is_there: of each copy, in order.
    std::function<void(std::span<const char> is_there)> end;
  };
  void scan_bucket(std::uint32_t bucket, const Scan& scan);

  // Forgets the rows of a bucket on SSD. Requires: the stripe's lock.
  void clear(std::uint32_t bucket) noexcept { cold_.clear(bucket); }
  std::size_t num_rows(std::uint32_t bucket) const noexcept { return cold_.num_rows(bucket); }

  // How often the rows in memory are used. The table says when it makes or replaces one.
  Uses& uses() noexcept { return uses_; }

  // For a snapshot that leaves rows on SSD where they are.
  ssd::PageLog& log() const noexcept { return log_; }
  // Where the rows of a bucket on SSD are. Requires: the stripe's lock.
  void save_places(std::uint32_t bucket, ByteWriter& bytes) const;
  struct SavedPlaces {
    std::uint64_t time = 0;  // of the clock of uses
    ssd::ColdRows::Saved rows;
  };
  // Errors: kCorruption: not such places, or of segments that the log has not adopted.
  SavedPlaces parse_places(std::uint32_t bucket, ByteReader& bytes) const;
  // Goes on with them, in the place of the bucket's rows on SSD. Requires: the stripe's lock.
  void restore_places(std::uint32_t bucket, SavedPlaces&& places) noexcept;

  struct Use {
    ssd::PageLog::Use log;
    std::size_t memory_bytes;                // the budget
    std::size_t bytes;                       // of memory
    std::size_t own_bytes;                   // of them: beside rows
    std::size_t index_bytes;                 // of them: what finds the rows on SSD
    std::uint64_t num_hits, num_misses;      // of keys that were read
    std::uint64_t num_evicted, num_cleaned;  // rows written for the one reason or the other
    std::uint64_t num_refused;               // rows read that found no room in memory
    std::uint64_t num_fetched;               // rows brought into memory for later
  };
  Use use() const;
  std::size_t bytes() const;  // of memory

 private:
  // Of reads that clean, which nobody promises: one thread cleans.
  static constexpr std::size_t kCleaningReads = 1;

  static constexpr std::size_t kColdBytes = 32;  // that a row may need when it has left alone

  // Keys whose rows are not in memory.
  struct Search {
    Places here;                        // rows in pages that were read
    std::vector<std::uint64_t> unread;  // keys whose pages were not
    std::vector<ssd::Position> wanted;  // those pages, of one key after the other
    std::vector<std::size_t> begins;    // of each key's
  };

  StripeMutex& mutex_of_stripe(std::uint32_t stripe) const noexcept;
  void note(std::uint32_t stripe) noexcept;
  std::size_t bytes_beside_rows() const noexcept;
  // Those of rooms.
  struct Promises {
    std::atomic<std::size_t> rows{0}, bytes{0}, read_bytes{0};
    std::array<std::atomic<std::size_t>, kNumStripes> in_stripe{};  // rows
    void add(const Need& need) noexcept;
    void remove(const Need& need) noexcept;
  };
  std::size_t index_growth(const Promises& promises) const noexcept;
  std::size_t read_bytes_beyond_spare(const Promises& promises) const noexcept;
  std::size_t new_row_bytes() const noexcept;
  // What is in memory, in bytes; and what the promised rows lack.
  struct Memory {
    std::size_t taken = 0;
    std::size_t lacking = 0;
  };
  Memory memory(const Promises& promises) const noexcept;
  bool fits(const Memory& memory) const noexcept;
  bool find_room();
  bool grant(std::span<Room> rooms) noexcept;
  [[noreturn]] void fail(const Need& need, const Need& others) const;
  bool step();
  void begin_shrink(const Memory& memory);
  bool may_grow(std::size_t num_bytes) const noexcept;
  std::size_t move_out(std::uint32_t bucket);
  std::size_t relocate(std::span<const Arena::Ref> refs);
  void leave_out_claimed(std::uint32_t bucket, std::vector<Arena::Ref>& refs) const;
  std::size_t claimed_bytes() const noexcept;
  bool are_claims_few() const noexcept;
  void hold(Claim& claim, Pool& pool);
  Need largest_need(const Claim& claim) const;
  std::size_t num_pages_max(std::size_t num_rows) const;
  std::size_t fetch_rest(std::uint32_t stripe, std::span<const std::uint64_t> keys);
  std::vector<std::uint64_t> absent_of(std::span<const std::uint64_t> keys) const;
  std::size_t num_new_max(std::span<const std::uint64_t> keys) const;
  bool are_claimed(std::span<const std::uint64_t> keys, std::uint32_t stripe, Claims claims) const;
  bool use_claims(Lock& lock, std::span<const std::uint64_t> keys, std::size_t num_new,
                  Claims claims);
  bool use_rooms(Lock& lock, Claims claims);
  Lock lock_unclaimed(std::uint32_t stripe, std::span<const std::uint64_t> keys,
                      std::size_t num_new, Wait wait = Wait::kYes);
  void keep_coldest(std::vector<Arena::Ref>& refs, std::size_t num_rows) const;
  bool write_out(Lock& lock, std::uint32_t bucket, std::span<const Arena::Ref> refs,
                 const Places& moved, ssd::PageLog::Room& room);
  void clean();
  void clean_bucket(std::span<const ssd::Position> positions, const ssd::PagesRead& read);
  Search search(std::span<const std::uint64_t> keys, std::span<const ssd::PagesRead> reads,
                std::optional<For> what) const;
  void note_use(Arena::Ref ref, For what) const noexcept;
  std::size_t num_rows_in_memory() const;
  bool is_kept_for(const Need& need) const noexcept;
  std::size_t spare_bytes() const noexcept;
  class Gathering;
  class Scanner;
  const std::byte* row_in_memory(std::uint64_t key) const noexcept;
  int class_of(const std::byte* row) const noexcept;
  class Fetcher;
  std::size_t move_in(std::uint32_t stripe, const Places& places, std::optional<For> what);

  Table& table_;
  std::atomic<std::size_t> memory_bytes_;  // the budget
  // What rows that leave may not make the table exceed: the budget before, while it becomes less.
  std::atomic<std::size_t> limit_bytes_;
  mutable ssd::PageLog log_;
  ssd::ColdRows cold_;
  mutable Uses uses_;

  Promises promised_;  // whether they are kept is decided after that
  Promises granted_;   // of them
  std::array<std::vector<Claim*>, kNumStripes> claims_;  // guarded by the stripe's lock
  std::atomic<std::size_t> num_claimed_{0};              // keys
  struct NotedSize {
    std::atomic<std::size_t> num_rows{0}, num_lines_left{0}, bytes{0};
  };
  std::array<NotedSize, kNumStripes> index_sizes_{};
  std::array<std::atomic<std::size_t>, kNumStripes> stripe_bytes_{};  // beside rows
  std::array<std::atomic<std::size_t>, kNumStripes> cold_bytes_{};    // of them: cold_
  std::atomic<std::size_t> marks_bytes_{0};
  // Of each bucket of a stripe a bit: whether it has rows in memory.
  static_assert(kBucketsPerStripe == 64);
  std::array<std::atomic<std::uint64_t>, kNumStripes> in_memory_{};
  std::atomic<std::uint64_t> hand_{0};
  // The hand goes past buckets with fewer rows than fill a page; if all have fewer, half of them;
  // and so on.
  std::atomic<int> halvings_{0};
  std::atomic<bool> saw_more_{false};  // since bucket 0: a bucket for which one less would do

  std::mutex clean_mutex_;  // guards what follows
  ssd::Position clean_next_ = 0;
  std::size_t clean_left_ = 0;  // pages of the segment that is being cleaned
  std::uint64_t clean_generation_ = 0;

  mutable std::atomic<std::uint64_t> num_hits_{0}, num_misses_{0}, num_refused_{0};
  std::atomic<std::uint64_t> num_fetched_{0};
  std::atomic<std::uint64_t> num_evicted_{0}, num_cleaned_{0};
};

// Threads: one at a time, but for calls that use it; those of different stripes may run together.
class Tier::Claim {
 public:
  Claim(Tier& tier, std::span<const std::uint64_t> keys);
  Claim(Tier& tier, std::size_t num_rows);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  void begin();

 private:
  friend class Tier;

  // A part of its keys: those of a stripe, or of a bucket.
  using Keys = std::span<const std::uint64_t>;
  Keys keys_of(std::uint32_t first_bucket, std::uint32_t num_buckets) const noexcept;
  Keys keys_of_stripe(std::uint32_t stripe) const noexcept {
    return keys_of(stripe * kBucketsPerStripe, kBucketsPerStripe);
  }

  Tier& tier_;
  std::vector<std::uint64_t> keys_;      // by hash
  std::size_t num_;                      // of them, or of rows without keys
  Room own_;                             // of the keys
  std::array<Room, kNumStripes> rooms_;  // of new rows; guarded by the stripe's lock
};

struct Tier::Bucket {
  Places on_ssd;
  std::vector<ssd::PagesRead> reads;  // where those rows are
  std::vector<Room> rooms;
  Lock lock;
};

}  // namespace trireme
