#include "table/tier.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"
#include "table/table.h"

namespace trireme {

namespace {

// What the hand does at a bucket: pages that it writes, and the share of the rows in memory that it
// moves out at most.
constexpr std::size_t kPagesOut = 8;
constexpr std::size_t kShareOut = 16;

// Cleaning: the share of the rows on SSD that are left, in per cent, below which it begins; pages
// that it reads at a time; and the share above which a segment is not worth it.
constexpr std::size_t kLeftPercentMin = 65;
constexpr std::size_t kPagesCleaned = 32;
constexpr std::size_t kWorthPercentMax = 95;

constexpr std::size_t kNumBuffers = 4, kBufferPagesMin = 16;
// Of what reads may take at any time: how many reads that is.
constexpr std::size_t kNumReads = 64, kNumReadsMin = 2, kReadPagesMin = 16;

ssd::PageLogConfig log_config(const TierConfig& config, std::size_t row_bytes,
                              std::size_t cleaning_reads) noexcept {
  const std::size_t page_bytes = ssd::page_bytes_for(row_bytes);
  const std::size_t buffer_pages = std::max(config.buffer_bytes / page_bytes, kBufferPagesMin);
  const std::size_t read_pages =
      std::max(config.read_bytes / kNumReads / page_bytes, kReadPagesMin);
  const std::size_t num_reads =
      std::max(config.read_bytes / (read_pages * page_bytes), kNumReadsMin);
  return {.page_bytes = page_bytes,
          .segment_pages = std::max(config.segment_bytes / page_bytes, buffer_pages),
          .buffer_pages = buffer_pages,
          .num_buffers = kNumBuffers,
          .read_pages = read_pages,
          .spare_bytes = (num_reads + cleaning_reads) * read_pages * page_bytes,
          .timeout = config.timeout};
}

}  // namespace

Tier::Tier(Table& table, const TierConfig& config)
    : table_(table),
      memory_bytes_(config.memory_bytes),
      limit_bytes_(config.memory_bytes),
      log_(config.devices, log_config(config, table.arenas_.row_bytes(), kCleaningReads)),
      cold_(log_, table.classes_.layouts(), config.number),
      uses_(table.arenas_.num_classes() == 1 ? table.arenas_.of(0).num_rows_max()
                                             : std::size_t{1} << 32) {
  const std::size_t own = bytes_beside_rows();
  if (memory_bytes_ < own + own / 8) {
    throw Error(ErrorCode::kBadRequest,
                "Table: expected a budget of at least " + std::to_string(own + own / 8) +
                    " bytes for a table with an SSD tier, found " + std::to_string(memory_bytes_));
  }
}

std::size_t Tier::buffer_bytes(const TierConfig& config, std::size_t row_bytes) noexcept {
  const ssd::PageLogConfig log = log_config(config, row_bytes, kCleaningReads);
  return log.num_buffers * log.buffer_pages * log.page_bytes + log.spare_bytes;
}

StripeMutex& Tier::mutex_of_stripe(std::uint32_t stripe) const noexcept {
  return table_.stripes_[stripe];
}

// Counts again what a stripe takes beside its rows. Requires: its exclusive lock.
void Tier::note(std::uint32_t stripe) noexcept {
  std::size_t cold = 0, others = table_.index_.bytes(stripe);
  std::uint64_t in_memory = 0;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    const std::uint32_t bucket = stripe * kBucketsPerStripe + i;
    cold += cold_.bytes(bucket);
    others += table_.removed_.bytes(bucket) + table_.admission_.bytes(bucket);
    in_memory |= std::uint64_t{table_.index_.num_rows(bucket) > 0} << i;
  }
  in_memory_[stripe] = in_memory;
  const Index::Size size = table_.index_.size(stripe);
  index_sizes_[stripe].num_rows = size.num_rows;
  index_sizes_[stripe].num_lines_left = size.num_lines_left;
  index_sizes_[stripe].bytes = size.bytes;
  cold_bytes_[stripe] = cold;
  stripe_bytes_[stripe] = cold + others;
}

