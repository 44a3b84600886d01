#include "base/isa.h"

#include "base/error.h"

namespace trireme {
namespace {

bool runs_here([[maybe_unused]] Isa isa) noexcept {
#if defined(__x86_64__)
  // What isa.h compiles for. A virtual machine may offer one of these without another.
  const bool has_bmi = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && has_bmi;
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && has_bmi;
  }
#endif
  return isa == Isa::kScalar;
}

}  // namespace

std::string_view isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

Isa choose_isa(std::string_view name) {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kScalar}) {
    if (name == "auto" && runs_here(isa)) return isa;
    if (name != isa_name(isa)) continue;
    if (runs_here(isa)) return isa;
    throw Error(ErrorCode::kBadRequest,
                "simd: expected an instruction set of this machine, found " + std::string(name));
  }
  throw Error(ErrorCode::kBadRequest,
              "simd: expected auto, scalar, avx2 or avx512, found " + std::string(name));
}

}  // namespace trireme
