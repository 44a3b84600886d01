// A table with an SSD tier does what the same table in memory does: random operations on both, of
// all kinds of tables, with budgets from all of the rows to few of them. The device is the fake
// one.
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "table/table.h"
#include "tiered.h"

using namespace trireme;

namespace {

using test::Keys;
using test::keys_of_buckets;
using test::own_bytes;
using test::tier_config;

constexpr std::uint32_t kDay = kSecondsPerDay;

TableConfig some_config(test::Random& random) {
  TableConfig config;
  const std::array<std::string, 5> rules{"sgd", "adagrad", "adam", "ftrl", "momentum"};
  config.rule.name = rules[random.below(rules.size())];
  config.dims = {static_cast<int>(1 + random.below(24))};
  const std::array<std::string, 3> dtypes{"float32", "bfloat16", "float16"};
  if (random.below(3) == 0) config.dtype = dtypes[random.below(3)];
  if (random.below(3) == 0) config.dims.push_back(config.dims[0] + 5);
  if (random.below(2) == 0) {
    config.policy.is_scored = true;
    config.policy.rates = {.nonclk_coeff = 0.5, .click_coeff = 2.0, .decay_rate = 0.5};
    config.policy.delete_threshold = 0.25;
    config.policy.delete_after_unseen_days = 10;
    if (random.below(2) == 0) config.policy.embedx_threshold = 2.0;
  }
  if (random.below(3) == 0) config.policy.ttl_s = 5 * kDay;
  if (random.below(4) == 0) config.policy.max_rows = 200 * kNumBuckets;
  if (random.below(3) == 0) config.admission = {.name = "count_filter", .n = 2};
  return config;
}

struct Row {
  std::uint8_t row_class;
  std::vector<std::uint8_t> bytes;
  bool operator==(const Row&) const = default;
};

struct Content {
  std::map<std::uint64_t, Row> rows;
  std::vector<std::pair<std::int64_t, std::uint64_t>> marks;
  std::vector<std::uint8_t> pending;
  Keys removed;
  bool operator==(const Content&) const = default;
};

Content content_of(const BucketContent& content, std::size_t row_bytes) {
  Content result;
  for (std::size_t i = 0; i < content.keys.size(); ++i) {
    const auto bytes = content.rows.span().subspan(i * row_bytes, row_bytes);
    result.rows[content.keys[i]] = {content.classes[i], {bytes.begin(), bytes.end()}};
  }
  CHECK_EQUAL(result.rows.size(), content.keys.size());
  result.marks = content.marks;
  result.pending = {content.pending.span().begin(), content.pending.span().end()};
  result.removed = {content.removed.span().begin(), content.removed.span().end()};
  return result;
}

// The same operations on a table in memory and on one with a tier.
class Pair {
 public:
  // share: of the rows in memory. All rows together take `all_bytes`.
  Pair(test::Random& random, double share, std::size_t all_bytes)
      : random_(random),
        config_(some_config(random)),
        pool_(static_cast<int>(1 + random.below(3))),
        device_(std::make_shared<ssd::FakeDevice>(random.next())),
        memory_(config_),
        keys_(keys_of_buckets(random, kBuckets, all_bytes / row_bytes())) {
    const auto rows = static_cast<std::size_t>(share * static_cast<double>(all_bytes));
    budget_ = own_bytes(config_) + rows + keys_.size() * kIndexBytes + kLeast;
    make_tiered();
    fill();
  }

  void step() {
    switch (random_.below(20)) {
      case 10:
        if (random_.below(8) == 0) recover();
        return;
      case 0:
        return restore();
      case 1:
        return shrink();
      case 2:
        return erase();
      case 3:
        return settle();
      case 4:
        return apply();
      case 5:
      case 6:
        return compare_bucket(some_bucket(), random_.below(2) == 0 ? 0 : some_version());
      case 7:
        return contains();
      case 8:
      case 9:
        return lookup();
      default:
        return update();
    }
  }

  void check_all() {
    for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) compare_bucket(bucket, 0);
    lookup();
  }

  const Tier& tier() const { return *tiered_->tier(); }
  std::size_t num_errors() const { return num_errors_; }
  std::size_t num_recovered() const { return num_recovered_; }
  std::size_t num_evicted() const { return num_evicted_ + tier().use().num_evicted; }
  // Whether all rows have been too large for the budget.
  bool is_small() const { return bytes_max_ > budget_; }
  std::size_t num_misses() const { return num_misses_ + tier().use().num_misses; }
  void set_faults(bool has) { has_faults_ = has; }

