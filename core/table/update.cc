// Table: update, advance, settle and erase: what changes rows one by one.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "base/array.h"
#include "base/error.h"
#include "table/table.h"

namespace trireme {

// Some keys of a group, copied: room for all of them is taken at the start.
class Table::Selection {
 public:
  explicit Selection(const Group& from)
      : from_(from), keys_(from.keys.size()), positions_(from.keys.size()) {}

  void add(std::size_t i) noexcept {
    keys_[size_] = from_.keys[i];
    positions_[size_++] = static_cast<std::uint32_t>(from_.position(i));
  }
  Group group() const noexcept {
    return {.keys = keys_.span().first(size_), .positions = positions_.data(), .first = 0};
  }
  // Keeps those for which keep(key, position) holds, called in order.
  template <class Keep>
  void filter(const Keep& keep) noexcept {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      if (!keep(keys_[i], positions_[i])) continue;
      keys_[kept] = keys_[i];
      positions_[kept++] = positions_[i];
    }
    size_ = kept;
  }

 private:
  const Group& from_;
  Array<std::uint64_t> keys_;
  Array<std::uint32_t> positions_;
  std::size_t size_ = 0;
};

namespace {

// Fewer keys than this are not worth waking threads for.
constexpr std::size_t kParallelKeysMin = 4096;

// Keys whose rows are settled together, and must be in memory then.
constexpr std::size_t kSettledKeysMax = 64;

// How many keys of one stripe belong to each of its buckets.
std::array<std::size_t, kBucketsPerStripe> count_by_bucket(
    std::span<const std::uint64_t> keys) noexcept {
  std::array<std::size_t, kBucketsPerStripe> counts{};
  for (const std::uint64_t key : keys) ++counts[bucket_of(key) % kBucketsPerStripe];
  return counts;
}

}  // namespace

// A call of update(), the same for every stripe.
struct Table::Step {
  PushId id;  // of the push, or of the first stream's among those merged
  std::span<const GradientPart> parts;
  const Advance& advance;
  const RuleStep& rule;
  const PushColumns& columns;
  Tier::Claims claims;
};

// Calls function(stripe, group) for every stripe, also for those without keys.
template <class Function>
void Table::for_stripes(std::span<const std::uint64_t> keys, Pool& pool,
                        const Function& function) const {
  const KeysByStripe groups(keys, pool);
  if (keys.size() < kParallelKeysMin) {
    for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) function(stripe, groups[stripe]);
  } else {
    pool.run(kNumStripes, [&](std::size_t stripe) {
      function(static_cast<std::uint32_t>(stripe), groups[stripe]);
    });
  }
}

std::size_t Table::update(std::span<const std::uint64_t> keys, std::span<const Gradients> grads,
                          std::span<const PushId> ids, const RuleValues& values, Pool& pool,
                          const PushColumns& columns, Change change, Tier::Claims claims) {
  values.check();
  const std::vector<GradientPart> parts = parts_of(grads, keys.size());
  check_columns(columns, keys.size());
  const Advance advance(ids, marks_);
  raise_version(columns.version);
  const int dim = classes_.is_plain() ? classes_.wide().dim() : 0;
  const auto rule_step = step_maker_of(change, rule_)(values, isa_, dim);
  const Step step{.id = *std::ranges::min_element(ids, {}, &PushId::stream),
                  .parts = parts,
                  .advance = advance,
                  .rule = *rule_step,
                  .columns = columns,
                  .claims = claims};
  std::atomic<std::size_t> applied{0};
  for_stripes(keys, pool, [&](std::uint32_t stripe, const Group& group) {
    applied += update_stripe(stripe, group, step);
  });
  return applied;
}

std::unique_ptr<RuleStep> Table::make_step(const RuleValues& values, int row_class) const {
  values.check();
  check_class("make_step", row_class);
  return step_maker_of(Change::kRule, rule_)(values, isa_, classes_[row_class].dim());
}

