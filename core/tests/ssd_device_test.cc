// Devices under cold rows: what was written is read, by one queue and by several at once; bad
// transfers are refused; and the fake one keeps what was synced, and loses the rest as disks do.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "fake_device.h"
#include "store/ssd/device.h"

using namespace trireme;
using namespace trireme::ssd;
using namespace std::chrono_literals;

namespace {

std::atomic<int> num_put_off{0};  // calls of pread to come that get EAGAIN

}  // namespace

// In the place of the C library's.
extern "C" ssize_t pread(int file, void* bytes, std::size_t size, off_t offset) {
  if (num_put_off > 0) {
    --num_put_off;
    errno = EAGAIN;
    return -1;
  }
  return ::pread64(file, bytes, size, offset);
}

namespace {

constexpr std::size_t kNumBlocks = 64;

// Memory that starts at a block's boundary.
class Buffer {
 public:
  explicit Buffer(std::size_t num_blocks)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, num_blocks * kBlockBytes))),
        size_(num_blocks * kBlockBytes) {
    std::memset(data_, 0, size_);
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::span<std::byte> blocks(std::size_t first, std::size_t n) const {
    return {data_ + first * kBlockBytes, n * kBlockBytes};
  }

 private:
  std::byte* data_;
  std::size_t size_;
};

// Fills whole blocks with a number that tells who wrote them, and when.
void fill(std::span<std::byte> bytes, std::uint64_t number) {
  for (std::size_t i = 0; i < bytes.size(); i += sizeof number) {
    std::memcpy(bytes.data() + i, &number, sizeof number);
  }
}

std::uint64_t number_at(std::span<const std::byte> bytes, std::size_t offset) {
  std::uint64_t number;
  std::memcpy(&number, bytes.data() + offset, sizeof number);
  return number;
}

void check_filled(std::span<const std::byte> bytes, std::uint64_t number) {
  for (std::size_t i = 0; i < bytes.size(); i += sizeof number) {
    CHECK_EQUAL(number_at(bytes, i), number);
  }
}

std::optional<ErrorCode> code_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.code();
  }
  return std::nullopt;
}

Transfer transfer(Transfer::Kind kind, FileId file, std::uint64_t block, std::span<std::byte> bytes,
                  std::uint64_t tag = 0) {
  return {.kind = kind, .file = file, .offset = block * kBlockBytes, .bytes = bytes, .tag = tag};
}

// One transfer from beginning to end; returns its error.
int carry_out(Queue& queue, const Transfer& one) {
  Finished finished{};
  CHECK_EQUAL(queue.submit({&one, 1}), std::size_t{1});
  CHECK_EQUAL(queue.reap({&finished, 1}, 1, 60s), std::size_t{1});
  CHECK_EQUAL(finished.tag, one.tag);
  return finished.error;
}

