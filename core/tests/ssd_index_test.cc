// The cold index against a list: random rows added in batches and erased, for buckets of few rows
// and of many; and what it costs.
#include <algorithm>
#include <map>
#include <vector>

#include "check.h"
#include "store/ssd/cold_index.h"

using namespace trireme;
using namespace trireme::ssd;

namespace {

using Entry = ColdIndex::Entry;

std::vector<int> pages_of(const ColdIndex& index, std::uint64_t hash) {
  std::vector<int> pages;
  index.find(hash, [&](PageNumber page) { pages.push_back(page); });
  return pages;
}

// Hashes of one bucket, some of which agree in all bits that the index keeps.
std::uint64_t some_hash(test::Random& random) {
  const std::uint64_t hash = random.next() >> 12;
  return random.below(10) == 0 ? hash & 0xFF00000000FFF : hash;
}

void test_random_batches_agree_with_a_list(std::uint64_t seed) {
  test::Random random(seed);
  for (const std::size_t batch_max : {3UL, 40UL, 4000UL}) {
    ColdIndex index;
    std::vector<Entry> list;
    std::size_t num_pages = 1;
    for (int round = 0; round < 60; ++round) {
      num_pages = std::min(num_pages + random.below(2 * num_pages), ColdIndex::kNumPagesMax);
      std::vector<Entry> added(random.below(batch_max + 1));
      for (Entry& entry : added) {
        entry = {some_hash(random), static_cast<std::uint16_t>(random.below(num_pages))};
      }
      list.insert(list.end(), added.begin(), added.end());
      index = index.with(num_pages, added);
      for (std::size_t n = random.below(list.size() + 1) / 4; n > 0; --n) {
        std::swap(list[random.below(list.size())], list.back());
        CHECK(index.erase(list.back().hash, list.back().page));
        list.pop_back();
      }
      CHECK_EQUAL(index.num_entries(), list.size());
    }
    std::map<std::uint64_t, std::vector<int>> expected;
    for (const Entry& entry : list) expected[entry.hash].push_back(entry.page);
    for (auto& [hash, pages] : expected) {
      std::vector<int> found = pages_of(index, hash);
      for (std::vector<int>* some : {&found, &pages}) {
        std::ranges::sort(*some);
        some->erase(std::unique(some->begin(), some->end()), some->end());
      }
      CHECK(std::ranges::includes(found, pages));
    }
    std::size_t num_in_vain = 0;
    for (int i = 0; i < 10000; ++i) num_in_vain += pages_of(index, random.next() >> 12).size();
    CHECK(num_in_vain <= 10000 * list.size() / (1U << 22) * 2 + 100);
  }
}

// Keys that were chosen to agree in all bits that the index keeps: a page is not read for each row.
void test_a_page_comes_once() {
  constexpr int kPages = 60, kRowsOfPage = 100;
  ColdIndex index;
  for (int page = 0; page < kPages;) {
    std::vector<Entry> added;
    for (const int end = page + 6; page < end; ++page) {
      for (std::uint64_t row = 0; row < kRowsOfPage; ++row) {
        added.push_back({row, static_cast<PageNumber>(page)});
      }
    }
    index = index.with(kPages, added);
  }
  CHECK_EQUAL(index.num_entries(), std::uint32_t{kPages * kRowsOfPage});
  CHECK_EQUAL(pages_of(index, 7).size(), std::size_t{kPages});
}

void test_bytes_of_a_row() {
  test::Random random(1);
  for (const std::size_t num_rows : {1000UL, 10000UL, 50000UL, 250000UL}) {
    const std::size_t num_pages = num_rows / 20;
    std::vector<Entry> rows(num_rows);
    for (Entry& entry : rows) entry = {random.next() >> 12, 7};
    const ColdIndex index = ColdIndex().with(num_pages, rows);
    const double bytes = static_cast<double>(index.bytes()) / static_cast<double>(num_rows);
    std::cout << num_rows << " rows of a bucket: " << bytes << " bytes each" << std::endl;
    CHECK(bytes < 3.3);
  }
}

}  // namespace

int main(int argc, char** argv) {
  test_random_batches_agree_with_a_list(test::seed_of(argc, argv));
  test_a_page_comes_once();
  test_bytes_of_a_row();
  CHECK(pages_of(ColdIndex(), 1).empty());
}