// Errors: kBadRequest unless there are gradients for all keys, of classes that the table has.
std::vector<GradientPart> Table::parts_of(std::span<const Gradients> grads,
                                          std::size_t num_keys) const {
  std::vector<GradientPart> parts;
  std::size_t first = 0;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const int row_class = static_cast<int>(i);
    check_class("update", row_class);
    if (grads[i].num_keys == 0) continue;
    parts.push_back({.first = first,
                     .rows = grads[i].rows,
                     .row_class = row_class,
                     .dim = classes_[row_class].dim()});
    first += grads[i].num_keys;
  }
  if (first != num_keys) {
    throw Error(ErrorCode::kBadRequest, "Table.update: expected gradients of " +
                                            std::to_string(num_keys) + " keys, found those of " +
                                            std::to_string(first));
  }
  return parts;
}

void Table::check_columns(const PushColumns& columns, std::size_t num_keys) const {
  if (num_keys == 0) return;  // without keys the pointers may be null
  if ((columns.show_click != nullptr) != is_scored()) {
    throw Error(ErrorCode::kBadRequest,
                std::string("Table.update: expected ") +
                    (is_scored() ? "show_click of a scored table, found none"
                                 : "no show_click of a table that is not scored, found some"));
  }
  if (columns.features != nullptr && !is_scored()) {
    throw Error(ErrorCode::kBadRequest,
                "Table.update: expected no features of a table that is not scored, found some");
  }
  for (std::size_t i = 0; columns.show_click != nullptr && i < 2 * num_keys; ++i) {
    if (!std::isfinite(columns.show_click[i])) {
      throw Error(ErrorCode::kBadRequest, "Table.update: expected finite shows and clicks, found " +
                                              std::to_string(columns.show_click[i]) + " for key " +
                                              std::to_string(i / 2) + " of the call");
    }
  }
}

std::size_t Table::update_stripe(std::uint32_t stripe, const Group& group, const Step& step) {
  std::size_t num_keys = 0;
  try {
    num_keys = update_group(stripe, group, step, ~std::uint64_t{0});
  } catch (const Error& error) {
    if (tier_ == nullptr || error.code() != ErrorCode::kResourceExhausted) throw;
    num_keys = update_by_bucket(stripe, group, step);
  }
  std::uint64_t over = 0;  // buckets over their limit, bit by bit
  if (max_rows_of_bucket_) {
    const std::shared_lock lock(stripes_[stripe]);
    over = due_evictions_[stripe];
  }
  // The push is applied and marked. If an eviction fails, the next push of the stripe evicts, as
  // the same one does that is repeated.
  for (; over != 0; over &= over - 1) {
    const auto bucket =
        stripe * kBucketsPerStripe + static_cast<std::uint32_t>(std::countr_zero(over));
    {
      LockedBucket locked = lock_bucket(bucket);
      evict(bucket, locked.on_ssd());
      due_evictions_[stripe] &= ~(over & -over);
    }
    keep_removed_within_budget(bucket);
  }
  return num_keys;
}

// Applies and marks what these buckets of a stripe, bit by bit, lack. Requires: the keys are
// theirs.
std::size_t Table::update_group(std::uint32_t stripe, const Group& group, const Step& step,
                                std::uint64_t buckets) {
  const Tier::Lock lock = lock_rows(stripe, group.keys, group.keys.size(), step.claims);
  const std::uint64_t applied = step.advance.applied(stripe) | ~buckets;
  if (~applied == 0) return 0;
  const std::size_t num_keys = update_locked(stripe, group, step, applied, lock.num_new());
  due_evictions_[stripe] |= buckets_over_limit(stripe) & ~applied;
  return num_keys;
}