// Random writes and reads of distinct blocks, up to the depth in flight, against a vector.
void run_model(Device& device, const std::string& name, std::uint64_t seed) {
  test::Random random(seed);
  const FileId file = device.create(name, kNumBlocks * kBlockBytes);
  CHECK_EQUAL(device.size(file), std::uint64_t{kNumBlocks * kBlockBytes});
  const auto queue = device.make_queue(1 + random.below(16));
  const Buffer memory(kNumBlocks);
  std::vector<std::uint64_t> model(kNumBlocks);
  std::vector<bool> is_busy(kNumBlocks), is_read(kNumBlocks);
  for (std::size_t block = 0; block < kNumBlocks; ++block) {
    fill(memory.blocks(block, 1), 0);
    const Transfer write = transfer(Transfer::Kind::kWrite, file, block, memory.blocks(block, 1));
    CHECK_EQUAL(carry_out(*queue, write), 0);
  }
  std::vector<Finished> finished(kNumBlocks);
  for (std::uint64_t step = 1; step <= 600; ++step) {
    const std::size_t block = random.below(kNumBlocks);
    const std::size_t n = std::min<std::size_t>(1 + random.below(4), kNumBlocks - block);
    bool is_free = true;
    for (std::size_t i = block; i < block + n; ++i) is_free = is_free && !is_busy[i];
    if (is_free) {
      const bool reads = random.below(2) == 0;
      const auto kind = reads ? Transfer::Kind::kRead : Transfer::Kind::kWrite;
      fill(memory.blocks(block, n), step);
      const Transfer one = transfer(kind, file, block, memory.blocks(block, n), block << 8 | n);
      const std::size_t num_before = queue->num_in_flight();
      const std::size_t num_begun = queue->submit({&one, 1});
      CHECK_EQUAL(num_begun, std::size_t{num_before < queue->depth()});
      for (std::size_t i = block; i < block + n && num_begun > 0; ++i) {
        is_busy[i] = true;
        is_read[i] = reads;
        if (!reads) model[i] = step;
      }
    }
    const std::size_t num_min = random.below(queue->num_in_flight() + 1);
    const std::size_t num_ended = queue->reap(finished, num_min, 60s);
    CHECK(num_ended >= num_min);
    for (const Finished& one : std::span(finished).first(num_ended)) {
      CHECK_EQUAL(one.error, 0);
      for (std::size_t i = one.tag >> 8; i < (one.tag >> 8) + (one.tag & 0xFF); ++i) {
        if (is_read[i]) check_filled(memory.blocks(i, 1), model[i]);
        is_busy[i] = false;
      }
    }
  }
  std::vector<Finished> rest(queue->num_in_flight());
  CHECK_EQUAL(queue->reap(rest, rest.size(), 60s), rest.size());
  device.sync(file);
  device.close(file);
  const FileId again = device.open(name);
  for (std::size_t block = 0; block < kNumBlocks; ++block) {
    const Transfer read = transfer(Transfer::Kind::kRead, again, block, memory.blocks(block, 1));
    CHECK_EQUAL(carry_out(*queue, read), 0);
    check_filled(memory.blocks(block, 1), model[block]);
  }
  device.close(again);
}

void test_names_and_sizes(Device& device) {
  const FileId file = device.create("a", 2 * kBlockBytes);
  CHECK(code_of([&] { device.create("a", kBlockBytes); }) == ErrorCode::kUnavailable);
  CHECK(code_of([&] { device.open("b"); }) == ErrorCode::kUnavailable);
  const auto queue = device.make_queue(2);
  const Buffer memory(4);
  fill(memory.blocks(0, 2), 7);
  CHECK_EQUAL(carry_out(*queue, transfer(Transfer::Kind::kWrite, file, 0, memory.blocks(0, 2))), 0);
  device.link("a", "b");
  device.remove("a");
  device.sync_names();
  CHECK(device.names() == std::vector<std::string>{"b"});
  const FileId linked = device.open("b");
  const Transfer read = transfer(Transfer::Kind::kRead, linked, 0, memory.blocks(2, 2));
  CHECK_EQUAL(carry_out(*queue, read), 0);
  check_filled(memory.blocks(2, 2), 7);
  // Beyond the end, and across it.
  for (const std::uint64_t block : {1, 2}) {
    const Transfer beyond = transfer(Transfer::Kind::kRead, linked, block, memory.blocks(2, 2));
    CHECK_EQUAL(carry_out(*queue, beyond), ENODATA);
  }
  device.close(linked);
  device.close(file);
  device.remove("b");
}

