#include "base/hash.h"

#include "base/isa.h"

namespace trireme {

namespace {

Isa best_isa() {
  static const Isa isa = choose_isa("auto");
  return isa;
}

}  // namespace

// Copies inside the lambdas: the compiler must know that no store changes what they capture.
void mix64_all(std::span<const std::uint64_t> keys, std::uint64_t* hashes) noexcept {
  with_isa(best_isa(), [=]() TRIREME_INLINE_LAMBDA {
    const std::span from = keys;
    std::uint64_t* const to = hashes;
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = mix64(from[i]);
  });
}

void unmix64_all(std::span<std::uint64_t> hashes) noexcept {
  with_isa(best_isa(), [=]() TRIREME_INLINE_LAMBDA {
    for (const std::span all = hashes; std::uint64_t& hash : all) hash = unmix64(hash);
  });
}

}  // namespace trireme
