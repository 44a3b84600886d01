// XXH64 against values of the reference implementation, on memory of exactly the right size.
#include "feed/strings.h"

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"

using namespace trireme;

namespace {

struct Reference {
  std::size_t size;  // of the bytes 0, 1, 2, ...
  std::uint64_t seed_0, seed_2654435761;
};

constexpr Reference kReferences[] = {
    {0, 0xef46db3751d8e999, 0xac75fda2929b17ef},  {1, 0xe934a84adb052768, 0x5014607643a9b4c3},
    {3, 0xe5c7bb4533bc65dd, 0x47aa45ed39ed5541},  {4, 0xffced8604453cc1e, 0xb8f1a51893fa14e6},
    {7, 0x14cc643f630c72d2, 0x13f31c4a8e5f8252},  {8, 0x884a173614b81b8d, 0xcb74ef9d044dcf44},
    {11, 0x652a564a95365aca, 0xbc54e5fce1b89d24}, {14, 0x5cda8b69bbfc1d45, 0x9637a6a8d7711686},
    {31, 0xc346d2b59b4d8ee1, 0x71969c89a30a986a}, {32, 0xcbf59c5116ff32b4, 0x7181354774e0d600},
    {33, 0x0c535d1acafb8ead, 0x57bd8ad0a0390e6d}, {63, 0xe26aa9e2a95f8e4f, 0x892362045c7badfb},
    {64, 0xf7c67301db6713f0, 0x6e545403b828cf8b}, {100, 0x6ac1e58032166597, 0x8832442a88284f11},
};

void equals_the_reference() {
  for (const Reference& reference : kReferences) {
    const std::unique_ptr<char[]> bytes(new char[reference.size]);
    std::iota(bytes.get(), bytes.get() + reference.size, '\0');
    const std::string_view text(bytes.get(), reference.size);
    CHECK_EQUAL(xxh64(text, 0), reference.seed_0);
    CHECK_EQUAL(xxh64(text, 2654435761), reference.seed_2654435761);
  }
}

void hashes_each_string_with_the_seed_of_its_feature() {
  const std::string bytes = "onetwo";
  const std::vector<std::int64_t> offsets = {0, 3, 3, 6};
  std::vector<std::uint64_t> keys(3);
  hash_strings(bytes, offsets, "city", keys);
  const std::uint64_t seed = xxh64("city", 0);
  CHECK_EQUAL(keys[0], xxh64("one", seed));
  CHECK_EQUAL(keys[1], xxh64("", seed));
  CHECK_EQUAL(keys[2], xxh64("two", seed));
}

}  // namespace

int main() {
  equals_the_reference();
  hashes_each_string_with_the_seed_of_its_feature();
  return 0;
}