void test_bad_transfers_are_refused(Device& device) {
  const FileId file = device.create("bad", kBlockBytes);
  const auto queue = device.make_queue(4);
  const Buffer memory(2);
  const auto block = memory.blocks(0, 1);
  const Transfer good = transfer(Transfer::Kind::kRead, file, 0, block);
  Transfer shifted = good, odd = good, short_one = good, empty = good;
  shifted.bytes = memory.blocks(0, 2).subspan(512, kBlockBytes);
  odd.offset = 512;
  short_one.bytes = block.first(512);
  empty.bytes = block.first(0);
  for (const Transfer& bad : {shifted, odd, short_one, empty}) {
    const Transfer both[] = {good, bad};
    CHECK(code_of([&] { queue->submit(both); }) == ErrorCode::kBadRequest);
    CHECK_EQUAL(queue->num_in_flight(), std::size_t{0});
  }
  device.close(file);
  device.remove("bad");
}

// Several threads, each with its own queue and file.
void test_queues_at_once(Device& device, std::uint64_t seed) {
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] { run_model(device, "queue_" + std::to_string(i), seed + i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint64_t i = 0; i < 4; ++i) device.remove("queue_" + std::to_string(i));
}

// A queue that ends with transfers in flight waits for them.
void test_a_queue_ends_with_transfers_in_flight(Device& device) {
  const FileId file = device.create("ends", kNumBlocks * kBlockBytes);
  const Buffer memory(kNumBlocks);
  fill(memory.blocks(0, kNumBlocks), 5);
  {
    const auto queue = device.make_queue(kNumBlocks);
    for (std::size_t block = 0; block < kNumBlocks; ++block) {
      const Transfer one = transfer(Transfer::Kind::kWrite, file, block, memory.blocks(block, 1));
      CHECK_EQUAL(queue->submit({&one, 1}), std::size_t{1});
    }
  }
  fill(memory.blocks(0, kNumBlocks), 6);
  const auto queue = device.make_queue(1);
  const Transfer read = transfer(Transfer::Kind::kRead, file, 0, memory.blocks(0, kNumBlocks));
  CHECK_EQUAL(carry_out(*queue, read), 0);
  check_filled(memory.blocks(0, kNumBlocks), 5);
  device.close(file);
  device.remove("ends");
}

void test_device(Device& device, std::uint64_t seed) {
  for (std::uint64_t i = 0; i < 5; ++i) {
    run_model(device, "model", seed + i);
    device.remove("model");
  }
  test_names_and_sizes(device);
  test_bad_transfers_are_refused(device);
  test_a_queue_ends_with_transfers_in_flight(device);
  test_queues_at_once(device, seed);
  CHECK(device.names().empty());
}

// The system may put a transfer off, but not for ever.
void test_transfers_that_are_put_off(Device& device) {
  const FileId file = device.create("later", kBlockBytes);
  const Buffer memory(1);
  const auto queue = device.make_queue(1);
  fill(memory.blocks(0, 1), 9);
  CHECK_EQUAL(carry_out(*queue, transfer(Transfer::Kind::kWrite, file, 0, memory.blocks(0, 1))), 0);
  const Transfer read = transfer(Transfer::Kind::kRead, file, 0, memory.blocks(0, 1));
  fill(memory.blocks(0, 1), 0);
  num_put_off = 5;
  CHECK_EQUAL(carry_out(*queue, read), 0);
  CHECK_EQUAL(num_put_off, 0);
  check_filled(memory.blocks(0, 1), 9);
  num_put_off = 1 << 20;
  CHECK_EQUAL(carry_out(*queue, read), EBUSY);
  num_put_off = 0;
  device.close(file);
  device.remove("later");
}

// A file has one that writes to it, as long as it has it open.
void test_a_file_that_is_written_elsewhere_cannot_be_claimed(const std::string& folder) {
  const auto writer = pool_device(folder, 1), other = pool_device(folder, 1);
  const FileId made = writer->create("claimed", 2 * kBlockBytes);
  const FileId opened = other->open("claimed");
  CHECK(!other->claim(opened, 2 * kBlockBytes));
  writer->close(made);
  CHECK(other->claim(opened, 3 * kBlockBytes));
  CHECK_EQUAL(other->size(opened), std::uint64_t{3 * kBlockBytes});
  const FileId again = writer->open("claimed");
  CHECK(!writer->claim(again, 3 * kBlockBytes));
  other->close(opened);
  CHECK(writer->claim(again, kBlockBytes));
  CHECK_EQUAL(writer->size(again), std::uint64_t{3 * kBlockBytes});
  writer->close(again);
  writer->remove("claimed");
}

