#include "feed/shows.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/error.h"
#include "feed/chunks.h"

namespace trireme {
namespace {

constexpr std::size_t kChunkOccurrencesMin = std::size_t{1} << 15;  // less is not worth a thread

struct SumShows {
  const ExampleShows& examples;
  const RowsOfBags& from;
  std::size_t num_positions;
  float* show_click;
  std::uint32_t* feature;

  std::size_t num_bags() const noexcept { return examples.num_examples * examples.features.size(); }

  // The bag of occurrence o; -1: none, or wrong.
  std::int64_t bag_of(std::size_t o, bool& is_right) const noexcept {
    const auto position = static_cast<std::uint32_t>(from.order[o]);
    if (position >= num_positions) {
      is_right = false;
      return -1;
    }
    const std::int32_t bag = from.bags.empty() ? from.order[o] : from.bags[position];
    if (bag >= 0 && static_cast<std::size_t>(bag) < num_bags()) return bag;
    is_right &= bag == -1;
    return -1;
  }

  // Rows [begin, end). Returns whether all starts, positions and bags are right.
  bool sum(std::size_t begin, std::size_t end) const noexcept {
    bool is_right = true;
    for (std::size_t k = begin; k < end; ++k) {
      const auto first = static_cast<std::size_t>(from.starts[k]);
      const auto stop = static_cast<std::size_t>(from.starts[k + 1]);
      if (first > stop || stop > from.order.size()) return false;
      float show = 0, click = 0;
      std::int64_t first_bag = -1;
      for (std::size_t o = first; o < stop; ++o) {
        const std::int64_t bag = bag_of(o, is_right);
        if (bag < 0) continue;
        if (first_bag < 0) first_bag = bag;
        if (examples.show_click.empty()) {
          show += 1;
        } else {
          const std::size_t b =
              static_cast<std::uint32_t>(bag) % static_cast<std::uint32_t>(examples.num_examples);
          show += examples.show_click[2 * b];
          click += examples.show_click[2 * b + 1];
        }
      }
      show_click[2 * k] = show;
      show_click[2 * k + 1] = click;
      const std::size_t f =
          first_bag < 0 ? 0 : static_cast<std::size_t>(first_bag) / examples.num_examples;
      feature[k] = first_bag < 0 ? 0 : examples.features[f];
    }
    return is_right;
  }
};

}  // namespace

void sum_shows(const ExampleShows& examples, const RowsOfBags& from, std::span<float> show_click,
               std::span<std::uint32_t> feature, Pool& pool) {
  const std::size_t num_bags = examples.num_examples * examples.features.size();
  const SumShows sums{examples, from, from.bags.empty() ? num_bags : from.bags.size(),
                      show_click.data(), feature.data()};
  const std::size_t num_rows = feature.size();
  const std::size_t chunks =
      std::min(num_rows, num_chunks(from.order.size(), kChunkOccurrencesMin, pool, 4));
  std::atomic<bool> is_right = true;
  pool.run(chunks, [&](std::size_t c) {
    if (!sums.sum(chunk_begin(num_rows, c, chunks), chunk_begin(num_rows, c + 1, chunks))) {
      is_right = false;
    }
  });
  if (!is_right) {
    throw Error(ErrorCode::kBadRequest,
                "sum_shows: expected starts that rise to at most " +
                    std::to_string(from.order.size()) + ", positions below " +
                    std::to_string(sums.num_positions) + " and bags of -1 to " +
                    std::to_string(num_bags) + " - 1, found others");
  }
}

}  // namespace trireme
