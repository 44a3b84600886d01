#include "feed/bags.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/hash.h"

namespace trireme {

void check_offsets(const char* who, std::span<const std::int64_t> offsets,
                   std::size_t num_positions) {
  std::int64_t previous = 0;
  bool is_wrong = offsets.empty();
  for (const std::int64_t offset : offsets) {  // without an exit, so that it is vectorized
    is_wrong |= offset < previous;
    previous = offset;
  }
  if (!is_wrong && previous <= static_cast<std::int64_t>(num_positions)) return;
  previous = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (offsets[i] < previous || offsets[i] > static_cast<std::int64_t>(num_positions)) {
      throw Error(ErrorCode::kBadRequest,
                  std::string(who) + ": expected offsets[" + std::to_string(i) + "] from " +
                      std::to_string(previous) + " to " + std::to_string(num_positions) +
                      ", found " + std::to_string(offsets[i]));
    }
    previous = offsets[i];
  }
  throw Error(ErrorCode::kBadRequest, std::string(who) + ": expected at least 1 offset, found 0");
}

bool is_one_per_bag(std::span<const std::int64_t> offsets) noexcept {
  bool is_one = true;
  for (std::size_t i = 0; i < offsets.size(); ++i) {  // without an exit, so that it is vectorized
    is_one &= offsets[i] == static_cast<std::int64_t>(i);
  }
  return is_one;
}

void bag_of(std::span<const std::int64_t> offsets, std::span<std::int32_t> out) {
  check_offsets("bag_of", offsets, out.size());
  // The bag of a position is the number of later bags that begin at or before it. These are
  // counted, then summed, because short loops of unpredictable lengths are slow.
  std::fill(out.begin(), out.end(), 0);
  for (const std::int64_t offset : offsets.subspan(1)) {
    if (offset < static_cast<std::int64_t>(out.size())) ++out[static_cast<std::size_t>(offset)];
  }
  std::int32_t bag = 0;
  for (std::int32_t& count : out) count = bag += count;
  std::fill(out.begin(), out.begin() + offsets.front(), -1);
  std::fill(out.begin() + offsets.back(), out.end(), -1);
}

void mean_weights(std::span<const std::int32_t> index, std::span<const std::int64_t> offsets,
                  std::span<float> out) {
  check_offsets("mean_weights", offsets, index.size());
  if (out.size() != index.size()) {
    throw Error(ErrorCode::kBadRequest, "mean_weights: index has " + std::to_string(index.size()) +
                                            " elements, out has " + std::to_string(out.size()));
  }
  std::fill(out.begin(), out.begin() + offsets.front(), 0.0F);
  std::fill(out.begin() + offsets.back(), out.end(), 0.0F);
  for (std::size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
    std::int64_t count = 0;
    for (std::int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) count += index[i] >= 0;
    const float weight = count == 0 ? 0.0F : 1.0F / static_cast<float>(count);
    for (std::int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i)
      out[i] = index[i] >= 0 ? weight : 0.0F;
  }
}

namespace {

struct Salt {
  std::uint64_t salt;
  bool has_padding;
  std::uint64_t padding;

  std::uint64_t operator()(std::uint64_t value) const noexcept {
    const std::uint64_t key = mix64(value ^ salt);
    if (!has_padding) return key;
    if (value == padding) return padding;
    return key == padding ? mix64(padding ^ salt) : key;
  }
};

}  // namespace

void salt(std::span<const std::uint64_t> values, std::span<const std::int64_t> offsets,
          std::span<const std::uint64_t> salts, std::optional<std::uint64_t> padding_key,
          std::span<std::uint64_t> out) {
  const std::size_t num_bags = offsets.empty() ? values.size() : offsets.size() - 1;
  if (salts.empty() || num_bags % salts.size() != 0 || out.size() != values.size()) {
    throw Error(ErrorCode::kBadRequest, "salt: expected bags of " + std::to_string(salts.size()) +
                                            " features and " + std::to_string(values.size()) +
                                            " results, found " + std::to_string(num_bags) +
                                            " bags and " + std::to_string(out.size()) + " results");
  }
  if (!offsets.empty()) {
    check_offsets("salt", offsets, values.size());
    std::copy(values.begin(), values.begin() + offsets.front(), out.begin());
    std::copy(values.begin() + offsets.back(), values.end(), out.begin() + offsets.back());
  }
  const std::size_t batch = num_bags / salts.size();
  for (std::size_t f = 0; f < salts.size(); ++f) {
    const std::size_t begin =
        offsets.empty() ? f * batch : static_cast<std::size_t>(offsets[f * batch]);
    const std::size_t end =
        offsets.empty() ? begin + batch : static_cast<std::size_t>(offsets[(f + 1) * batch]);
    std::transform(values.begin() + begin, values.begin() + end, out.begin() + begin,
                   Salt{salts[f], padding_key.has_value(), padding_key.value_or(0)});
  }
}

}  // namespace trireme