// Goes on to the next bucket. Returns whether rows were moved.
bool Tier::step() {
  const std::uint64_t hand = hand_.fetch_add(1, std::memory_order_relaxed);
  const auto bucket = static_cast<std::uint32_t>(hand % kNumBuckets);
  if (bucket == 0 && saw_more_.exchange(false)) {
    int halvings = halvings_;
    while (halvings > 0 && !halvings_.compare_exchange_weak(halvings, halvings - 1)) {
    }
  }
  const std::uint64_t in_memory = in_memory_[bucket / kBucketsPerStripe];
  if ((in_memory >> bucket % kBucketsPerStripe & 1) == 0) return false;
  const std::size_t num_moved = move_out(bucket);
  clean();
  return num_moved > 0;
}

// Keeps the references of the rows that were used least.
void Tier::keep_coldest(std::vector<Arena::Ref>& refs, std::size_t num_rows) const {
  if (num_rows >= refs.size()) return;
  std::vector<std::pair<int, Arena::Ref>> order(refs.size());
  for (std::size_t i = 0; i < refs.size(); ++i) {
    order[i] = {uses_.log_weight(refs[i]), refs[i]};
  }
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(num_rows),
                   order.end());
  refs.resize(num_rows);
  for (std::size_t i = 0; i < num_rows; ++i) refs[i] = order[i].second;
}

