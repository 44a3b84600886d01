#include "table/tier.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <thread>

#include "base/error.h"
#include "store/find.h"
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
constexpr std::size_t kCleaningReads = 1;  // more, which nobody promises: one thread cleans
constexpr std::chrono::milliseconds kLookAgain{1};  // for room that other calls give up

ssd::PageLogConfig log_config(const TierConfig& config, std::size_t row_bytes) noexcept {
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
          .spare_bytes = (num_reads + kCleaningReads) * read_pages * page_bytes,
          .timeout = config.timeout};
}

std::string mebibytes(std::size_t bytes) {
  const std::size_t tenths = bytes * 10 >> 20;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

}  // namespace

Tier::Tier(Table& table, const TierConfig& config)
    : table_(table),
      memory_bytes_(config.memory_bytes),
      log_(config.devices, log_config(config, table.arenas_.row_bytes())),
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
  const ssd::PageLogConfig log = log_config(config, row_bytes);
  return log.num_buffers * log.buffer_pages * log.page_bytes + log.spare_bytes;
}

StripeMutex& Tier::mutex_of_stripe(std::uint32_t stripe) const noexcept {
  return table_.stripes_[stripe];
}

Tier::Room::Room(Tier& tier, const Need& need) noexcept : tier_(&tier), need_(need) {
  tier.promised_rows_ += need.rows;
  tier.promised_in_stripe_[need.stripe] += need.rows;
  tier.promised_bytes_ += need.bytes;
  tier.promised_read_bytes_ += need.read_bytes;
}

Tier::Room& Tier::Room::operator=(Room&& other) noexcept {
  std::swap(tier_, other.tier_);
  std::swap(need_, other.need_);
  return *this;
}

Tier::Room Tier::Room::split(std::size_t num_rows) noexcept {
  Room part;
  part.tier_ = tier_;
  part.need_ = {.stripe = need_.stripe, .rows = num_rows};
  need_.rows -= num_rows;
  return part;
}

Tier::Room::~Room() {
  if (tier_ == nullptr) return;
  tier_->promised_rows_ -= need_.rows;
  tier_->promised_in_stripe_[need_.stripe] -= need_.rows;
  tier_->promised_bytes_ -= need_.bytes;
  tier_->promised_read_bytes_ -= need_.read_bytes;
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

std::size_t Tier::bytes_beside_rows() const noexcept {
  std::size_t n =
      sizeof(Table) + sizeof(Tier) + ssd::ColdRows::kOwnBytes + log_.buffer_bytes() + marks_bytes_;
  for (const auto& bytes : stripe_bytes_) n += bytes.load(std::memory_order_relaxed);
  return n;
}

// What the index of rows in memory takes when the promised ones are there.
std::size_t Tier::index_growth() const noexcept {
  std::size_t n = 0;
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    const std::size_t promised = promised_in_stripe_[stripe];
    if (promised == 0) continue;
    const NotedSize& noted = index_sizes_[stripe];
    n += Index::growth(
        {.num_rows = noted.num_rows, .num_lines_left = noted.num_lines_left, .bytes = noted.bytes},
        promised);
  }
  return n;
}

// What is kept at any time for reads that were promised.
std::size_t Tier::spare_bytes() const noexcept {
  return log_.spare_bytes() - kCleaningReads * log_.read_pages() * log_.page_bytes();
}

// Of the pages that are read, or will be: what is not kept for them at any time.
std::size_t Tier::read_bytes_beyond_spare() const noexcept {
  const std::size_t promised = promised_read_bytes_;
  return promised - std::min(promised, spare_bytes());
}

// What room for a new row takes: it may be of any class.
std::size_t Tier::new_row_bytes() const noexcept {
  std::size_t n = 0;
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    n += table_.arenas_.of(i).row_bytes() + Uses::kBytesPerRow;
  }
  return n;
}

// Whether what is kept for reads is enough, when other reads have ended.
bool Tier::is_kept_for(const Need& need) const noexcept {
  return need.rows + need.bytes == 0 && need.read_bytes > 0 && need.read_bytes <= spare_bytes();
}