// ---- the fake one ----

void write_block(Queue& queue, const Buffer& memory, FileId file, std::uint64_t block,
                 std::uint64_t number) {
  fill(memory.blocks(0, 1), number);
  CHECK_EQUAL(carry_out(queue, transfer(Transfer::Kind::kWrite, file, block, memory.blocks(0, 1))),
              0);
}

// Of each block that was written after the last sync any sectors from its beginning may be new.
void test_a_crash_keeps_what_was_synced(std::uint64_t seed) {
  std::map<std::size_t, int> by_num_new;  // how many sectors
  for (std::uint64_t round = 0; round < 40; ++round) {
    FakeDevice device(seed + round);
    const Buffer memory(1);
    const FileId file = device.create("a", kNumBlocks * kBlockBytes);
    device.sync_names();
    {
      const auto queue = device.make_queue(1);
      for (std::uint64_t b = 0; b < kNumBlocks; ++b) write_block(*queue, memory, file, b, 1);
      device.sync(file);
      for (std::uint64_t b = 0; b < kNumBlocks; b += 2) {
        write_block(*queue, memory, file, b, 2);
        write_block(*queue, memory, file, b, 3);
      }
    }
    device.crash();
    const FileId again = device.open("a");
    const auto queue = device.make_queue(1);
    for (std::uint64_t b = 0; b < kNumBlocks; ++b) {
      const Transfer read = transfer(Transfer::Kind::kRead, again, b, memory.blocks(0, 1));
      CHECK_EQUAL(carry_out(*queue, read), 0);
      if (b % 2 == 1) {
        check_filled(memory.blocks(0, 1), 1);
        continue;
      }
      std::size_t num_new = 0;
      while (num_new < 8 && number_at(memory.blocks(0, 1), 512 * num_new) == 3) ++num_new;
      check_filled(memory.blocks(0, 1).first(512 * num_new), 3);
      check_filled(memory.blocks(0, 1).subspan(512 * num_new), 1);
      ++by_num_new[num_new];
    }
  }
  CHECK_EQUAL(by_num_new.size(), std::size_t{9});  // old, new, and torn at each sector
}

void test_names_that_were_not_synced_may_vanish(std::uint64_t seed) {
  int num_new = 0, num_removed = 0;
  for (std::uint64_t round = 0; round < 64; ++round) {
    FakeDevice device(seed + round);
    for (const char* name : {"synced", "removed"}) device.create(name, kBlockBytes);
    device.sync_names();
    device.create("new", kBlockBytes);
    device.remove("removed");
    device.crash();
    const std::vector<std::string> names = device.names();
    CHECK(std::ranges::count(names, "synced") == 1);
    num_new += static_cast<int>(std::ranges::count(names, "new"));
    num_removed += static_cast<int>(std::ranges::count(names, "removed"));
  }
  CHECK(0 < num_new && num_new < 64);
  CHECK(0 < num_removed && num_removed < 64);
}

