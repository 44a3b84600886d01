// A table: rows of weights, state and statistics by 64-bit key, in memory.
//
// Rows belong to 4096 buckets (bucket_of), which can be read, replaced and dropped individually.
// The buckets form 64 ranges, the stripes, with a lock each. An update takes each stripe's lock
// once, for the call's keys of that stripe; a lookup takes keys in the order of the call, some
// thousands at a time. Both run in parallel on the caller's pool, and are fastest for keys in
// bucket order.
//
// Invariants: applying an update to a stripe's rows and raising the marks of its buckets is one
// critical section, and happens completely or not at all. A lookup changes nothing. Initial weights
// depend on seed and key alone. Threads: any number may call anything at any time. A call reads and
// changes each bucket at one moment, but different buckets at different moments; a lookup may read
// one bucket at several moments. Memory: a row takes 8 bytes for its key and 8 for its stamp beside
// weights and state, 24 more in a scored table, and about 7 in the index.
//
// Versions and expiry: each change of a row stamps it with the table's version, which only
// increases. Lookups ignore statistics: a row is found until shrink() or a limit removes it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/array.h"
#include "base/isa.h"
#include "base/pool.h"
#include "optim/initializer.h"
#include "optim/rule.h"
#include "store/arena.h"
#include "store/index.h"
#include "store/layout.h"
#include "store/statistics.h"
#include "table/admission.h"
#include "table/apply.h"
#include "table/classes.h"
#include "table/keys_by_stripe.h"
#include "table/marks.h"
#include "table/policy.h"
#include "table/removed.h"
#include "table/stripe.h"
#include "table/tier.h"

namespace trireme {

struct TableConfig {
  std::vector<int> dims;          // weights of a row, per row class
  std::string dtype = "float32";  // of the weights: or bfloat16, float16
  RuleConfig rule;
  std::string initializer = "uniform";
  float init_a = 0.0F;
  float init_b = 0.0F;
  std::uint64_t seed = 0;
  std::string absent = "initial";  // what a lookup returns for an absent key, or "zeros"
  PolicyConfig policy;
  AdmissionConfig admission;
  int num_streams_max = 1024;
  TierConfig tier;
  std::string simd = "auto";  // see choose_isa
};

// The data of a push besides keys and gradients. Arrays are indexed by the keys' positions.
struct PushColumns {
  std::uint32_t time = 0;                   // data time, seconds; 0: the data has none
  std::uint32_t version = 0;                // the table's version is raised to it
  const float* show_click = nullptr;        // (K, 2): for scored tables, and only for them
  const std::uint32_t* features = nullptr;  // (K): for scored tables; null: features stay
  const std::uint32_t* counts = nullptr;    // (K): occurrences of each key; null: 1
};

// The content of one bucket at one moment.
struct BucketContent {
  Array<std::uint64_t> keys;                                  // (n)
  Array<std::uint8_t> classes;                                // (n): row class of each
  Array<std::uint8_t> rows;                                   // (n, row_bytes), wide
  std::vector<std::pair<std::int64_t, std::uint64_t>> marks;  // (stream, sequence), sequence > 0
  Array<std::uint8_t> pending;                                // the bytes of Admission::save()
  Array<std::uint64_t> removed;  // keys removed since, ascending; some may have rows again
  std::uint32_t removed_since = 0;
  std::vector<std::uint8_t> places;  // of rows on SSD, see Table::snapshot_in_memory
};

class Table {
 public:
  // Errors: kBadRequest, naming the value; kResourceExhausted.
  explicit Table(const TableConfig& config);

  const RowClasses& classes() const noexcept { return classes_; }
  bool is_scored() const noexcept { return classes_.wide().is_scored(); }
  int state_floats() const noexcept { return classes_.wide().wide_state_floats(); }  // wide
  int state_planes() const noexcept { return classes_.wide().state_planes(); }
  int state_counts() const noexcept { return classes_.wide().state_counts(); }
  std::size_t row_bytes() const noexcept { return classes_.wide().wide_bytes(); }  // of a wide row
  Isa isa() const noexcept { return isa_; }
  std::size_t num_rows() const;
  std::size_t bytes() const;  // memory taken from the system

  // Writes the weights of each key; for an absent key its initial weights, or zeros. A row of a
  // narrower class is padded with zeros, a row of a wider class is cut. Changes nothing. keys: (N),
  // duplicates allowed.  out: (N, dim of the class).  Returns how many were absent.
  std::size_t lookup(std::span<const std::uint64_t> keys, float* out, Pool& pool,
                     int row_class = 0) const;