Tier::Memory Tier::memory() const {
  const std::size_t promised = promised_rows_;
  Memory memory{.taken = bytes_beside_rows() + promised_bytes_ + index_growth() +
                         read_bytes_beyond_spare()};
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const Arena& arena = table_.arenas_.of(i);
    const Arena::Use use = arena.use();
    const std::size_t row_bytes = arena.row_bytes() + Uses::kBytesPerRow;
    memory.taken += use.num_rows * row_bytes + kPageBytes;  // rounded up
    memory.lacking += (promised - std::min(promised, use.num_free)) * row_bytes;
  }
  return memory;
}

// Whether what is there and what was promised is within the budget. Rows get more memory only if
// some is left then, so that what grows beside them can take it.
bool Tier::fits() const {
  const Memory found = memory();
  if (found.lacking == 0) return found.taken <= memory_bytes_;
  return found.taken + found.lacking <= memory_bytes_ - memory_bytes_ / 32;
}

std::vector<Tier::Room> Tier::make_room(Needs needs, Wait wait) {
  Need need;  // all of them
  for (const Need& one : needs) {
    need.rows += one.rows;
    need.bytes += one.bytes;
    need.read_bytes += one.read_bytes;
  }
  const auto deadline = std::chrono::steady_clock::now() + log_.timeout();
  const auto promised_others = [&]() -> Need {
    return {.rows = promised_rows_ - need.rows,
            .bytes = promised_bytes_ - need.bytes,
            .read_bytes = promised_read_bytes_ - need.read_bytes};
  };
  const auto is_none = [](const Need& n) { return n.rows + n.bytes + n.read_bytes == 0; };
  for (;;) {
    std::vector<Room> rooms;
    rooms.reserve(needs.size());
    for (const Need& one : needs) rooms.emplace_back(*this, one);
    if (is_kept_for(need) && promised_read_bytes_ <= spare_bytes()) return rooms;
    const bool was_alone = is_none(promised_others());  // else others may have ended since
    const bool may_wait = wait == Wait::kYes && std::chrono::steady_clock::now() <= deadline;
    const auto forgets = [&] { return wait == Wait::kYes && table_.forget_all_removed(); };
    try {
      if (find_room()) return rooms;
    } catch (const Error&) {
      if ((!is_kept_for(need) || !may_wait) && !forgets()) throw;
    }
    const Need others = promised_others();
    if ((!may_wait || (was_alone && is_none(others))) && !forgets()) fail(need, others);
    rooms.clear();
    std::this_thread::sleep_for(kLookAgain);
  }
}

// Moves rows to SSD until what was promised fits. Returns whether it does.
bool Tier::find_room() {
  // Each round without a row moved halves the rows that a bucket must have.
  constexpr std::size_t kVainRounds = 16, kRounds = 64;
  constexpr std::size_t kVainSteps = 64;  // before it looks again, for others may make room too
  std::size_t num_vain = 0;
  marks_bytes_ = table_.marks_.bytes();
  for (std::size_t num_steps = 0; !fits();) {
    if (num_vain >= kVainRounds * kNumBuckets || num_steps >= kRounds * kNumBuckets) return false;
    begin_shrink();  // also if all rows have gone, and left their memory
    bool has_moved = false;
    for (std::size_t i = 0; i < kVainSteps && !has_moved; ++i, ++num_steps) {
      has_moved = step();
      num_vain = has_moved ? 0 : num_vain + 1;
      if (num_vain > 0 && num_vain % kNumBuckets == 0) ++halvings_;
    }
  }
  return true;
}

void Tier::fail(const Need& need, const Need& others) const {
  const auto total = [&](const Need& n) {
    return mebibytes(n.rows * new_row_bytes() + n.bytes + n.read_bytes);
  };
  throw Error(ErrorCode::kResourceExhausted,
              "Table: expected " + std::to_string(need.rows) + " rows and " +
                  mebibytes(need.read_bytes) + " of pages more to fit into its budget of " +
                  mebibytes(memory_bytes_) + ", found that they need " + total(need) +
                  " of it, other calls " + total(others) +
                  ", what finds rows on SSD, and buffers, " + mebibytes(bytes_beside_rows()) +
                  ", and rows that did not leave memory " + mebibytes(table_.arenas_.bytes()) +
                  "; give it more memory (`trireme size` tells how much)");
}