// For keys whose rows do not find room in memory together: those of one bucket after the other.
std::size_t Table::update_by_bucket(std::uint32_t stripe, const Group& group, const Step& step) {
  const auto counts = count_by_bucket(group.keys);
  std::size_t num_keys = 0;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if (counts[i] == 0) continue;
    Selection of_bucket(group);
    for (std::size_t k = 0; k < group.keys.size(); ++k) {
      if (bucket_of(group.keys[k]) % kBucketsPerStripe == i) of_bucket.add(k);
    }
    num_keys += update_group(stripe, of_bucket.group(), step, std::uint64_t{1} << i);
  }
  return num_keys + update_group(stripe, {}, step, ~std::uint64_t{0});  // those without keys
}

// Applies and marks what the buckets of a stripe lack. Requires: its lock.   applied: the buckets
// that lack nothing, bit by bit.
// num_new_max: rows that it may make.
std::size_t Table::update_locked(std::uint32_t stripe, const Group& group, const Step& step,
                                 std::uint64_t applied, std::size_t num_new_max) {
  std::size_t num_keys = 0;
  if (applied == 0) {
    num_keys = apply_group(group, step, num_new_max);
  } else {
    step.advance.part(stripe);
    Selection remaining(group);
    for (std::size_t i = 0; i < group.keys.size(); ++i) {
      const std::uint32_t bucket = bucket_of(group.keys[i]) % kBucketsPerStripe;
      if ((applied >> bucket & 1) == 0) remaining.add(i);
    }
    num_keys = apply_group(remaining.group(), step, num_new_max);
  }
  step.advance.raise(stripe, applied);
  return num_keys;
}

// Requires: the stripe's lock.
std::uint64_t Table::buckets_over_limit(std::uint32_t stripe) const noexcept {
  std::uint64_t over = 0;
  for (std::uint32_t i = 0; max_rows_of_bucket_ && i < kBucketsPerStripe; ++i) {
    const bool is_over = num_rows_of(stripe * kBucketsPerStripe + i) > *max_rows_of_bucket_;
    over |= std::uint64_t{is_over} << i;
  }
  return over;
}

// Applies all or nothing: every operation that can fail runs before the first row changes.
// Requires: the lock of the group's stripe. Returns the number of keys without those not admitted.
std::size_t Table::apply_group(const Group& group, const Step& step, std::size_t num_new_max) {
  const std::size_t n = group.keys.size();
  if (n == 0) return 0;
  const std::size_t num_new = std::min(n, num_new_max);
  std::array<std::size_t, Arenas::kClassesMax> num_rows_max{};
  for (const GradientPart& part : step.parts) {
    num_rows_max[static_cast<std::size_t>(part.row_class)] = num_new;
  }
  if (classes_.head() >= 0) num_rows_max[static_cast<std::size_t>(classes_.head())] = num_new;
  Arenas::Reservation reservation(arenas_, num_rows_max);
  std::vector<Index::Entry> scratch;
  index_.prepare(bucket_of(group.keys[0]) / kBucketsPerStripe, num_new, scratch);
  admission_.prepare(group.keys);
  Selection fresh(group);
  Array<std::uint32_t> absent(n);
  Array<std::uint32_t> risen_numbers(classes_.head() >= 0 ? n : 0);
  Risen risen{.head_class = classes_.head(),
              .threshold = policy_.embedx_threshold.value_or(0.0),
              .numbers = risen_numbers.data()};
  const auto wide_dim = static_cast<std::size_t>(classes_.wide().wide_dim());
  Array<float> batch_scratch(classes_.is_plain() ? 0 : 2 * kBatchRows * wide_dim);
  GroupUpdate update{.arenas = arenas_,
                     .index = index_,
                     .layouts = classes_.layouts(),
                     .isa = isa_,
                     .group = group,
                     .rule = step.rule,
                     .parts = step.parts,
                     .statistics = {.rates = policy_.rates,
                                    .version = version(),
                                    .time = step.columns.time,
                                    .show_click = step.columns.show_click,
                                    .features = step.columns.features},
                     .seed = seed_,
                     .stream = step.id.stream,
                     .sequence = step.id.sequence,
                     .scratch = batch_scratch.data()};
  // Returns how many keys have no row.
  const auto apply = [&] {
    if (classes_.is_plain()) return apply_plain(update, absent.data());
    const std::size_t num_absent = apply_any(update, absent.data(), risen);
    extend(update, risen, reservation);
    risen.size = 0;
    return num_absent;
  };
  const std::size_t num_absent = apply();
  if (num_absent == 0) return n;
  // The search does not keep the keys' order, and the result of a sketch depends on the order.
  if (!admission_.admits_all()) std::sort(absent.data(), absent.data() + num_absent);
  for (std::size_t i = 0; i < num_absent; ++i) fresh.add(absent[i]);
  const std::span<Arena::Ref> rows = absent.span().first(num_absent);
  insert_rows(fresh, rows, reservation, step, update, scratch);
  update.group = fresh.group();
  const std::size_t num_rejected = num_absent - update.group.keys.size();
  num_rejected_ += num_rejected;
  if (num_rejected < num_absent) TRIREME_CHECK(apply() == 0);
  return n - num_rejected;
}

