// Bags: the ids of one feature in one example, feature-major. Bag f*B + b is the slice offsets[bag]
// to offsets[bag + 1] of the positions 0 .. N-1; the first offset need not be 0.
//
// Shapes: B examples, F features, N positions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace trireme {

// Writes the bag of each position, -1 for positions before the first or after the last bag.
// Errors: kBadRequest if offsets decrease or lie outside 0 .. N, naming the first that does.
void bag_of(std::span<const std::int64_t> offsets,  // (F*B + 1,)
            std::span<std::int32_t> out);           // (N,)

// Writes 1 / (number of ids in the bag) for each position with a row, 0 for the others.
// Errors: as bag_of.
void mean_weights(std::span<const std::int32_t> index,  // (N,) -1 for padding, which does not count
                  std::span<const std::int64_t> offsets,  // (F*B + 1,)
                  std::span<float> out);                  // (N,)

// Gives each feature a key space of its own: out = mix64(value ^ salts[f]), a bijection for each
// feature. Values equal to `padding_key` are not changed; the one value that maps to `padding_key`
// gets the image of `padding_key` instead. Values outside all bags are copied. Errors: kBadRequest
// if offsets are wrong (as bag_of) or their number is not a multiple of F.
void salt(
    std::span<const std::uint64_t> values,  // (N,)
    std::span<const std::int64_t> offsets,  // (F*B + 1,), or empty: N / F values for each feature
    std::span<const std::uint64_t> salts,   // (F,)
    std::optional<std::uint64_t> padding_key,
    std::span<std::uint64_t> out);  // (N,)

// Whether bag i is position i for every bag. Then offsets carry no information.
bool is_one_per_bag(std::span<const std::int64_t> offsets) noexcept;

// Throws kBadRequest unless 0 <= offsets[0] <= offsets[1] <= ... <= num_positions. `who` starts the
// message.
void check_offsets(const char* who, std::span<const std::int64_t> offsets,
                   std::size_t num_positions);

}  // namespace trireme