// Moves rows of a bucket that were used least to SSD, whole pages of them if it has enough.
// Returns how many rows were moved.
std::size_t Tier::move_out(std::uint32_t bucket) {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  const int num_classes = table_.arenas_.num_classes();
  ssd::PageLog::Room room = log_.reserve(kPagesOut + static_cast<std::size_t>(num_classes));
  Lock lock(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
  std::vector<Arena::Ref> refs;
  table_.index_.refs_of(bucket, refs);
  for (const Arena::Ref ref : refs) uses_.keep(ref);
  const std::size_t num_relocated = relocate(refs);
  if (num_relocated > 0) {
    refs.clear();
    table_.index_.refs_of(bucket, refs);
  }
  leave_out_claimed(bucket, refs);
  std::vector<Arena::Ref> coldest, of_class;
  for (int i = 0; i < num_classes; ++i) {
    // Rows that leave their memory go to other places in memory, if there are enough.
    const Arena& arena = table_.arenas_.of(i);
    const Arena::Use use = arena.use();
    if (arena.is_shrinking() && use.num_free > promised_.rows + 1 + use.num_leaving) continue;
    of_class.clear();
    std::ranges::copy_if(refs, std::back_inserter(of_class),
                         [&](Arena::Ref ref) { return table_.arenas_.class_of(ref) == i; });
    const std::size_t per_page = cold_.rows_per_page(i);
    const int halvings = halvings_;
    const std::size_t num_min = std::max<std::size_t>(per_page >> std::min(halvings, 16), 1);
    if (halvings > 0 && of_class.size() >= 2 * num_min) saw_more_ = true;
    if (of_class.size() < num_min) continue;
    const std::size_t num_pages =
        std::clamp<std::size_t>(of_class.size() / kShareOut / per_page, 1,
                                kPagesOut / static_cast<unsigned>(num_classes) + 1);
    keep_coldest(of_class, num_pages * per_page);
    coldest.insert(coldest.end(), of_class.begin(), of_class.end());
  }
  if (!coldest.empty() && !write_out(lock, bucket, coldest, {}, room)) return num_relocated;
  std::vector<Index::Entry> scratch;
  table_.index_.trim(bucket, table_.version(), scratch);
  num_evicted_ += coldest.size();
  return coldest.size() + num_relocated;
}

// Moves rows whose memory is to be given back to other places in memory, as far as there are some.
// Returns how many. Requires: the stripe's lock.
std::size_t Tier::relocate(std::span<const Arena::Ref> refs) {
  std::size_t n = 0;
  for (const Arena::Ref ref : refs) {
    if (!table_.arenas_.is_leaving(ref)) continue;
    const int row_class = table_.arenas_.class_of(ref);
    const Arena& arena = table_.arenas_.of(row_class);
    if (arena.use().num_free <= promised_.rows + 1) continue;
    std::array<std::size_t, Arenas::kClassesMax> one{};
    one[static_cast<std::size_t>(row_class)] = 1;
    Arenas::Reservation reservation(table_.arenas_, one);
    const Arena::Ref other = reservation.take(row_class);
    std::byte* row = table_.arenas_.row(other);
    std::memcpy(row, table_.arenas_.row(ref), arena.row_bytes());
    uses_.copy(ref, other);
    const Arena::Ref old = table_.index_.replace(key_of_row(row), other);
    table_.arenas_.free({&old, 1});
    ++n;
  }
  return n;
}

// Writes rows that are in memory, and others that are on SSD, to new pages. Returns false, and does
// nothing, if the memory that finds them there would exceed the budget. Requires: the lock of the
// bucket's stripe, exclusive; room for the pages.
bool Tier::write_out(Lock& lock, std::uint32_t bucket, std::span<const Arena::Ref> refs,
                     const Places& moved, ssd::PageLog::Room& room) {
  struct Row {
    std::uint64_t hash;
    const std::byte* bytes;
    std::uint8_t row_class;
    std::uint8_t uses;
  };
  std::vector<Row> order;
  order.reserve(refs.size() + moved.size());
  for (const Place& place : moved) {
    order.push_back({mix64(key_of_row(place.row)), place.row, place.row_class,
                     uses_.saved(place.uses, place.time)});
  }
  for (const Arena::Ref ref : refs) {
    const std::byte* row = table_.arenas_.row(ref);
    order.push_back({mix64(key_of_row(row)), row,
                     static_cast<std::uint8_t>(table_.arenas_.class_of(ref)), uses_.saved(ref)});
  }
  std::ranges::sort(order, [](const Row& a, const Row& b) {
    return std::pair(a.row_class, a.hash) < std::pair(b.row_class, b.hash);
  });
  std::vector<const std::byte*> rows(order.size());
  std::vector<std::uint8_t> classes(order.size()), uses(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    rows[i] = order[i].bytes;
    classes[i] = order[i].row_class;
    uses[i] = order[i].uses;
  }
  std::vector<std::byte> scratch(log_.page_bytes());
  const ssd::ColdRows::Rows added{
      .rows = rows, .classes = classes, .uses = uses, .time = uses_.time(), .moved = moved};
  ssd::ColdRows::Pages pages = cold_.prepare(bucket, added);
  lock.rooms_.emplace_back(*this, Need{.stripe = lock.stripe_, .bytes = pages.growth()}).grant();
  if (!may_grow(pages.growth())) return false;
  // From here on nothing fails.
  cold_.put(bucket, added, std::move(pages), room, scratch);
  for (const Arena::Ref ref : refs) {
    Arena::Ref erased;
    const std::uint64_t key = key_of_row(table_.arenas_.row(ref));
    TRIREME_CHECK(table_.index_.erase(key, erased) && erased == ref);
  }
  table_.arenas_.free(refs);
  return true;
}

// Frees segments, if many rows on SSD are gone: some pages at a time.
void Tier::clean() {
  std::unique_lock lock(clean_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (clean_left_ > 0 && log_.generation(clean_next_) != clean_generation_) clean_left_ = 0;
  if (clean_left_ == 0) {
    std::optional<ssd::PageLog::Segment> victim = log_.failed();
    if (!victim) {
      const ssd::PageLog::Use use = log_.use();
      if (use.num_rows * 100 >= use.num_rows_then * kLeftPercentMin) return;
      victim = log_.emptiest();
      if (!victim || victim->num_rows * 100 > victim->num_rows_then * kWorthPercentMax) return;
    }
    clean_next_ = victim->first;
    clean_left_ = victim->num_pages;
    clean_generation_ = log_.generation(clean_next_);
  }
  std::vector<ssd::Position> positions(
      std::min({clean_left_, kPagesCleaned, kCleaningReads * log_.read_pages()}));
  std::iota(positions.begin(), positions.end(), clean_next_);
  ssd::PagesRead read;
  try {
    read = log_.read(positions);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDeadlineExceeded) throw;
    clean_left_ = 0;  // not now: who needs room has no need of that device
    return;
  }
  clean_next_ += static_cast<ssd::Position>(positions.size());
  clean_left_ -= positions.size();
  for (std::size_t begin = 0, end; begin < positions.size(); begin = end) {
    const ssd::PagesRead::Page* first = read.find(positions[begin]);
    end = begin + 1;
    if (first->generation != clean_generation_) continue;
    if (first->error != 0) log_.set_aside(positions[begin]);
    if (first->bytes == nullptr) continue;
    const std::uint16_t bucket = ssd::header_of(first->bytes).bucket;
    for (; end < positions.size() && end - begin < kPagesOut; ++end) {
      const ssd::PagesRead::Page* page = read.find(positions[end]);
      if (page->bytes == nullptr || page->generation != clean_generation_) break;
      if (ssd::header_of(page->bytes).bucket != bucket) break;
    }
    clean_bucket(std::span(positions).subspan(begin, end - begin), read);
  }
}

// Writes the rows that are left of some pages of a bucket to new pages, together with rows from
// memory that fill the last one.
void Tier::clean_bucket(std::span<const ssd::Position> positions, const ssd::PagesRead& read) {
  const auto num_classes = static_cast<std::size_t>(table_.arenas_.num_classes());
  ssd::PageLog::Room room = log_.reserve(kPagesOut + num_classes);
  const std::uint32_t bucket = ssd::header_of(read.find(positions[0])->bytes).bucket;
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  if (stripe >= kNumStripes) return;
  Lock lock(this, stripe, std::unique_lock(mutex_of_stripe(stripe)));
  if (log_.generation(positions[0]) != clean_generation_) return;
  Places places;
  for (const ssd::Position position : positions) {
    const std::byte* page = read.find(position)->bytes;
    const ssd::PageHeader header = ssd::header_of(page);
    if (!cold_.is_current(header, position)) continue;
    cold_.for_rows_of_page(header, page, [&](const Place& place) { places.push_back(place); });
  }
  if (places.empty()) return;
  std::vector<Arena::Ref> refs;
  if (num_classes == 1) {
    const std::size_t per_page = cold_.rows_per_page(0);
    const std::size_t rest = places.size() % per_page;
    if (rest > 0) {
      table_.index_.refs_of(bucket, refs);
      leave_out_claimed(bucket, refs);
      keep_coldest(refs, per_page - rest);
    }
  }
  if (!write_out(lock, bucket, refs, places, room)) return;
  num_cleaned_ += places.size();
  num_evicted_ += refs.size();
}

std::size_t Tier::bytes() const {
  return bytes_beside_rows() - log_.buffer_bytes() + log_.bytes() + table_.arenas_.bytes();
}

Tier::Use Tier::use() const {
  std::size_t index_bytes = ssd::ColdRows::kOwnBytes;
  for (const auto& bytes : cold_bytes_) index_bytes += bytes.load(std::memory_order_relaxed);
  return {.log = log_.use(),
          .memory_bytes = memory_bytes_,
          .bytes = bytes(),
          .own_bytes = bytes_beside_rows(),
          .index_bytes = index_bytes,
          .num_hits = num_hits_,
          .num_misses = num_misses_,
          .num_evicted = num_evicted_,
          .num_cleaned = num_cleaned_,
          .num_refused = num_refused_,
          .num_fetched = num_fetched_};
}

}  // namespace trireme
