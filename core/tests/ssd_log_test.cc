// A log of pages on devices that hang: callers get an error in time, others go on, and what a
// transfer needs lives until it ends.
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "fake_device.h"
#include "store/ssd/page_log.h"

using namespace trireme;
using namespace trireme::ssd;

namespace {

constexpr std::size_t kSegmentPages = 8;

// A log whose devices say at once that the time is over.
struct Log {
  explicit Log(std::size_t num_devices) {
    for (std::size_t i = 0; i < num_devices; ++i) {
      fakes.push_back(std::make_shared<FakeDevice>(i));
    }
    log.emplace(std::vector<std::shared_ptr<Device>>(fakes.begin(), fakes.end()),
                PageLogConfig{.segment_pages = kSegmentPages,
                              .buffer_pages = 4,
                              .num_buffers = 2,
                              .timeout = std::chrono::milliseconds(200)});
  }

  void append(std::size_t num_pages) {
    std::vector<std::byte> page(kBlockBytes);
    for (std::size_t i = 0; i < num_pages; ++i) {
      PageLog::Room room = log->reserve(1);
      PageHeader header{};
      header.num_rows = 1;
      header.row_bytes = 8;
      header.number = static_cast<std::uint16_t>(num_appended++);
      seal(page, header);
      log->append(room, page);
    }
  }
  void check_page(Position position) {
    const PagesRead read = log->read({position});
    CHECK_EQUAL(read.find(position)->error, 0);
    CHECK_EQUAL(header_of(read.find(position)->bytes).number, position);
  }
  // The error of reading a page in vain.
  std::string late_read(Position position) {
    try {
      log->read({position});
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kDeadlineExceeded);
      return error.what();
    }
    return "";
  }

  std::vector<std::shared_ptr<FakeDevice>> fakes;
  std::optional<PageLog> log;
  std::size_t num_appended = 0;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void test_a_read_on_a_hung_device_fails_and_others_go_on() {
  Log two(2);
  two.append(2 * kSegmentPages);  // a segment on each
  two.log->flush();
  const std::size_t num_bytes = two.log->bytes();
  two.fakes[0]->set_faults({.stuck = 1});
  CHECK(has(two.late_read(3), ".rows to answer within 200 ms"));
  CHECK(two.log->bytes() > num_bytes);  // what the device may write into
  CHECK(two.log->buffer_bytes() > num_bytes);
  two.check_page(kSegmentPages + 3);  // on the other device
  two.fakes[0]->set_faults({});
  two.check_page(3);
  CHECK_EQUAL(two.log->bytes(), num_bytes);
}

// Two reads of a thread are under way, in any order; one that is given up leaves nothing behind.
void test_reads_under_way_together() {
  Log log(1);
  log.append(kSegmentPages);
  log.log->flush();
  const std::size_t num_bytes = log.log->bytes();
  {
    PageLog::Reading first = log.log->begin_read({0, 3}), second = log.log->begin_read({1});
    const PageLog::Reading given_up = log.log->begin_read({2});
    CHECK(log.log->bytes() > num_bytes);
    CHECK_EQUAL(header_of(second.end().find(1)->bytes).number, 1);
    const PagesRead read = first.end();
    for (const Position position : {0U, 3U}) {
      CHECK_EQUAL(header_of(read.find(position)->bytes).number, position);
    }
  }
  CHECK_EQUAL(log.log->bytes(), num_bytes);
  log.fakes[0]->set_faults({.stuck = 1});
  {
    const PageLog::Reading given_up = log.log->begin_read({2});
  }
  CHECK(log.log->bytes() > num_bytes);  // what the device may write into
  log.fakes[0]->set_faults({});
  log.check_page(2);
  CHECK_EQUAL(log.log->bytes(), num_bytes);
}

void test_reads_of_a_device_that_hangs_fail_at_once_after_some() {
  Log log(1);
  log.append(kSegmentPages);
  log.log->flush();
  log.fakes[0]->set_faults({.stuck = 1});
  CHECK(has(log.late_read(0), "within 200 ms"));
  CHECK(has(log.late_read(1), "within 100 ms"));  // so all together wait for twice the timeout
  for (Position position = 2; position < 6; ++position) log.late_read(position);
  const std::size_t num_bytes = log.log->bytes();
  CHECK(has(log.late_read(6), "has not ended 6 reads"));
  CHECK_EQUAL(log.log->bytes(), num_bytes);
  log.fakes[0]->set_faults({});
  for (Position position = 0; position < kSegmentPages; ++position) log.check_page(position);
}

// What is to be cleaned is not chosen from a device that hangs.
void test_a_segment_of_a_hung_device_is_not_cleaned() {
  Log two(2);
  two.append(2 * kSegmentPages);
  two.log->flush();
  two.log->forget(0, 1);
  two.log->forget(1, 1);
  two.log->forget(kSegmentPages, 1);
  CHECK_EQUAL(two.log->emptiest()->first, 0U);
  two.fakes[0]->set_faults({.stuck = 1});
  two.late_read(3);
  CHECK_EQUAL(two.log->emptiest()->first, Position{kSegmentPages});
  two.fakes[0]->set_faults({});
  two.check_page(3);
  CHECK_EQUAL(two.log->emptiest()->first, 0U);
}

void test_writes_to_a_hung_device_fail_until_it_is_back() {
  Log log(1);
  log.fakes[0]->set_faults({.stuck = 1});
  std::optional<Error> late;
  for (int i = 0; i < 9 && !late; ++i) {
    try {
      log.append(1);
    } catch (const Error& error) {
      late = error;
    }
  }
  CHECK(late && late->code() == ErrorCode::kDeadlineExceeded);
  const std::size_t num_appended = log.num_appended;
  CHECK(num_appended > 0);
  log.check_page(0);  // from its buffer
  log.fakes[0]->set_faults({});
  log.append(kSegmentPages - num_appended);
  log.log->flush();
  for (Position position = 0; position < kSegmentPages; ++position) log.check_page(position);
}

void test_a_log_ends_while_its_device_hangs() {
  Log log(1);
  log.append(kSegmentPages);
  log.log->flush();
  log.fakes[0]->set_faults({.stuck = 1});
  log.late_read(0);
  log.append(4);  // a full buffer, which is being written
  log.log->reserve(1);
  log.log.reset();
  CHECK(log.fakes[0]->names().empty());
}

}  // namespace

int main() {
  test_reads_under_way_together();
  test_a_read_on_a_hung_device_fails_and_others_go_on();
  test_reads_of_a_device_that_hangs_fail_at_once_after_some();
  test_a_segment_of_a_hung_device_is_not_cleaned();
  test_writes_to_a_hung_device_fail_until_it_is_back();
  test_a_log_ends_while_its_device_hangs();
}