  // Applies one step of the rule to each key, creates rows for absent keys that are admitted, and
  // raises the marks of every bucket to `ids`, but for buckets that have one of the ids already:
  // their keys and marks stay, so that the caller can give them the ids that they lack. The rule is
  // applied once per occurrence of a key, in order. keys: (K), those of each row class in turn.
  // grads: of each class; new rows get that class, or are heads that will grow to it. A row of
  // another class uses the gradients that fit. Returns the number of keys applied. Errors:
  // kBadRequest, nothing changed; kResourceExhausted, some stripes are applied and marked:
  // repeating the call with the same ids finishes it. claims: that have all keys, so that none of
  // them waits for a device, or fails for want of room.
  struct Gradients {
    const float* rows;  // (num_keys, dim of the class)
    std::size_t num_keys;
  };
  std::size_t update(std::span<const std::uint64_t> keys, std::span<const Gradients> grads,
                     std::span<const PushId> ids, const RuleValues& values, Pool& pool,
                     const PushColumns& columns = {}, Change change = Change::kRule,
                     Tier::Claims claims = {});
  // All keys of class 0.   grads: (K, dim).
  std::size_t update(std::span<const std::uint64_t> keys, const float* grads,
                     std::span<const PushId> ids, const RuleValues& values, Pool& pool,
                     const PushColumns& columns = {}) {
    return update(keys, std::array{Gradients{grads, keys.size()}}, ids, values, pool, columns);
  }
  // An update without keys.
  void advance(std::span<const PushId> ids);

  // The last sequence of a stream that each bucket has; 0: none.   out, marks: (kNumBuckets).
  // Errors: kBadRequest for a stream outside [0, num_streams_max).
  void marks(std::int64_t stream, std::span<std::uint64_t> out) const;
  void set_marks(std::int64_t stream, std::span<const std::uint64_t> marks);

  // The version that changes are stamped with. Once raised, it applies to every later change.
  std::uint32_t version() const noexcept { return version_.load(std::memory_order_relaxed); }
  void raise_version(std::uint32_t version) noexcept;

  // Rises whenever rows may have changed, or may be about to.
  std::uint64_t num_changes() const noexcept { return num_changes_; }

  // All functions that take a bucket fail with kBadRequest for one outside [0, kNumBuckets).
  // since 0: all rows, no removed keys. Else the rows changed and the keys removed with a version >
  // since. Errors: kBadRequest if some of those keys were forgotten.
  BucketContent snapshot(std::uint32_t bucket, std::uint32_t since = 0) const {
    return snapshot(bucket, since, since);
  }
  // The same, with the keys removed since a different version; 0: none. Of all rows (since 0) it is
  // no error if some of those keys were forgotten: the content has the others, and says since when.
  BucketContent snapshot(std::uint32_t bucket, std::uint32_t since,
                         std::uint32_t removed_since) const;
  // All rows that are in memory, and the places of those on SSD. Errors: kBadRequest without a
  // tier.
  BucketContent snapshot_in_memory(std::uint32_t bucket, std::uint32_t removed_since) const;
  // The lowest version since which the removed keys of every bucket are known.
  std::uint32_t removed_known_since() const;
  // Replaces rows, marks and pending state of a bucket; marks of other streams become 0. Nothing
  // changes on an error: kBadRequest (a key of another bucket, a key that occurs twice, lengths
  // that do not match, an unknown class, stream or sequence, pending bytes of another admission);
  // kResourceExhausted.
  struct BucketView {
    std::span<const std::uint64_t> keys;
    std::span<const std::uint8_t> classes;
    std::span<const std::uint8_t> rows;
    std::span<const std::pair<std::int64_t, std::uint64_t>> marks;
    std::optional<std::span<const std::uint8_t>> pending;
    // Keys removed with a version in (removed_since, removed_at], for later snapshots.
    std::span<const std::uint64_t> removed = {};
    std::uint32_t removed_at = 0;
    std::uint32_t removed_since = 0;
    // Of restore: where the bucket's other rows are on SSD; empty: there are none.
    std::span<const std::uint8_t> places = {};
  };
  void restore(std::uint32_t bucket, const BucketView& content, Tier::Claims claims = {});
  // Removes keys, then inserts or replaces rows. Other rows and all marks stay, as does the pending
  // state if the content has none. The removals are not recorded here: the table that the content
  // comes from has recorded them. Claims of all these keys, if there are some, have the room that
  // it needs. Errors as for restore.
  void apply(std::uint32_t bucket, const BucketView& content,
             std::span<const std::uint64_t> removed, Tier::Claims claims = {});
  // Announces that about this many more rows will be restored, so that their memory is taken in the
  // best way for that. Fewer or more may be.
  void expect(std::size_t num_rows) noexcept {
    if (tier_ == nullptr) arenas_.expect(num_rows);  // else most of them go on to SSD
  }