void Table::advance(std::span<const PushId> ids) {
  const Advance advance(ids, marks_);
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::unique_lock lock(stripes_[stripe]);
    advance.raise(stripe);
  }
}

// Makes the row of a new key.   scratch: (dim of the class), not read if weights are float32.
void Table::initialize(std::byte* row, int row_class, std::uint64_t key,
                       float* scratch) const noexcept {
  const RowLayout& layout = classes_[row_class];
  const bool is_half = layout.dtype() != Dtype::kFloat32;
  float* weights = is_half ? scratch : weights_of_row(row);
  initializer_.fill(key, weights, layout.dim());
  if (is_half) layout.write_weights(row, weights);
  layout.begin(row, key, rule_.initial_state);
}

// Replaces each head that has risen by a row of the pushed class, which starts with the head's
// values.
void Table::extend(const GroupUpdate& update, const Risen& risen,
                   Arenas::Reservation& reservation) noexcept {
  for (std::size_t i = 0; i < risen.size; ++i) {
    const std::uint64_t key = update.group.keys[risen.numbers[i]];
    const std::byte* head = index_.find(key);
    if (arenas_.class_of(head) != risen.head_class) continue;  // the key occurs twice
    const std::size_t position = update.group.position(risen.numbers[i]);
    const int row_class = update.part_of(position).row_class;
    const Arena::Ref ref = reservation.take(row_class);
    std::byte* row = arenas_.row(ref);
    initialize(row, row_class, key, update.scratch);
    classes_[row_class].take_over(row, layout_of(head), head);
    if (tier_ != nullptr) tier_->uses().copy(arenas_.ref_of(head), ref);
    const Arena::Ref old = index_.replace(key, ref);
    arenas_.free({&old, 1});
  }
}

// Returns whether a key without a row gets one from this push.
bool Table::admits(std::uint64_t key, std::size_t position, const Step& step) noexcept {
  const auto& [time, version, show_click, features, counts] = step.columns;
  const float* pushed = show_click == nullptr ? nullptr : show_click + 2 * position;
  return admission_.admit(
      {.key = key,
       .count = counts == nullptr ? 1 : counts[position],
       .score = pushed == nullptr ? 0.0 : policy_.rates.score(pushed[0], pushed[1]),
       .time = time},
      step.id);
}

