// Tier: the budget of memory, and room in it.
#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

namespace {

constexpr std::chrono::milliseconds kLookAgain{1};  // for room that other calls give up

std::string mebibytes(std::size_t bytes) {
  const std::size_t tenths = bytes * 10 >> 20;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

}  // namespace

void Tier::Promises::add(const Need& need) noexcept {
  rows += need.rows;
  in_stripe[need.stripe] += need.rows;
  bytes += need.bytes;
  read_bytes += need.read_bytes;
}

void Tier::Promises::remove(const Need& need) noexcept {
  rows -= need.rows;
  in_stripe[need.stripe] -= need.rows;
  bytes -= need.bytes;
  read_bytes -= need.read_bytes;
}

Tier::Room::Room(Tier& tier, const Need& need) noexcept : tier_(&tier), need_(need) {
  tier.promised_.add(need);
}

void Tier::Room::grant() noexcept {
  is_granted_ = true;
  tier_->granted_.add(need_);
}

void Tier::Room::revoke() noexcept {
  is_granted_ = false;
  tier_->granted_.remove(need_);
}

Tier::Room& Tier::Room::operator=(Room&& other) noexcept {
  std::swap(tier_, other.tier_);
  std::swap(need_, other.need_);
  std::swap(is_granted_, other.is_granted_);
  return *this;
}

Tier::Room Tier::Room::split(std::size_t num_rows) noexcept {
  Room part;
  part.tier_ = tier_;
  part.need_ = {.stripe = need_.stripe, .rows = num_rows};
  part.is_granted_ = is_granted_;
  need_.rows -= num_rows;
  return part;
}

Tier::Room::~Room() {
  if (tier_ == nullptr) return;
  if (is_granted_) revoke();
  tier_->promised_.remove(need_);
}

std::size_t Tier::bytes_beside_rows() const noexcept {
  std::size_t n =
      sizeof(Table) + sizeof(Tier) + ssd::ColdRows::kOwnBytes + log_.buffer_bytes() + marks_bytes_;
  for (const auto& bytes : stripe_bytes_) n += bytes.load(std::memory_order_relaxed);
  return n;
}

// What the index of rows in memory takes when the promised ones are there.
std::size_t Tier::index_growth(const Promises& promises) const noexcept {
  std::size_t n = 0;
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    const std::size_t promised = promises.in_stripe[stripe];
    if (promised == 0) continue;
    const NotedSize& noted = index_sizes_[stripe];
    n += table_.index_.growth(
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
std::size_t Tier::read_bytes_beyond_spare(const Promises& promises) const noexcept {
  const std::size_t promised = promises.read_bytes;
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

Tier::Memory Tier::memory(const Promises& promises) const noexcept {
  const std::size_t promised = promises.rows;
  Memory memory{.taken = bytes_beside_rows() + promises.bytes + index_growth(promises) +
                         read_bytes_beyond_spare(promises)};
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const Arena& arena = table_.arenas_.of(i);
    const Arena::Use use = arena.use();
    const std::size_t lacking = promised - std::min(promised, use.num_free);
    memory.taken += use.num_bytes + use.num_rows * Uses::kBytesPerRow + kPageBytes;  // rounded up
    if (lacking > 0) memory.lacking += arena.growth(lacking) + lacking * Uses::kBytesPerRow;
  }
  return memory;
}

// Whether what is there and what was promised is within the budget, and leaves something for what
// grows beside rows as they leave: more of it, if rows get more memory.
bool Tier::fits(const Memory& memory) const noexcept {
  const std::size_t budget = memory_bytes_;
  return memory.taken + memory.lacking <= budget - budget / (memory.lacking > 0 ? 32 : 128);
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
    return {.rows = promised_.rows - need.rows,
            .bytes = promised_.bytes - need.bytes,
            .read_bytes = promised_.read_bytes - need.read_bytes};
  };
  const auto is_none = [](const Need& n) { return n.rows + n.bytes + n.read_bytes == 0; };
  for (;;) {
    std::vector<Room> rooms;
    rooms.reserve(needs.size());
    for (const Need& one : needs) rooms.emplace_back(*this, one);
    if (is_kept_for(need) && promised_.read_bytes <= spare_bytes()) {
      for (Room& room : rooms) room.grant();
      return rooms;
    }
    const bool was_alone = is_none(promised_others());  // else others may have ended since
    const bool may_wait = wait == Wait::kYes && std::chrono::steady_clock::now() <= deadline;
    const auto forgets = [&] { return wait == Wait::kYes && table_.forget_all_removed(); };
    try {
      while (find_room()) {
        if (grant(rooms)) return rooms;
      }
    } catch (const Error&) {
      if ((!is_kept_for(need) || !may_wait) && !forgets()) throw;
    }
    const Need others = promised_others();
    if ((!may_wait || (was_alone && is_none(others))) && !forgets()) fail(need, others);
    rooms.clear();
    std::this_thread::sleep_for(kLookAgain);
  }
}

// Keeps the promise of rooms for which there was room. False, and nothing is kept, if something
// else has taken it since.
bool Tier::grant(std::span<Room> rooms) noexcept {
  for (Room& room : rooms) room.grant();
  const Memory found = memory(granted_);
  if (found.taken + found.lacking <= memory_bytes_) return true;
  for (Room& room : rooms) room.revoke();
  return false;
}

// Moves rows to SSD until what was promised fits. Returns whether it does.
bool Tier::find_room() {
  // Each round without a row moved halves the rows that a bucket must have.
  constexpr std::size_t kVainRounds = 16, kRounds = 64;
  constexpr std::size_t kVainSteps = 64;  // before it looks again, for others may make room too
  std::size_t num_vain = 0;
  marks_bytes_ = table_.marks_.bytes();
  for (std::size_t num_steps = 0;;) {
    const Memory found = memory(promised_);
    begin_shrink(found);  // also if all rows have gone, and left their memory
    if (fits(found)) return true;
    if (num_vain >= kVainRounds * kNumBuckets || num_steps >= kRounds * kNumBuckets) return false;
    bool has_moved = false;
    for (std::size_t i = 0; i < kVainSteps && !has_moved; ++i, ++num_steps) {
      has_moved = step();
      num_vain = has_moved ? 0 : num_vain + 1;
      if (num_vain > 0 && num_vain % kNumBuckets == 0) ++halvings_;
    }
  }
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
  if (fits(memory(promised_))) return true;
  try {
    make_room(Need{}, Wait::kNo);
    return true;
  } catch (const Error&) {  // of the budget, or a device, which whoever needs room is told
    return false;
  }
}

void Tier::set_memory(std::size_t num_bytes) {
  const std::size_t before = memory_bytes_.exchange(num_bytes);
  if (num_bytes > before) limit_bytes_ = num_bytes;
  try {
    do {  // what other calls moved until the limit was there may exceed it
      make_room(Need{}, Wait::kNo);
      limit_bytes_ = num_bytes;
    } while (memory(granted_).taken > num_bytes);
  } catch (...) {
    memory_bytes_ = limit_bytes_ = before;
    throw;
  }
}

// Whether what was promised last, for what finds rows on SSD, is within the limit, or that is
// exceeded without it, and rows have to leave. What is asked for, and may be refused, takes nothing
// yet.
bool Tier::may_grow(std::size_t num_bytes) const noexcept {
  const std::size_t taken = memory(granted_).taken, limit = limit_bytes_;
  return taken <= limit || taken - num_bytes > limit;
}

// The indexes grow as rows go to SSD, and one row class may need what another has: then rows have
// too much memory. Those with the highest numbers leave it as the hand goes by: of the class that
// has most to give, and of others if that is not enough.
void Tier::begin_shrink(const Memory& found) {
  const std::size_t goal = memory_bytes_ - memory_bytes_ / 32;
  const bool takes_too_much = found.taken > memory_bytes_ - memory_bytes_ / 64;
  const std::size_t wanted = takes_too_much ? found.taken : found.taken + found.lacking;
  if (!takes_too_much && (found.lacking == 0 || wanted <= goal)) return;
  struct Class {
    std::size_t num_bytes;  // that it can give most easily
    int number;
    Arena::Use use;
    std::size_t num_leaving_max, num_at_once;
  };
  const std::size_t promised = promised_.rows;
  // Row 0, as many as were promised, and those that are claimed.
  const std::size_t num_staying = promised + num_claimed_ + 1;
  // What finds rows on SSD needs room first: so many go there at once.
  const std::size_t granted = memory(granted_).taken, limit = limit_bytes_;
  const std::size_t num_out = granted > limit ? std::numeric_limits<std::uint32_t>::max()
                                              : (limit - granted) / (2 * kColdBytes) + 1;
  std::vector<Class> order;
  std::size_t num_bytes_max = 0;
  for (int i = 0; i < table_.arenas_.num_classes(); ++i) {
    const Arena& arena = table_.arenas_.of(i);
    const Arena::Use use = arena.use();
    const std::size_t num_free = use.num_free - std::min(use.num_free, promised);
    // One that lacks rows gives none to others.
    if (!takes_too_much && num_free == 0 && !arena.is_shrinking()) continue;
    const std::size_t num_leaving_max = use.num_rows - std::min(use.num_rows, num_staying);
    num_bytes_max += num_leaving_max * arena.row_bytes();
    order.push_back({(takes_too_much ? use.num_rows : num_free) * arena.row_bytes(), i, use,
                     num_leaving_max, num_free + num_out});
  }
  std::ranges::sort(order, std::ranges::greater(), &Class::num_bytes);
  std::size_t excess = wanted - goal;
  // Rows that would all leave, and in vain: more memory is needed, and there may be some elsewhere.
  if (num_bytes_max < excess) return;
  for (const auto& [num_bytes, row_class, use, num_leaving_max, num_at_once] : order) {
    const Arena& arena = table_.arenas_.of(row_class);
    std::size_t num_leaving = use.num_rows - use.num_kept;
    if (!arena.is_shrinking()) {
      // Of free rows as many as can be spared at once: it takes the hand a round.
      const std::size_t spared =
          takes_too_much ? 0 : std::min<std::size_t>(num_bytes, memory_bytes_ / 64);
      num_leaving = std::min(
          {std::max(excess, spared) / arena.row_bytes() + 1, num_leaving_max, num_at_once});
      if (num_leaving > 0) table_.arenas_.shrink(row_class, use.num_rows - num_leaving);
    }
    // What little is missing then is not worth a few rows of one class after the other.
    const std::size_t leaving_bytes = num_leaving * arena.row_bytes();
    if (leaving_bytes + memory_bytes_ / 128 >= excess) return;
    excess -= leaving_bytes;
  }
}

}  // namespace trireme