  // Removes the expired rows of a bucket, and those over its limit.
  struct Shrunk {
    std::size_t num_expired;
    std::size_t num_evicted;
  };
  Shrunk shrink(std::uint32_t bucket, const DataTime& now, std::uint32_t version);
  // Whether there is room now to shrink these buckets, one after the other. Errors: kBadRequest;
  // kResourceExhausted: the rows on SSD of one find none in memory together; those of the devices.
  void check_shrink(std::span<const std::uint32_t> buckets);
  // Forgets which keys were removed with a version <= `version`: no snapshot since an earlier
  // version will be requested.
  void forget_removed(std::uint32_t version);
  Counters counters() const noexcept;
  // Brings the rows of keys into memory for later calls.   keys: any number of times each.
  void fetch(std::span<const std::uint64_t> keys, Pool& pool) {
    if (tier_ != nullptr) tier_->fetch(keys, pool, Tier::For::kLater);
  }
  // Before an update or a settlement that must not fail then: brings the rows of its keys into
  // memory, where they stay as long as the claim exists, and takes room for new ones; or null, see
  // Tier::claim. The table outlives the claim. Errors: kBadRequest without a tier; those of
  // Tier::make_room; a page that cannot be read.
  std::unique_ptr<Tier::Claim> claim(std::span<const std::uint64_t> keys, Pool& pool) {
    return need_tier("claim").claim(keys, pool);
  }
  // The same before buckets are restored with so many rows each, see Tier::claim_buckets.
  std::unique_ptr<Tier::Claim> claim_buckets(std::span<const std::uint32_t, kNumBuckets> num_rows) {
    return need_tier("claim_buckets").claim_buckets(num_rows);
  }
  // Sets the budget of a table with an SSD tier. Errors: kBadRequest without one; those of
  // Tier::make_room, nothing changed.
  void set_memory(std::size_t num_bytes);
  // Errors: kResourceExhausted: an SSD tier has more in memory than its budget.
  void check_room() {
    if (tier_ != nullptr) tier_->check_room();
  }
  // Null without an SSD tier.
  const Tier* tier() const noexcept { return tier_.get(); }
  // Errors: kBadRequest without one.
  Tier& need_tier(const char* who) const;

  // Show and click of each key at a moment, 0 if absent.   keys: (N). out: (N, 2). Errors of both:
  // kBadRequest if the table is not scored.
  void statistics(std::span<const std::uint64_t> keys, double* out, const DataTime& now,
                  Pool& pool) const;
  // Subtracts what an export has consumed from the delta score of each key that has a row. The rows
  // keep their versions.   keys, delta_scores: (N), fastest in the order of buckets. Returns how
  // many of the keys, the first, it has settled: fewer if some row cannot be brought into memory,
  // and after an error none.
  // claims: as for update.
  std::size_t settle(std::span<const std::uint64_t> keys, const float* delta_scores,
                     Tier::Claims claims = {});

  // Removes rows, what is counted of their keys, and remembers that; returns how many were there.
  // keys: (N), claims: of all these keys. Errors: those of make_room; a repetition removes the
  // rest.
  std::size_t erase(std::span<const std::uint64_t> keys, Pool& pool, Tier::Claims claims = {});
  // out: (N): whether each key has a row.
  void contains(std::span<const std::uint64_t> keys, bool* out, Pool& pool) const;
  // The row class and the wide row of each key; of an absent key kNoClass and zeros.   keys,
  // row_classes: (N).  out: (N, row_bytes).
  static constexpr std::uint8_t kNoClass = 255;
  void read_wide(std::span<const std::uint64_t> keys, std::uint8_t* row_classes, std::uint8_t* out,
                 Pool& pool) const;
  // Wide rows of keys.   keys, classes: (N).  rows: (N, row_bytes).
  struct WidePart {
    std::span<const std::uint64_t> keys;
    std::span<const std::uint8_t> classes;
    const std::uint8_t* rows;
  };
  // Inserts or replaces rows; of a key that occurs twice the last one stays if both are of one
  // class, else either. Marks, removals and
  // pending state stay.   is_stamped: as changes
  // are, with the table's version in place of their own. Errors: kBadRequest for an unknown class,
  // or a row that does not fit it, nothing changed; kResourceExhausted and those of a tier, some
  // keys have their rows: repeating the call finishes it.
  void write_wide(std::span<const WidePart> parts, Pool& pool, bool is_stamped = false);