 private:
  static constexpr std::size_t kLeast = std::size_t{2} << 20;  // what a call needs room for
  static constexpr std::size_t kUpdateKeys = 1000;
  static constexpr std::uint32_t kBuckets = 64;
  static constexpr std::size_t kIndexBytes = 5;  // of a row on SSD
  static constexpr const char* kKept = ".kept";

  std::size_t row_bytes() const { return memory_.row_bytes() + 8 + Uses::kBytesPerRow; }

  void make_tiered() {
    TableConfig config = config_;
    config.tier = tier_config(device_, budget_);
    tiered_.emplace(config);
  }

  // A snapshot that leaves the rows on SSD, while pushes go on; the machine fails; a new table goes
  // on with the snapshot. The one in memory is set back to the same moment of each bucket.
  void recover() {
    std::vector<BucketContent> there, here;
    std::vector<ssd::PageLog::SegmentFile> segments;
    std::vector<std::string> names;
    {
      ssd::PageLog& log = tiered_->tier()->log();
      const ssd::PageLog::Hold hold(log);
      for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
        if (bucket % (kNumBuckets / 4) == 1) update();
        there.push_back(tiered_->snapshot_in_memory(bucket, 1));
        here.push_back(memory_.snapshot(bucket, 0, 1));
      }
      log.flush();
      segments = log.segments();
      for (const auto& segment : segments) device_->link(segment.name, segment.name + kKept);
      device_->sync_names();
    }
    update();
    const Tier::Use use = tier().use();
    num_evicted_ += use.num_evicted;
    num_misses_ += use.num_misses;
    tiered_.reset();
    device_->crash();
    make_tiered();
    for (const auto& segment : segments) {
      device_->link(segment.name + kKept, segment.name);
      tiered_->tier()->log().adopt(segment);
      device_->remove(segment.name + kKept);
    }
    {
      const ssd::PageLog::Hold hold(tiered_->tier()->log());
      restore_all(*tiered_, there);
    }
    restore_all(memory_, here);
    check_all();
    ++num_recovered_;
  }

  void restore_all(Table& table, const std::vector<BucketContent>& contents) {
    table.raise_version(version_);
    for (std::uint32_t bucket = 0; bucket < kNumBuckets; ++bucket) {
      const BucketContent& content = contents[bucket];
      table.restore(bucket, {.keys = content.keys.span(),
                             .classes = content.classes.span(),
                             .rows = content.rows.span(),
                             .marks = content.marks,
                             .pending = content.pending.span(),
                             .removed = content.removed.span(),
                             .removed_at = version_,
                             .removed_since = content.removed_since,
                             .places = content.places});
    }
  }

  std::uint32_t some_bucket() { return bucket_of(keys_[random_.below(keys_.size())]); }
  std::uint32_t some_version() { return static_cast<std::uint32_t>(random_.below(version_ + 1)); }

  std::size_t number_of(const Table& table) const { return &table == &memory_ ? 0 : 1; }

  // Some keys come often, most seldom.
  Keys some_keys(std::size_t num_max) {
    Keys keys(1 + random_.below(num_max));
    for (std::uint64_t& key : keys) {
      const bool is_frequent = random_.below(2) == 0;
      key = keys_[random_.below(is_frequent ? keys_.size() / 20 + 1 : keys_.size())];
    }
    return keys;
  }

  // What a call on a faulty device has left undone is done by the same call when it works again.
  template <class Function>
  void both(const Function& function) {
    function(memory_);
    if (has_faults_) {
      device_->set_faults({.read_error = random_.below(2) == 0 ? 0.05 : 0,
                           .write_error = random_.below(2) == 0 ? 0.2 : 0,
                           .late = 0.3,
                           .stuck = random_.below(20) == 0 ? 0.1 : 0,
                           .num_reads = random_.below(3) == 0 ? random_.below(200) : 1U << 30});
      try {
        function(*tiered_);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kUnavailable ||
              error.code() == ErrorCode::kDeadlineExceeded);
        ++num_errors_;
        device_->set_faults({});
        function(*tiered_);
      }
      device_->set_faults({});
    } else {
      function(*tiered_);
    }
    CHECK_EQUAL(tiered_->num_rows(), memory_.num_rows());
    if (tiered_->bytes() > budget_) CHECK_EQUAL(tiered_->bytes(), budget_);
    bytes_max_ = std::max(bytes_max_, memory_.bytes());
  }

  // Twice, for keys that need two pushes.
  void fill() {
    for (std::size_t begin = 0; begin < keys_.size(); begin += kUpdateKeys) {
      const std::size_t end = std::min(begin + kUpdateKeys, keys_.size());
      const Keys keys(keys_.data() + begin, keys_.data() + end);
      for (int i = 0; i < 2; ++i) update(keys);
    }
  }

  void update() { update(some_keys(kUpdateKeys)); }
  void update(const Keys& keys) {
    const auto dim = static_cast<std::size_t>(memory_.classes()[0].dim());
    std::vector<float> grads(keys.size() * dim);
    for (float& grad : grads) grad = static_cast<float>(random_.below(1000)) / 500 - 1;
    std::vector<float> show_click(2 * keys.size());
    for (float& n : show_click) n = static_cast<float>(random_.below(2));
    time_ += static_cast<std::uint32_t>(random_.below(kDay / 4));
    version_ += static_cast<std::uint32_t>(random_.below(2));
    const PushId id{static_cast<std::int64_t>(random_.below(3)), ++sequence_};
    std::array<std::size_t, 2> applied{};
    const bool is_claimed = random_.below(2) == 0;
    both([&](Table& table) {
      std::unique_ptr<Tier::Claim> claim;
      std::vector<Tier::Claim*> claims;
      if (is_claimed && &table == &*tiered_) {
        claim = table.claim(keys, pool_);
      }
      if (claim != nullptr) {
        claims.push_back(claim.get());
        // Only what a limit removes is looked for on the device after that.
        if (!config_.policy.max_rows) device_->set_faults({.read_error = 1, .write_error = 1});
      }
      applied[number_of(table)] =
          table.update(keys, std::array{Table::Gradients{grads.data(), keys.size()}},
                       std::array{id}, RuleValues{.lr = 0.1}, pool_,
                       {.time = time_,
                        .version = version_,
                        .show_click = table.is_scored() ? show_click.data() : nullptr},
                       Change::kRule, claims);
      if (claim != nullptr) device_->set_faults({});
    });
    if (!has_faults_) CHECK_EQUAL(applied[0], applied[1]);
  }

  void lookup() {
    Keys keys = some_keys(2000);
    keys.push_back(random_.next());  // absent
    const int row_class = static_cast<int>(random_.below(config_.dims.size()));
    const auto dim = static_cast<std::size_t>(config_.dims[static_cast<std::size_t>(row_class)]);
    std::array<std::vector<float>, 2> weights;
    std::array<std::size_t, 2> num_absent{};
    both([&](Table& table) {
      const std::size_t i = number_of(table);
      weights[i].resize(keys.size() * dim);
      num_absent[i] = table.lookup(keys, weights[i].data(), pool_, row_class);
    });
    CHECK_EQUAL(num_absent[0], num_absent[1]);
    CHECK(weights[0] == weights[1]);
    if (!memory_.is_scored()) return;
    std::array<std::vector<double>, 2> shows;
    both([&](Table& table) {
      std::vector<double>& out = shows[number_of(table)];
      out.resize(2 * keys.size());
      table.statistics(keys, out.data(), {time_, false}, pool_);
    });
    CHECK(shows[0] == shows[1]);
  }

  void contains() {
    Keys keys = some_keys(300);
    keys.push_back(random_.next());
    std::array<std::vector<char>, 2> has;
    both([&](Table& table) {
      std::vector<char>& out = has[number_of(table)];
      out.resize(keys.size());
      table.contains(keys, reinterpret_cast<bool*>(out.data()), pool_);
    });
    CHECK(has[0] == has[1]);
  }

  void erase() {
    const Keys keys = some_keys(50);
    std::array<std::size_t, 2> erased{};
    both([&](Table& table) { erased[number_of(table)] = table.erase(keys, pool_); });
    if (!has_faults_) CHECK_EQUAL(erased[0], erased[1]);
  }

  void settle() {
    if (!memory_.is_scored()) return;
    const Keys keys = some_keys(100);
    const std::vector<float> scores(keys.size(), 0.25F);
    std::array<std::size_t, 2> num_settled{};
    both([&](Table& table) {
      std::size_t& n = num_settled[number_of(table)];
      while (n < keys.size()) n += table.settle(std::span(keys).subspan(n), scores.data());
    });
  }

  void shrink() {
    const std::uint32_t bucket = some_bucket();
    std::array<Table::Shrunk, 2> shrunk{};
    both([&](Table& table) {
      shrunk[number_of(table)] = table.shrink(bucket, {time_, true}, version_);
    });
    CHECK_EQUAL(shrunk[0].num_expired, shrunk[1].num_expired);
    CHECK_EQUAL(shrunk[0].num_evicted, shrunk[1].num_evicted);
  }

  // What a bucket has is written to it, or to it as it is later.
  void restore() {
    const std::uint32_t bucket = some_bucket();
    saved_bucket_ = bucket;
    saved_ = memory_.snapshot(bucket);
    update();
    both([&](Table& table) {
      table.restore(bucket, {.keys = saved_.keys.span(),
                             .classes = saved_.classes.span(),
                             .rows = saved_.rows.span(),
                             .marks = saved_.marks,
                             .pending = saved_.pending.span()});
    });
  }

  void apply() {
    if (saved_bucket_ == kNumBuckets) return;
    const Keys removed{saved_.keys.size() == 0 ? keys_of(saved_bucket_) : saved_.keys[0]};
    const std::size_t half = saved_.keys.size() / 2;
    both([&](Table& table) {
      table.apply(saved_bucket_,
                  {.keys = saved_.keys.span().first(half),
                   .classes = saved_.classes.span().first(half),
                   .rows = saved_.rows.span().first(half * table.row_bytes()),
                   .marks = {},
                   .pending = {}},
                  removed);
    });
  }

  std::uint64_t keys_of(std::uint32_t bucket) const {
    return *std::ranges::find(keys_, bucket, bucket_of);
  }

  void compare_bucket(std::uint32_t bucket, std::uint32_t since) {
    std::vector<Content> contents;
    bool is_refused = false;
    for (const Table* table :
         {static_cast<const Table*>(&memory_), static_cast<const Table*>(&*tiered_)}) {
      try {
        contents.push_back(content_of(table->snapshot(bucket, since), table->row_bytes()));
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kBadRequest);
        is_refused = true;
      }
    }
    if (is_refused) {
      CHECK(contents.empty());
    } else {
      CHECK(contents[0] == contents[1]);
    }
  }

  test::Random& random_;
  const TableConfig config_;
  Pool pool_;
  std::shared_ptr<ssd::FakeDevice> device_;
  Table memory_;
  const Keys keys_;
  std::size_t budget_;
  std::optional<Table> tiered_;
  std::uint32_t time_ = 10 * kDay;
  std::uint32_t version_ = 1;
  std::int64_t sequence_ = 0;
  bool has_faults_ = false;
  std::size_t num_errors_ = 0;
  std::size_t num_evicted_ = 0, num_misses_ = 0;  // of tables before the last recovery
  std::size_t bytes_max_ = 0;                     // that the table in memory has taken
  std::size_t num_recovered_ = 0;
  std::uint32_t saved_bucket_ = kNumBuckets;
  BucketContent saved_;
};

