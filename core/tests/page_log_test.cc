// A log of pages that goes on with the segments of one that was killed: random operations against a
// map, with kills between and after snapshots, on devices that lose what was not synced.
#include "store/ssd/page_log.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "fake_device.h"

using namespace trireme;
using ssd::FakeDevice;
using ssd::PageLog;
using ssd::Position;

namespace {

using Devices = std::vector<std::shared_ptr<FakeDevice>>;
using Pages = std::map<Position, std::uint64_t>;  // what is written on each, which has one row

constexpr std::size_t kSegmentPages = 8;
constexpr std::size_t kSegmentBytes = kSegmentPages * ssd::kBlockBytes;
const std::string kKept = ".kept";

std::unique_ptr<PageLog> log_on(const Devices& devices) {
  return std::make_unique<PageLog>(
      std::vector<std::shared_ptr<ssd::Device>>(devices.begin(), devices.end()),
      ssd::PageLogConfig{.segment_pages = kSegmentPages,
                         .buffer_pages = 3,
                         .num_buffers = 4,
                         .timeout = std::chrono::milliseconds(50)});
}

std::vector<std::byte> page_of(std::uint64_t value) {
  std::vector<std::byte> page(ssd::kBlockBytes);
  std::memcpy(page.data() + ssd::kPageHeaderBytes, &value, sizeof(value));
  ssd::PageHeader header{};
  header.num_rows = 1;
  header.row_bytes = 8;
  ssd::seal(page, header);
  return page;
}

// A log, and what its pages should be. A snapshot has links to its segments.
struct Logged {
  explicit Logged(std::size_t num_devices) {
    for (std::size_t i = 0; i < num_devices; ++i) {
      devices.push_back(std::make_shared<FakeDevice>(i + 1));
    }
    log = log_on(devices);
  }

  // Returns false: the devices are full, and nothing was appended.
  bool append(std::size_t num_pages) {
    std::optional<PageLog::Room> room;
    try {
      room.emplace(log->reserve(num_pages));
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kResourceExhausted);
      return false;
    }
    for (std::size_t i = 0; i < num_pages; ++i) {
      const std::uint64_t value = ++num_appended;
      const Position position = log->append(*room, page_of(value));
      CHECK(pages.emplace(position, value).second);
    }
    return true;
  }

  void forget(Position position) {
    pages.erase(position);
    log->forget(position, 1);
  }

  void snapshot() {
    const PageLog::Hold hold(*log);
    log->flush();
    std::vector<PageLog::SegmentFile> now = log->segments();
    for (const auto& old : kept) devices[old.device]->remove(old.name + kKept);
    for (const auto& segment : now) {
      devices[segment.device]->link(segment.name, segment.name + kKept);
    }
    for (const auto& device : devices) device->sync_names();
    kept = std::move(now);
    kept_pages = pages;
  }

  // The process ends without a word, or the machine does; a new log goes on with the snapshot.
  void kill(bool crashes) {
    log.reset();
    for (const auto& device : devices) {
      if (crashes) device->crash();
    }
    log = log_on(devices);
    for (const auto& segment : kept) {
      devices[segment.device]->link(segment.name + kKept, segment.name);
      log->adopt(segment);
    }
    pages = kept_pages;
    for (const auto& segment : kept) {  // what was appended later is none of the snapshot's
      const Position first = segment.number * kSegmentPages;
      CHECK(segment.num_pages == kSegmentPages ||
            !log->has(first + static_cast<Position>(segment.num_pages)));
    }
    const PageLog::Hold hold(*log);
    for (const auto& [position, value] : pages) {
      CHECK(log->has(position));
      log->remember(position, 1);
    }
  }

  void check() const {
    std::vector<Position> positions;
    for (const auto& [position, value] : pages) positions.push_back(position);
    const ssd::PagesRead read = log->read(positions);
    for (const auto& [position, value] : pages) {
      const ssd::PagesRead::Page* page = read.find(position);
      CHECK(page != nullptr && page->error == 0 && page->bytes != nullptr);
      CHECK_EQUAL(std::memcmp(page->bytes, page_of(value).data(), ssd::kBlockBytes), 0);
    }
    CHECK_EQUAL(log->use().num_rows, pages.size());
  }

  Devices devices;
  std::unique_ptr<PageLog> log;
  Pages pages, kept_pages;
  std::vector<PageLog::SegmentFile> kept;
  std::uint64_t num_appended = 0;
};

// Returns how often the devices were full.
std::size_t test_random_kills_between_snapshots(std::uint64_t seed) {
  test::Random random(seed);
  Logged logged(1 + random.below(3));
  std::size_t num_full = 0, num_kills = 0;
  for (int i = 0; i < 400; ++i) {
    for (const auto& device : logged.devices) {
      device->set_faults({.late = 0.3, .capacity_bytes = (2 + random.below(3)) * kSegmentBytes});
    }
    const std::uint64_t choice = random.below(20);
    if (choice == 0) {
      logged.snapshot();
    } else if (choice <= 2) {
      logged.kill(random.below(2) == 0);
      if (random.below(4) == 0) logged.kill(true);  // before it has appended anything
      ++num_kills;
    } else if (choice <= 4) {
      logged.log->flush();
    } else if (choice <= 16) {
      num_full += logged.append(1 + random.below(6)) ? 0U : 1U;
    } else if (!logged.pages.empty()) {
      for (std::uint64_t n = random.below(logged.pages.size()); n > 0; --n) {
        logged.forget(std::next(logged.pages.begin(),
                                static_cast<std::ptrdiff_t>(random.below(logged.pages.size())))
                          ->first);
      }
    }
    logged.check();
  }
  CHECK(num_kills > 10);
  return num_full;
}