bool Tier::has_room() {
  if (fits()) return true;
  try {
    make_room(Need{}, Wait::kNo);
    return true;
  } catch (const Error&) {  // of the budget, or a device, which whoever needs room is told
    return false;
  }
}

void Tier::set_memory(std::size_t num_bytes) {
  const std::size_t before = memory_bytes_.exchange(num_bytes);
  try {
    make_room(Need{}, Wait::kNo);
  } catch (...) {
    memory_bytes_ = before;
    throw;
  }
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

// The indexes grow as rows go to SSD, and one row class may need what another has: then rows have
// too much memory. Those with the highest numbers leave it as the hand goes by: of the class that
// has most to give, and of others if that is not enough.
void Tier::begin_shrink() {
  const Memory found = memory();
  const std::size_t goal = memory_bytes_ - memory_bytes_ / 32;
  const bool takes_too_much = found.taken > memory_bytes_ - memory_bytes_ / 64;
  const std::size_t wanted = takes_too_much ? found.taken : found.taken + found.lacking;
  if (!takes_too_much && (found.lacking == 0 || wanted <= goal)) return;
  struct Class {
    std::size_t num_bytes;  // that it can give most easily
    int number;
    Arena::Use use;
    std::size_t num_leaving_max;  // row 0 stays, and as many as were promised
  };
  const std::size_t promised = promised_rows_;
  std::vector<Class> order;
  std::size_t num_bytes_max = 0;
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const Arena& arena = table_.arenas_.of(i);
    const Arena::Use use = arena.use();
    const std::size_t num_free = use.num_free - std::min(use.num_free, promised);
    // One that lacks rows gives none to others.
    if (!takes_too_much && num_free == 0 && !arena.is_shrinking()) continue;
    const std::size_t num_leaving_max = use.num_rows - std::min(use.num_rows, promised + 1);
    num_bytes_max += num_leaving_max * arena.row_bytes();
    order.push_back(
        {(takes_too_much ? use.num_rows : num_free) * arena.row_bytes(), i, use, num_leaving_max});
  }
  std::ranges::sort(order, std::ranges::greater(), &Class::num_bytes);
  std::size_t excess = wanted - goal;
  // Rows that would all leave, and in vain: more memory is needed, and there may be some elsewhere.
  if (num_bytes_max < excess) return;
  for (const auto& [num_bytes, row_class, use, num_leaving_max] : order) {
    const Arena& arena = table_.arenas_.of(row_class);
    std::size_t num_leaving = use.num_rows - use.num_kept;
    if (!arena.is_shrinking()) {
      // Of free rows as many as can be spared at once: it takes the hand a round.
      const std::size_t spared =
          takes_too_much ? 0 : std::min<std::size_t>(num_bytes, memory_bytes_ / 64);
      num_leaving = std::min(std::max(excess, spared) / arena.row_bytes() + 1, num_leaving_max);
      if (num_leaving > 0) table_.arenas_.shrink(row_class, use.num_rows - num_leaving);
    }
    // What little is missing then is not worth a few rows of one class after the other.
    const std::size_t leaving_bytes = num_leaving * arena.row_bytes();
    if (leaving_bytes + memory_bytes_ / 128 >= excess) return;
    excess -= leaving_bytes;
  }
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
    if (arena.is_shrinking() && use.num_free > promised_rows_ + 1 + use.num_leaving) continue;
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
  write_out(bucket, coldest, {}, room);
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
    if (arena.use().num_free <= promised_rows_ + 1) continue;
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

// Writes rows that are in memory, and others that are on SSD, to new pages. Requires: the lock of
// the bucket's stripe, exclusive; room for the pages.
void Tier::write_out(std::uint32_t bucket, std::span<const Arena::Ref> refs, const Places& moved,
                     ssd::PageLog::Room& room) {
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
  if (order.empty()) return;
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
  // From here on nothing fails.
  cold_.put(bucket, added, std::move(pages), room, scratch);
  for (const Arena::Ref ref : refs) {
    Arena::Ref erased;
    const std::uint64_t key = key_of_row(table_.arenas_.row(ref));
    TRIREME_CHECK(table_.index_.erase(key, erased) && erased == ref);
  }
  table_.arenas_.free(refs);
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
  write_out(bucket, refs, places, room);
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