  // Errors: those kBadRequest of write_wide.
  void check_wide(const WidePart& part, Pool& pool) const;
  // write_wide, stamped, with all rows that some buckets of another table have.   claims: of all
  // these keys, as for update.   Errors: kBadRequest for the table itself, or one with other rows,
  // nothing changed; else as write_wide.
  void merge(const Table& from, std::uint32_t first_bucket, std::uint32_t num_buckets, Pool& pool,
             Tier::Claims claims = {});
  // A claim of the keys of all rows of another table, for a merge; null too if they take more than
  // half of the memory. Errors as for claim.
  std::unique_ptr<Tier::Claim> claim_rows(const Table& from, Pool& pool);
  // Replaces some buckets, with their marks, removals and pending state, by those of another table.
  // Errors as for merge; a repetition finishes it.
  void copy(const Table& from, std::uint32_t first_bucket, std::uint32_t num_buckets, Pool& pool);

  // What updates rows of a class outside of this table. Errors: kBadRequest for a value.
  std::unique_ptr<RuleStep> make_step(const RuleValues& values, int row_class) const;
  const ScoreRates& score_rates() const noexcept { return policy_.rates; }

 private:
  friend class Tier;
  class SharedLocks;
  class Selection;

  StripeMutex& mutex_of(std::uint32_t bucket) const noexcept {
    return stripes_[bucket / kBucketsPerStripe];
  }
  std::size_t num_rows_of(std::uint32_t bucket) const noexcept {
    return index_.num_rows(bucket) + (tier_ == nullptr ? 0 : tier_->num_rows(bucket));
  }
  // The stripe's exclusive lock, when the rows of the keys are in memory, with room for more.
  Tier::Lock lock_rows(std::uint32_t stripe, std::span<const std::uint64_t> keys,
                       std::size_t num_new, Tier::Claims claims = {});
  // The stripe's exclusive lock, with all the bucket's rows on SSD.
  struct LockedBucket {
    std::optional<Tier::Bucket> tiered;
    std::optional<Tier::Lock> lock;
    Tier::Places none;
    Tier::Places& on_ssd() { return tiered ? tiered->on_ssd : none; }
  };
  LockedBucket lock_bucket(std::uint32_t bucket);
  template <class Function>
  void for_stripes(std::span<const std::uint64_t> keys, Pool& pool, const Function& function) const;
  template <class Rows, class Visit, class Settle>
  void find_all(const Rows& rows, std::span<const std::uint64_t> keys, std::size_t row_bytes,
                Pool& pool, const Visit& visit, const Settle& settle) const;
  template <class Visit, class Absent>
  void read_on_ssd(std::span<const std::uint64_t> keys, std::span<const std::size_t> left,
                   const Visit& visit, const Absent& absent) const;
  template <class Rows, class Visit, class VisitOnSsd, class Absent>
  void read_rows(const Rows& rows, std::span<const std::uint64_t> keys, std::size_t row_bytes,
                 Pool& pool, const Visit& visit, const VisitOnSsd& visit_on_ssd,
                 const Absent& absent) const;
  template <class Visit, class Absent>
  void read_all(std::span<const std::uint64_t> keys, std::size_t row_bytes, Pool& pool,
                const Visit& visit, const Absent& absent) const;
  std::size_t lookup_plain(std::span<const std::uint64_t> keys, float* out, Pool& pool) const;
  template <bool kIsStreamed>
  void read_plain(std::span<const std::uint64_t> keys, std::uint8_t* row_classes, std::uint8_t* out,
                  Pool& pool) const;
  std::size_t lookup_any(std::span<const std::uint64_t> keys, float* out, Pool& pool,
                         int dim) const;

  void check_source(const char* who, const Table& from, std::uint32_t first_bucket,
                    std::uint32_t num_buckets) const;
  struct WideRows;
  struct Reserved;
  std::uint32_t newest_of(const WideRows& wide, Pool& pool) const;
  void write_in_stripe(const Group& all, const WideRows& wide);
  void write_group(const Group& group, const WideRows& wide);
  template <class Write>
  void insert_wide(const Group& group, std::span<const std::uint32_t> numbers, const WideRows& wide,
                   Reserved reserved, const Write& write) noexcept;