// As Linux reports it: once; a sync that succeeds afterwards does not bring back what was lost.
void test_a_failed_sync_loses_what_was_written(std::uint64_t seed) {
  int num_lost = 0;
  for (std::uint64_t round = 0; round < 64; ++round) {
    FakeDevice device(seed + round);
    const Buffer memory(1);
    const FileId file = device.create("a", 2 * kBlockBytes);
    device.sync_names();
    {
      const auto queue = device.make_queue(1);
      write_block(*queue, memory, file, 0, 1);
      device.sync(file);
      write_block(*queue, memory, file, 0, 2);
      device.set_faults({.sync_error = 1});
      CHECK(code_of([&] { device.sync(file); }) == ErrorCode::kUnavailable);
      device.set_faults({});
      write_block(*queue, memory, file, 1, 3);
      device.sync(file);
    }
    device.crash();
    const FileId again = device.open("a");
    const auto queue = device.make_queue(1);
    for (const std::uint64_t block : {0, 1}) {
      const Transfer read = transfer(Transfer::Kind::kRead, again, block, memory.blocks(0, 1));
      CHECK_EQUAL(carry_out(*queue, read), 0);
      if (block == 1) check_filled(memory.blocks(0, 1), 3);
      if (block == 0) num_lost += number_at(memory.blocks(0, 1), kBlockBytes - 8) == 1 ? 1 : 0;
    }
  }
  CHECK(0 < num_lost && num_lost < 64);
}

void test_faults_of_transfers(std::uint64_t seed) {
  FakeDevice device(seed);
  device.set_faults({.capacity_bytes = 3 * kBlockBytes});
  const FileId file = device.create("a", 2 * kBlockBytes);
  CHECK(code_of([&] { device.create("b", 2 * kBlockBytes); }) == ErrorCode::kResourceExhausted);
  CHECK(device.names() == std::vector<std::string>{"a"});
  const Buffer memory(2);
  const auto queue = device.make_queue(2);
  const Transfer write = transfer(Transfer::Kind::kWrite, file, 0, memory.blocks(0, 2), 3);
  device.set_faults({.write_error = 1});
  CHECK_EQUAL(carry_out(*queue, write), EIO);
  device.set_faults({.read_error = 1});
  CHECK_EQUAL(carry_out(*queue, write), 0);
  const Transfer read = transfer(Transfer::Kind::kRead, file, 0, memory.blocks(0, 2), 4);
  CHECK_EQUAL(carry_out(*queue, read), EIO);

  device.set_faults({.stuck = 1});
  CHECK_EQUAL(queue->submit({&read, 1}), std::size_t{1});
  Finished finished{};
  CHECK(code_of([&] { queue->reap({&finished, 1}, 1, 1ms); }) == ErrorCode::kDeadlineExceeded);
  CHECK_EQUAL(queue->num_in_flight(), std::size_t{1});
  device.set_faults({});
  CHECK_EQUAL(queue->reap({&finished, 1}, 1, 1ms), std::size_t{1});
  CHECK_EQUAL(finished.tag, std::uint64_t{4});

  device.flip_bit("a", 8 * kBlockBytes + 3);
  CHECK_EQUAL(carry_out(*queue, read), 0);
  CHECK_EQUAL(number_at(memory.blocks(0, 2), 0), std::uint64_t{0});
  CHECK_EQUAL(number_at(memory.blocks(0, 2), kBlockBytes), std::uint64_t{8});
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_of(argc, argv);
  // Beside the program, for a folder for temporary files may be in memory.
  std::string folder = std::filesystem::path(argv[0]).parent_path() / "ssd_device_XXXXXX";
  CHECK(::mkdtemp(folder.data()) != nullptr);
  test_device(*pool_device(folder, 4), seed);
  test_transfers_that_are_put_off(*pool_device(folder, 4));
  try {
    test_device(*uring_device(folder), seed);
  } catch (const Error& error) {
    std::cout << "without io_uring: " << error.what() << std::endl;
    CHECK(error.code() == ErrorCode::kUnavailable);
  }
  test_a_file_that_is_written_elsewhere_cannot_be_claimed(folder);
  std::filesystem::remove_all(folder);

  FakeDevice fake(seed);
  test_device(fake, seed);
  fake.set_faults({.late = 0.5});
  test_device(fake, seed);
  test_a_crash_keeps_what_was_synced(seed);
  test_names_that_were_not_synced_may_vanish(seed);
  test_a_failed_sync_loses_what_was_written(seed);
  test_faults_of_transfers(seed);
  return 0;
}
