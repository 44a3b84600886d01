// What memory alone costs a pass on a device, in ns per row, without any of Trireme's code:
//
//   copy          rows in order to rows in order, as memcpy does
//   in_order      rows in order, one after the other, without their keys
//   gather        rows in random order, each fetched 16 ahead
//   probe_gather  the same, after a search of each row's key in an open table
//   fresh         the first write to pages that the system has to clear, and their return
//
// c++ -O3 -march=native -std=c++20 -pthread -DROWS=2000000 benchmarks/micro/random_rows.cc &&
// ./a.out
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kRows = ROWS;
constexpr std::size_t kRowBytes = 144;   // in a table, with the key
constexpr std::size_t kWideBytes = 136;  // as it leaves the table
constexpr std::size_t kAhead = 16;
constexpr std::size_t kEntries = 2 * kRows;
constexpr std::size_t kPageBytes = 4096;
constexpr int kRounds = 7;

struct Entry {
  std::uint64_t key;  // 0: free
  std::uint32_t row;
};

template <class T>
T* pages(std::size_t size) {
  void* const data =
      mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) std::abort();
  madvise(data, size * sizeof(T), MADV_HUGEPAGE);
  return static_cast<T*>(data);
}

// ns per row of the fastest round. work(begin, end): a part of the rows, one part per thread.
template <class Work>
double fastest(int num_threads, const Work& work) {
  using Clock = std::chrono::steady_clock;
  auto least = Clock::duration::max();
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = Clock::now();
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&work, t, num_threads] {
        work(kRows * t / num_threads, kRows * (t + 1) / num_threads);
      });
    }
    for (std::thread& thread : threads) thread.join();
    least = std::min(least, Clock::now() - begin);
  }
  return std::chrono::duration<double, std::nano>(least).count() / kRows;
}

std::uint64_t hash_of(std::uint64_t key) {
  key = (key ^ (key >> 31)) * 0x7fb5d329728ea185ULL;
  key = (key ^ (key >> 27)) * 0x81dadef4bc2dd44dULL;
  return key ^ (key >> 33);
}

std::size_t place_of(const Entry* entries, std::uint64_t key) {
  std::size_t i = (hash_of(key) >> 32) * kEntries >> 32;
  while (entries[i].key != 0 && entries[i].key != key) i = i + 1 < kEntries ? i + 1 : 0;
  return i;
}

void fetch(const std::uint8_t* row) {
  for (std::size_t at = 0; at < kRowBytes; at += 64) __builtin_prefetch(row + at);
}

}  // namespace

int main() {
  auto* const rows = pages<std::uint8_t>(kRows * kRowBytes);
  auto* const out = pages<std::uint8_t>(kRows * kWideBytes);
  auto* const entries = pages<Entry>(kEntries);
  std::memset(rows, 1, kRows * kRowBytes);
  std::memset(out, 1, kRows * kWideBytes);
  std::vector<std::uint32_t> order(kRows);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  std::vector<std::uint64_t> keys(kRows);
  std::iota(keys.begin(), keys.end(), 1);
  for (const std::uint64_t key : keys) entries[place_of(entries, key)] = {key, order[key - 1]};
  // A pass asks for keys bucket by bucket, and a bucket's entries are near each other.
  std::ranges::sort(keys, {}, [](std::uint64_t key) { return hash_of(key) >> 52; });

  const auto row = [=](std::uint32_t number) { return rows + number * kRowBytes; };
  const auto write = [=](std::size_t i, const std::uint8_t* from) {
    std::memcpy(out + i * kWideBytes, from, kWideBytes);
  };
  for (const int num_threads : {1, 2}) {
    const double copy = fastest(num_threads, [&](std::size_t begin, std::size_t end) {
      std::memcpy(out + begin * kWideBytes, rows + begin * kWideBytes, (end - begin) * kWideBytes);
    });
    const double in_order = fastest(num_threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) write(i, rows + i * kRowBytes);
    });
    const double gather = fastest(num_threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        fetch(row(order[std::min(i + kAhead, kRows - 1)]));
        write(i, row(order[i]));
      }
    });
    const double probe_gather = fastest(num_threads, [&](std::size_t begin, std::size_t end) {
      const std::uint8_t* found[kAhead];
      for (std::size_t i = begin; i < end; i += kAhead) {
        const std::size_t num = std::min(kAhead, end - i);
        for (std::size_t j = 0; j < num; ++j) {
          found[j] = row(entries[place_of(entries, keys[i + j])].row);
          fetch(found[j]);
        }
        for (std::size_t j = 0; j < num; ++j) write(i + j, found[j]);
      }
    });
    const double fresh = fastest(num_threads, [&](std::size_t begin, std::size_t end) {
      const std::size_t num_bytes = (end - begin) * kWideBytes;
      auto* const to = pages<std::uint8_t>(num_bytes);
      for (std::size_t i = 0; i < num_bytes; i += kPageBytes) to[i] = 1;
      munmap(to, num_bytes);
    });
    std::printf(
        "{\"threads\": %d, \"copy\": %.1f, \"in_order\": %.1f, \"gather\": %.1f, \"probe_gather\": "
        "%.1f, \"fresh\": "
        "%.1f}\n",
        num_threads, copy, in_order, gather, probe_gather, fresh);
  }
}