  struct Step;
  void check_columns(const PushColumns& columns, std::size_t num_keys) const;
  std::size_t update_stripe(std::uint32_t stripe, const Group& group, const Step& step);
  std::size_t update_group(std::uint32_t stripe, const Group& group, const Step& step,
                           std::uint64_t buckets);
  std::size_t update_by_bucket(std::uint32_t stripe, const Group& group, const Step& step);
  std::size_t update_locked(std::uint32_t stripe, const Group& group, const Step& step,
                            std::uint64_t applied, std::size_t num_new_max);
  std::uint64_t buckets_over_limit(std::uint32_t stripe) const noexcept;
  std::size_t apply_group(const Group& group, const Step& step, std::size_t num_new_max);
  bool admits(std::uint64_t key, std::size_t position, const Step& step) noexcept;
  void insert_rows(Selection& absent, std::span<Arena::Ref> rows, Arenas::Reservation& reservation,
                   const Step& step, const GroupUpdate& update,
                   std::vector<Index::Entry>& scratch) noexcept;
  Shrunk shrink_locked(std::uint32_t bucket, const DataTime& now, LockedBucket locked);
  std::size_t evict(std::uint32_t bucket, std::span<const Tier::Place> on_ssd);
  void keep_removed_within_budget(std::uint32_t bucket) noexcept;
  bool forget_all_removed();
  void remove(std::uint32_t bucket, std::span<const Arena::Ref> rows,
              std::span<const Tier::Place> on_ssd);
  static void check_bucket(std::uint32_t bucket);
  void check_scored(const char* who) const;
  void check_class(const char* who, int row_class) const;
  const RowLayout& layout_of(const std::byte* row) const noexcept {
    return classes_[arenas_.class_of(row)];
  }
  void write_absent(std::uint64_t key, float* weights, int dim) const noexcept;
  void initialize(std::byte* row, int row_class, std::uint64_t key, float* scratch) const noexcept;
  std::vector<GradientPart> parts_of(std::span<const Gradients> grads, std::size_t num_keys) const;
  void extend(const GroupUpdate& update, const Risen& risen,
              Arenas::Reservation& reservation) noexcept;
  void check_content(const char* who, std::uint32_t bucket, const BucketView& content) const;
  void raise_version_to(const BucketView& content) noexcept;
  void replace(std::uint32_t bucket, const BucketView& content, Tier::Claims claims);
  std::vector<std::pair<StreamMarks*, std::uint64_t>> changed_marks(std::uint32_t bucket,
                                                                    const BucketView& content);
  void fill(BucketContent& content, std::uint32_t bucket, std::uint32_t since,
            std::uint32_t removed_since, std::size_t num_copied) const;
  void resize(BucketContent& content, std::size_t num_kept, std::size_t num_rows) const;
  void write_row(BucketContent& content, std::size_t i, const std::byte* row, int row_class) const;
  std::size_t keep_rows(BucketContent& content, std::span<const char> is_kept) const;
  std::vector<Arena::Ref> refs_since(std::uint32_t bucket, std::uint32_t since) const;
  void insert_row(Arena::Ref ref, const BucketView& content, std::size_t i,
                  std::vector<Index::Entry>& scratch) noexcept;

  const Isa isa_;
  const Rule rule_;
  const RowClasses classes_;
  const PolicyConfig policy_;
  const std::optional<std::uint32_t> max_rows_of_bucket_;
  const Initializer initializer_;
  const bool absent_is_zero_;
  const std::uint64_t seed_;
  Arenas arenas_;
  Index index_;          // the index and its rows are guarded by their stripes' locks
  Marks marks_;          // the marks of a bucket: guarded by its stripe's lock
  RemovedKeys removed_;  // likewise
  Admission admission_;  // likewise
  std::atomic<std::uint32_t> version_{0};
  std::atomic<std::uint64_t> num_changes_{0};
  std::atomic<std::uint64_t> num_admitted_{0};
  std::atomic<std::uint64_t> num_rejected_{0};
  std::atomic<std::uint64_t> num_expired_{0};
  std::atomic<std::uint64_t> num_evicted_{0};
  mutable std::array<StripeMutex, kNumStripes> stripes_;
  // Buckets that a push has put over their limit, bit by bit. Guarded by the stripe's lock.
  std::array<std::uint64_t, kNumStripes> due_evictions_{};
  const std::unique_ptr<Tier> tier_;  // null: all rows are in memory
};

}  // namespace trireme
