// The instruction sets that kernels are compiled for. One binary contains all of them; a table
// chooses one when it is created.
//
// A kernel does the same operations in the same order for every instruction set, without
// contraction. So all of them compute the same bits.
#pragma once

#include <string_view>

// Functions called inside with_isa must be inlined: other code is compiled for the baseline
// instruction set.
#define TRIREME_INLINE [[gnu::always_inline]] inline
#define TRIREME_INLINE_LAMBDA __attribute__((always_inline))

// Before a loop whose turns do not depend on one another.
#if defined(__clang__)
#define TRIREME_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TRIREME_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace trireme {

enum class Isa { kScalar, kAvx2, kAvx512 };  // kScalar: the architecture's baseline

std::string_view isa_name(Isa isa) noexcept;

// "auto" (the best of this machine), "scalar", "avx2" or "avx512". Errors: kBadRequest for an
// unknown name, or an instruction set that this machine lacks.
Isa choose_isa(std::string_view name);

#if defined(__x86_64__)
#if defined(__clang__)  // which takes the widest vectors of the target anyway
#define TRIREME_WIDEST
#else
#define TRIREME_WIDEST ",prefer-vector-width=512"
#endif
template <class Function>
[[gnu::target("avx2,bmi,bmi2"), gnu::noinline]] void run_avx2(const Function& function) {
  function();
}
template <class Function>
[[gnu::target("avx512f,avx512dq,avx512bw,avx512vl,bmi,bmi2" TRIREME_WIDEST), gnu::noinline]]
void run_avx512(const Function& function) {
  function();
}
#endif

// Runs a function compiled for an instruction set. Requires: the function is a
// TRIREME_INLINE_LAMBDA.
template <class Function>
void with_isa([[maybe_unused]] Isa isa, const Function& function) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return run_avx512(function);
  if (isa == Isa::kAvx2) return run_avx2(function);
#endif
  function();
}

}  // namespace trireme