void test_a_tiered_table_agrees_with_one_in_memory(std::uint64_t seed, int num_steps) {
  for (const double share : {1.0, 0.3, 0.1, 0.03}) {
    test::Random random(seed * 31 + static_cast<std::uint64_t>(share * 100));
    Pair pair(random, share, std::size_t{10} << 20);
    for (int i = 0; i < num_steps; ++i) pair.step();
    pair.check_all();
    const Tier::Use use = pair.tier().use();
    std::cout << "share " << share << ": " << pair.num_evicted() << " rows to SSD, "
              << pair.num_misses() << " read from there, " << use.log.num_segments
              << " segments, recovered " << pair.num_recovered() << " times" << std::endl;
    CHECK_EQUAL(use.num_refused, 0U);
    CHECK(!pair.is_small() || (pair.num_evicted() > 0 && pair.num_misses() > 0));
  }
}

void test_faults_of_the_device_lose_nothing(std::uint64_t seed, int num_steps) {
  test::Random random(seed);
  Pair pair(random, 0.1, std::size_t{10} << 20);
  pair.set_faults(true);
  for (int i = 0; i < num_steps; ++i) pair.step();
  pair.set_faults(false);
  pair.check_all();
  std::cout << pair.num_errors() << " calls failed" << std::endl;
  CHECK(num_steps < 100 || pair.num_errors() > 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  const std::uint64_t num_seeds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const int num_steps = argc > 2 ? 250 : 60;
  for (std::uint64_t i = 0; i < num_seeds; ++i) {
    test_a_tiered_table_agrees_with_one_in_memory(seed + i, num_steps);
    test_faults_of_the_device_lose_nothing(seed + i, num_steps);
  }
}