// Gives rows to those of these absent keys of one stripe that are admitted, and drops the others. A
// key may occur twice; the rows left over go back.   rows: room for as many.
void Table::insert_rows(Selection& absent, std::span<Arena::Ref> rows,
                        Arenas::Reservation& reservation, const Step& step,
                        const GroupUpdate& update, std::vector<Index::Entry>& scratch) noexcept {
  const std::uint32_t now = update.statistics.version;
  const std::uint64_t some_key = absent.group().keys[0];
  const std::uint32_t first_bucket = bucket_of(some_key) / kBucketsPerStripe * kBucketsPerStripe;
  if (admission_.admits_all()) {
    const auto num_new = count_by_bucket(absent.group().keys);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      const std::size_t num_rows = index_.num_rows(first_bucket + i) + num_new[i];
      if (num_new[i] > 0) index_.reserve(first_bucket + i, num_rows, now, scratch);
    }
  }
  const auto class_at = [&](std::size_t position) {
    return classes_.head() >= 0 ? classes_.head() : update.part_of(position).row_class;
  };
  std::array<std::size_t, Arenas::kClassesMax> num_taken{};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    ++num_taken[static_cast<std::size_t>(class_at(absent.group().position(i)))];
  }
  std::array<std::span<Arena::Ref>, Arenas::kClassesMax> left;  // of the rows that were taken
  for (std::size_t i = 0; i < num_taken.size(); ++i) {
    left[i] = rows.first(num_taken[i]);
    rows = rows.subspan(num_taken[i]);
    reservation.take(static_cast<int>(i), left[i]);
  }
  std::size_t num_used = 0;
  absent.filter([&](std::uint64_t key, std::size_t position) {
    if (index_.find(key) != nullptr) return true;
    if (!admits(key, position, step)) return false;
    const std::uint32_t bucket = bucket_of(key);
    index_.reserve(bucket, index_.num_rows(bucket) + 1, now, scratch);
    const int row_class = class_at(position);
    std::span<Arena::Ref>& rest = left[static_cast<std::size_t>(row_class)];
    const Arena::Ref ref = rest.front();
    rest = rest.subspan(1);
    ++num_used;
    initialize(arenas_.row(ref), row_class, key, update.scratch);
    index_.insert(mix64(key), {ref, static_cast<std::uint16_t>(now)}, now, scratch);
    if (tier_ != nullptr) tier_->uses().begin(ref);
    admission_.settle(key);
    return true;
  });
  num_admitted_ += num_used;
  for (const std::span<Arena::Ref> rest : left) arenas_.free(rest);
}

std::size_t Table::erase(std::span<const std::uint64_t> keys, Pool& pool, Tier::Claims claims) {
  std::atomic<std::size_t> erased{0};
  for_stripes(keys, pool, [&](std::uint32_t stripe, const Group& group) {
    if (group.keys.empty()) return;
    std::vector<Arena::Ref> refs;
    refs.reserve(group.keys.size());
    const Tier::Lock lock = lock_rows(stripe, group.keys, 0, claims);
    const auto num_keys = count_by_bucket(group.keys);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      removed_.prepare(stripe * kBucketsPerStripe + i, num_keys[i]);
    }
    for (const std::uint64_t key : group.keys) {
      admission_.settle(key);
      Arena::Ref ref;
      if (!index_.erase(key, ref)) continue;
      refs.push_back(ref);
      const std::uint32_t bucket = bucket_of(key);
      removed_.add(bucket, key, version(), num_rows_of(bucket));
    }
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      removed_.trim(stripe * kBucketsPerStripe + i);
    }
    arenas_.free(refs);
    erased += refs.size();
  });
  return erased;
}

std::size_t Table::settle(std::span<const std::uint64_t> keys, const float* delta_scores,
                          Tier::Claims claims) {
  check_scored("settle");
  std::size_t num_settled = 0;
  while (num_settled < keys.size()) {
    const std::size_t begin = num_settled;
    const std::uint32_t stripe = stripe_of_hash(mix64(keys[begin]));
    std::size_t end = begin + 1;
    while (end < keys.size() && end - begin < kSettledKeysMax &&
           stripe_of_hash(mix64(keys[end])) == stripe) {
      ++end;
    }
    try {
      const Tier::Lock lock = lock_rows(stripe, keys.subspan(begin, end - begin), 0, claims);
      for (; num_settled < end; ++num_settled) {
        if (std::byte* row = index_.find(keys[num_settled]); row != nullptr) {
          layout_of(row).score(row).delta_score -= delta_scores[num_settled];
        }
      }
    } catch (const Error&) {
      if (begin == 0) throw;
      break;  // whoever goes on gets the error
    }
  }
  return num_settled;
}

}  // namespace trireme
