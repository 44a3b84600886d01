// RocksDB from C++, as `ssd_job.py` describes a contestant: threads of MultiGet and WriteBatch.
// Arguments: folder, rows, bytes of memory, seconds, threads.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kDrawn = 1 << 15, kValueBytes = 128;
constexpr double kZipf = 1.05;
constexpr std::uint64_t kSpread = 2654435761;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void check(const rocksdb::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

std::uint64_t big_endian(std::uint64_t key) { return __builtin_bswap64(key); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const std::uint64_t num_rows = std::strtoull(argv[2], nullptr, 10);
  const std::size_t memory = std::strtoull(argv[3], nullptr, 10);
  const double seconds = std::atof(argv[4]);
  const std::size_t num_threads = std::strtoull(argv[5], nullptr, 10);
  const std::size_t buffer = std::min<std::size_t>(memory / 16, std::size_t{64} << 20);
  rocksdb::Options options;
  options.create_if_missing = true;
  options.use_direct_reads = options.use_direct_io_for_flush_and_compaction = true;
  options.write_buffer_size = buffer;
  options.max_write_buffer_number = 2;
  options.IncreaseParallelism(4);
  options.compression = rocksdb::kNoCompression;  // floats do not become smaller
  rocksdb::BlockBasedTableOptions table;
  // Indexes and filters are in memory at all times: in a small cache they are read again and again.
  const std::size_t around = num_rows * 7 / 2;
  table.block_cache = rocksdb::NewLRUCache(memory - 2 * buffer - around);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* db = nullptr;
  check(rocksdb::DB::Open(options, std::string(argv[1]) + "/db", &db));
  rocksdb::WriteOptions writing;
  writing.disableWAL = true;
  const std::string zeros(kValueBytes, '\0');
  for (std::uint64_t begin = 0; begin < num_rows; begin += kDrawn) {
    rocksdb::WriteBatch batch;
    for (std::uint64_t key = begin; key < std::min(begin + kDrawn, num_rows); ++key) {
      const std::uint64_t name = big_endian(key);
      batch.Put({reinterpret_cast<const char*>(&name), 8}, zeros);
    }
    check(db->Write(writing, &batch));
  }
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform;
  const double top = std::pow(static_cast<double>(num_rows) + 1, 1 - kZipf) - 1;
  const auto step = [&](const std::vector<std::uint64_t>& names) {
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        const std::size_t begin = names.size() * t / num_threads;
        const std::size_t end = names.size() * (t + 1) / num_threads;
        std::vector<rocksdb::Slice> keys;
        for (std::size_t i = begin; i < end; ++i) {
          keys.emplace_back(reinterpret_cast<const char*>(&names[i]), 8);
        }
        std::vector<rocksdb::PinnableSlice> values(keys.size());
        std::vector<rocksdb::Status> statuses(keys.size());
        db->MultiGet({}, db->DefaultColumnFamily(), keys.size(), keys.data(), values.data(),
                     statuses.data(), true);
        rocksdb::WriteBatch batch;
        std::vector<float> row(kValueBytes / 4);
        for (std::size_t i = 0; i < keys.size(); ++i) {
          check(statuses[i]);
          std::copy_n(values[i].data(), kValueBytes, reinterpret_cast<char*>(row.data()));
          for (float& value : row) value *= 0.5F;
          batch.Put(keys[i], {reinterpret_cast<const char*>(row.data()), kValueBytes});
        }
        check(db->Write(writing, &batch));
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  std::vector<double> times;
  std::size_t num_keys = 0;
  for (int part = 0; part < 2; ++part) {
    times.clear();
    num_keys = 0;
    for (const double end = now() + seconds; now() < end;) {
      std::vector<std::uint64_t> names(kDrawn);
      for (std::uint64_t& name : names) {
        const double rank = std::pow(1 + uniform(random) * top, 1 / (1 - kZipf)) - 1;
        const auto key = std::min(static_cast<std::uint64_t>(rank), num_rows - 1);
        name = key * kSpread % num_rows;
      }
      std::sort(names.begin(), names.end());
      names.erase(std::unique(names.begin(), names.end()), names.end());
      for (std::uint64_t& name : names) name = big_endian(name);
      const double start = now();
      step(names);
      times.push_back(now() - start);
      num_keys += names.size();
    }
  }
  double spent = 0;
  for (const double time : times) spent += time;
  std::sort(times.begin(), times.end());
  std::printf("{\"rows_per_s\": %f, \"step_median_ms\": %f, \"step_p99_ms\": %f}\n",
              static_cast<double>(num_keys) / spent, 1e3 * times[times.size() / 2],
              1e3 * times[times.size() * 99 / 100]);
  delete db;
}
