// Reads the rows of an exported table (docs/format/export.md) with nothing but the C++ standard
// library and mmap, and adds the rows of bags of keys up.
//
//     c++ -std=c++20 -O2 pooled.cc -o pooled              # or cmake, with the file beside this
//     ./pooled EXPORT/tables/0/*.rows < bags.txt
//
// Each line of bags.txt is a bag: keys in decimal, as uint64. Each line of the output is the sum of
// the bag's rows. Keys without a row count as zeros; how many there were goes to standard error.
// What is not here: the dense part of the model (dense.pt2, which libtorch runs after
// torch._inductor.aoti_compile_and_package), salted keys, and initial weights of absent keys.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Line {  // 64 bytes: the rows of a range of hashes
  std::uint32_t first_row, num_rows;
  std::uint16_t tags[28];
};
struct Bucket {
  std::uint64_t offset;
  std::uint32_t num_lines, num_rows;
};
struct Footer {
  char magic[8];
  std::uint32_t encoding, dim, row_bytes, options, first_bucket, num_buckets;
  std::uint64_t num_rows, directory_offset;
  std::uint32_t statistics, unused[3];
};

struct File {
  const char* bytes;
  Footer footer;
};

File map_file(const char* path) {
  struct stat found;
  const int fd = open(path, O_RDONLY);
  if (fd < 0 || fstat(fd, &found) != 0 || found.st_size < 64) {
    throw std::runtime_error(std::string(path) + ": expected a file of rows");
  }
  const auto size = static_cast<std::size_t>(found.st_size);
  void* bytes = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) throw std::runtime_error(std::string(path) + ": cannot be mapped");
  File file{static_cast<const char*>(bytes), {}};
  std::memcpy(&file.footer, file.bytes + size - sizeof(Footer), sizeof(Footer));
  if (std::memcmp(file.footer.magic, "TRMROWS1", 8) != 0) {
    throw std::runtime_error(std::string(path) + ": expected TRMROWS1 before the last 56 bytes");
  }
  return file;
}

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The row of a key, behind the key itself; null if there is none.
const char* find(const File& file, std::uint64_t key) {
  const std::uint64_t hash = mix64(key);
  const std::uint64_t number = (hash >> 52) - file.footer.first_bucket;
  if (number >= file.footer.num_buckets) return nullptr;
  const auto& bucket =
      reinterpret_cast<const Bucket*>(file.bytes + file.footer.directory_offset)[number];
  if (bucket.num_rows == 0) return nullptr;
  const auto* lines = reinterpret_cast<const Line*>(file.bytes + bucket.offset);
  const char* rows = file.bytes + bucket.offset + std::uint64_t{64} * bucket.num_lines;
  const Line& line = lines[(hash >> 20 & 0xFFFFFFFF) * bucket.num_lines >> 32];
  for (std::uint32_t i = 0; i < line.num_rows; ++i) {
    if (i < 28 && line.tags[i] != (hash & 0xFFFF)) continue;
    const char* row = rows + std::uint64_t{line.first_row + i} * file.footer.row_bytes;
    if (std::memcmp(row, &key, 8) == 0) return row + 8;
  }
  return nullptr;
}

float from_half(std::uint16_t half) {
  const float magnitude = std::bit_cast<float>((half & 0x7FFFU) << 13) * 0x1p112F;
  return half & 0x8000U ? -magnitude : magnitude;
}

// Adds the weights of a row to `sum`.
void add(const Footer& footer, const char* row, std::vector<float>& sum) {
  row += footer.statistics * 4;
  for (std::uint32_t j = 0; j < footer.dim; ++j) {
    if (footer.encoding == 0) {
      sum[j] += reinterpret_cast<const float*>(row)[j];
    } else if (footer.encoding == 1) {
      sum[j] += from_half(reinterpret_cast<const std::uint16_t*>(row)[j]);
    } else {
      sum[j] += *reinterpret_cast<const float*>(row) * static_cast<signed char>(row[4 + j]);
    }
  }
}

int main(int argc, char** argv) try {
  std::vector<File> files;
  for (int i = 1; i < argc; ++i) files.push_back(map_file(argv[i]));
  if (files.empty()) throw std::runtime_error("usage: pooled FILE.rows... < bags.txt");
  std::uint64_t missing = 0;
  for (std::string text; std::getline(std::cin, text);) {
    std::vector<float> sum(files[0].footer.dim);
    std::istringstream keys(text);
    for (std::uint64_t key; keys >> key;) {
      const char* row = nullptr;
      for (const File& file : files) {
        if (row == nullptr) row = find(file, key);
      }
      if (row == nullptr) {
        ++missing;
      } else {
        add(files[0].footer, row, sum);
      }
    }
    for (const float value : sum) std::printf("%.9g ", value);
    std::printf("\n");
  }
  std::fprintf(stderr, "keys without a row: %llu\n", static_cast<unsigned long long>(missing));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