// Two starts from one snapshot, and one from the next: each writes where the one before it did.
void test_a_start_on_a_full_device_appends_behind_the_pages_of_the_snapshot() {
  Logged logged(1);
  logged.devices[0]->set_faults({.capacity_bytes = kSegmentBytes});
  CHECK(logged.append(3));
  logged.snapshot();
  CHECK(logged.append(2));
  logged.log->flush();
  for (const bool crashes : {false, true}) {
    logged.kill(crashes);
    CHECK(logged.append(1) && logged.append(4));
    CHECK(!logged.append(1));
    logged.log->flush();
    logged.check();
  }
  logged.snapshot();
  CHECK_EQUAL(logged.kept[0].num_pages, kSegmentPages);
  logged.kill(true);
  logged.check();
  CHECK(!logged.append(1));
  for (Position position = 0; position < kSegmentPages; ++position) logged.forget(position);
  CHECK_EQUAL(logged.log->use().num_segments, 0U);
}

// The rest of a segment that is not gone on with is lost, but nothing waits for a buffer for it.
void test_of_several_segments_the_one_with_most_room_goes_on() {
  Logged logged(2);
  for (int i = 0; i < 4; ++i) CHECK(logged.append(4));
  logged.snapshot();
  CHECK_EQUAL(logged.kept.size(), 2U);
  for (const std::size_t with_room : {0U, 1U}) {
    for (std::size_t i = 0; i < 2; ++i) logged.kept[i].num_pages = i == with_room ? 2 : 7;
    std::erase_if(logged.kept_pages, [&](const auto& page) {
      return page.first % kSegmentPages >= logged.kept[page.first / kSegmentPages].num_pages;
    });
    logged.kill(false);
    for (int i = 0; i < 2; ++i) CHECK(logged.append(3));
    CHECK_EQUAL(logged.log->use().num_segments, 2U);
    CHECK_EQUAL(logged.pages.rbegin()->first / kSegmentPages, 1U);
    for (Position page = 2; page < kSegmentPages; ++page) {
      CHECK(logged.pages.contains(static_cast<Position>(with_room * kSegmentPages) + page));
    }
    logged.check();
    const auto full = static_cast<Position>((1 - with_room) * kSegmentPages);
    for (Position page = full; page < full + 7; ++page) {
      if (logged.pages.contains(page)) logged.forget(page);
    }
    CHECK_EQUAL(logged.log->use().num_segments, 1U);
  }
}

void test_a_log_that_has_begun_goes_on_where_it_is() {
  Logged logged(1);
  CHECK(logged.append(4) && logged.append(4) && logged.append(3));
  logged.log->flush();
  for (Position page = 0; page < kSegmentPages; ++page) logged.forget(page);
  logged.snapshot();
  CHECK_EQUAL(logged.kept.size(), 1U);
  logged.log = log_on(logged.devices);
  logged.pages.clear();
  CHECK(logged.append(5));
  logged.devices[0]->link(logged.kept[0].name + kKept, logged.kept[0].name);
  logged.log->adopt(logged.kept[0]);
  CHECK(logged.append(3));
  CHECK_EQUAL(logged.pages.rbegin()->first, kSegmentPages - 1);
  CHECK(logged.append(1));
  CHECK_EQUAL(logged.pages.rbegin()->first, 2 * kSegmentPages);
  logged.check();
}

// As a copy may be: what it lacks is taken, or else it is only read.
void test_a_file_that_is_shorter_than_its_segment_is_made_whole_if_there_is_space(bool has_space) {
  Logged logged(1);
  CHECK(logged.append(3));
  logged.snapshot();
  FakeDevice& device = *logged.devices[0];
  const ssd::FileId file = device.create("copy", 3 * ssd::kBlockBytes);
  {
    const auto queue = device.make_queue(1);
    trireme::Pages memory(ssd::kBlockBytes);
    for (const auto& [position, value] : logged.pages) {
      std::ranges::copy(page_of(value), memory.data());
      queue->submit({{{.kind = ssd::Transfer::Kind::kWrite,
                       .file = file,
                       .offset = position * ssd::kBlockBytes,
                       .bytes = {memory.data(), ssd::kBlockBytes},
                       .tag = 0}}});
      std::array<ssd::Finished, 1> finished;
      CHECK_EQUAL(queue->reap(finished, 1, std::chrono::milliseconds(50)), 1U);
    }
  }
  device.sync(file);
  const std::string name = logged.kept[0].name + kKept;
  device.remove(name);
  device.link("copy", name);
  device.remove("copy");
  logged.log.reset();
  device.set_faults({.capacity_bytes = has_space ? kSegmentBytes : 3 * ssd::kBlockBytes});
  logged.kill(false);
  logged.check();
  CHECK_EQUAL(logged.append(3), has_space);
  CHECK_EQUAL(logged.log->use().num_segments, 1U);
  logged.check();
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  test_a_start_on_a_full_device_appends_behind_the_pages_of_the_snapshot();
  test_of_several_segments_the_one_with_most_room_goes_on();
  test_a_log_that_has_begun_goes_on_where_it_is();
  for (const bool has_space : {false, true}) {
    test_a_file_that_is_shorter_than_its_segment_is_made_whole_if_there_is_space(has_space);
  }
  const std::uint64_t num_seeds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 5;
  std::size_t num_full = 0;
  for (std::uint64_t i = 0; i < num_seeds; ++i) {
    num_full += test_random_kills_between_snapshots(seed + i);
  }
  CHECK(num_full >= 2 * num_seeds);
}
