// Random reads of 4 KiB from a file of a device, 256 at a time, and nothing else: what reads of
// rows are compared with. Arguments: folder, bytes of the file, seconds, io_uring or threads.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/pages.h"
#include "store/ssd/device.h"

using namespace trireme;

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::uint64_t num_blocks = std::strtoull(argv[2], nullptr, 10) / ssd::kBlockBytes;
  const double seconds = std::atof(argv[3]);
  const auto device = std::string(argv[4]) == "io_uring" ? ssd::uring_device(argv[1])
                                                         : ssd::pool_device(argv[1], 32);
  const ssd::FileId file = device->create("bare", num_blocks * ssd::kBlockBytes);
  constexpr std::size_t kDepth = 256, kRun = 256;
  const Pages memory(kDepth * ssd::kBlockBytes + kRun * ssd::kBlockBytes);
  const auto queue = device->make_queue(kDepth);
  std::array<ssd::Finished, kDepth> finished;
  const std::chrono::milliseconds timeout(30000);
  for (std::uint64_t block = 0; block < num_blocks; block += kRun) {  // else there is nothing there
    const std::uint64_t n = std::min<std::uint64_t>(kRun, num_blocks - block);
    const ssd::Transfer transfer{.kind = ssd::Transfer::Kind::kWrite,
                                 .file = file,
                                 .offset = block * ssd::kBlockBytes,
                                 .bytes = {memory.data(), n * ssd::kBlockBytes},
                                 .tag = 0};
    queue->submit({&transfer, 1});
    queue->reap(finished, 1, timeout);
  }
  device->sync(file);
  std::mt19937_64 random(3);
  const auto begin = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<std::uint64_t> free(kDepth);
  for (std::size_t i = 0; i < kDepth; ++i) free[i] = i;
  std::uint64_t num_reads = 0;
  while (spent() < seconds) {
    std::vector<ssd::Transfer> transfers;
    for (const std::uint64_t slot : free) {
      transfers.push_back({.kind = ssd::Transfer::Kind::kRead,
                           .file = file,
                           .offset = random() % num_blocks * ssd::kBlockBytes,
                           .bytes = {memory.data() + slot * ssd::kBlockBytes, ssd::kBlockBytes},
                           .tag = slot});
    }
    queue->submit(transfers);
    free.clear();
    const std::size_t n = queue->reap(finished, 1, timeout);
    for (std::size_t i = 0; i < n; ++i) {
      if (finished[i].error != 0) return 1;
      free.push_back(finished[i].tag);
    }
    num_reads += n;
  }
  std::printf("{\"reads_per_s\": %f}\n", static_cast<double>(num_reads) / spent());
}
