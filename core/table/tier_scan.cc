// Tier: reads rows on SSD where they are, within the memory that is kept for reads.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "base/hash.h"
#include "table/table.h"
#include "table/tier.h"

namespace trireme {

void Tier::read(std::span<const std::uint64_t> keys, const VisitRow& visit) {
  std::vector<std::size_t> left(keys.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  Room room;
  for (ssd::PagesRead read; !left.empty();) {
    std::vector<ssd::Position> wanted;
    std::size_t num_left = 0;
    for (const std::size_t i : left) {
      if (wanted.size() >= log_.read_pages()) {
        left[num_left++] = i;
        continue;
      }
      std::shared_lock lock(mutex_of_stripe(stripe_of_hash(mix64(keys[i]))));
      if (const std::byte* row = row_in_memory(keys[i]); row != nullptr) {
        visit(i, row, class_of(row));
        continue;
      }
      Place place;
      const std::size_t num_wanted = wanted.size();
      switch (cold_.find(keys[i], {&read, 1}, place, wanted)) {
        case ssd::ColdRows::Found::kHere:
          visit(i, place.row, place.row_class);
          break;
        case ssd::ColdRows::Found::kAbsent:
          visit(i, nullptr, 0);
          break;
        case ssd::ColdRows::Found::kUnread:  // all its pages, for this read is given up
          wanted.resize(num_wanted);
          cold_.find(keys[i], {}, place, wanted);
          left[num_left++] = i;
      }
    }
    left.resize(num_left);
    if (left.empty()) return;
    ssd::sort_distinct(wanted);
    read = ssd::PagesRead();
    room = Room();
    room = make_room({.read_bytes = log_.read_bytes(wanted.size())});
    read = log_.read(std::move(wanted));
  }
}

// What a scan has copied of a bucket. A page never changes, and rows that left one do not come
// back: so a copy is good as long as the page is where it was, and has the row.
class Tier::Scanner {
 public:
  Scanner(Tier& tier, std::uint32_t bucket, const Scan& scan)
      : tier_(tier), bucket_(bucket), scan_(scan) {}

  // Copies the rows of pages that were read. Returns others that are to be read. Requires: the
  // stripe's lock.
  std::vector<ssd::Position> copy(const ssd::PagesRead& read) {
    std::vector<ssd::Position> wanted;
    tier_.cold_.for_pages(
        bucket_, {&read, 1}, wanted,
        [&](ssd::Position position, std::uint32_t version) {
          return scan_.keep(version) && !pages_.contains(position);
        },
        [&](ssd::Position position, const std::byte* page) { copy(position, page); });
    if (wanted.empty()) wanted = forget_replaced();
    return wanted;
  }

  // Requires: under the same lock copy() returned nothing.
  void end() const {
    std::vector<char> is_there(slots_.size());
    for (const auto& [position, page] : pages_) {
      for (std::size_t i = page.begin; i < page.end; ++i) {
        is_there[i] = tier_.cold_.is_left(bucket_, page.number, position, slots_[i]) ? 1 : 0;
      }
    }
    scan_.end(is_there);
  }

 private:
  struct Page {
    std::uint64_t generation;
    ssd::PageNumber number;
    std::size_t begin, end;  // of its copies
  };

  void copy(ssd::Position position, const std::byte* bytes) {
    const ssd::PageHeader header = ssd::header_of(bytes);
    const std::size_t begin = slots_.size();
    tier_.cold_.for_rows_of_page(header, bytes, [&](const Place& place) {
      if (scan_.copy(place)) slots_.push_back(place.slot);
    });
    pages_[position] = {.generation = tier_.log_.generation(position),
                        .number = header.number,
                        .begin = begin,
                        .end = slots_.size()};
  }

  // Forgets pages whose segments are gone. Returns the positions of those that others lie at now.
  std::vector<ssd::Position> forget_replaced() {
    std::erase_if(pages_, [&](const auto& page) {
      return tier_.log_.generation(page.first) != page.second.generation;
    });
    std::vector<ssd::Position> wanted;
    tier_.cold_.for_pages(
        bucket_, {}, wanted,
        [&](ssd::Position position, std::uint32_t version) {
          return scan_.keep(version) && !pages_.contains(position);
        },
        [](ssd::Position, const std::byte*) {});
    return wanted;
  }

  Tier& tier_;
  const std::uint32_t bucket_;
  const Scan& scan_;
  std::unordered_map<ssd::Position, Page> pages_;
  std::vector<std::uint16_t> slots_;  // of the copies
};

void Tier::scan_bucket(std::uint32_t bucket, const Scan& scan) {
  Scanner scanner(*this, bucket, scan);
  Room room;
  for (ssd::PagesRead read;;) {
    std::vector<ssd::Position> wanted;
    {
      std::shared_lock lock(mutex_of_stripe(bucket / kBucketsPerStripe));
      wanted = scanner.copy(read);
      if (wanted.empty()) return scanner.end();
    }
    ssd::sort_distinct(wanted);
    wanted.resize(std::min(wanted.size(), log_.read_pages()));
    read = ssd::PagesRead();
    room = Room();
    room = make_room({.read_bytes = log_.read_bytes(wanted.size())});
    read = log_.read(std::move(wanted));
  }
}

}  // namespace trireme
