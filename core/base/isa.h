// The instruction sets that kernels are compiled for. One binary holds them all; a table chooses
// when it is made.
//
// Every kernel does the same operations in the same order whatever the instruction set, without
// contraction, so all of them compute the same bits.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

enum class Isa { kScalar, kAvx2, kAvx512 };  // kScalar: what every machine of the architecture has

std::string_view isa_name(Isa isa) noexcept;

// "auto" (the best of this machine), "scalar", "avx2" or "avx512".
// Errors: kBadRequest for another name, or for one that this machine cannot run.
Isa choose_isa(std::string_view name);

}  // namespace trireme
