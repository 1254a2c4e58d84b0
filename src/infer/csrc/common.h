// What all files of the library share: compiling for an instruction set, memory.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ARM64 1
#endif

#include "abi.h"

#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE inline ALWAYS_INLINE
#define NOINLINE __attribute__((noinline))
#define FENCE() __asm__ volatile("" ::: "memory")
// A vector is computed as it is written: compilers add up sums of many whole numbers as a tree, whose parts they
// spill.
#if defined(X86)
#define IN_ORDER(vector) __asm__("" : "+v"(vector))
#elif defined(ARM64)
#define IN_ORDER(vector) __asm__("" : "+w"(vector))
#else
#define IN_ORDER(vector) (void)0
#endif

// A plain loop is compiled for several instruction sets, of which the loader chooses one. ThreadSanitizer is not yet
// there when it does, and clang hands no vector of 64 bytes from a clone to a function that has none.
#if defined(X86) && defined(__linux__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_ISA
#endif

// What lies between these two is compiled for an instruction set. The flags of a whole file would also reach
// templates of the standard library, of which the linker keeps one copy for all files: it might be one that
// this CPU cannot run.
#if defined(__clang__)
#define TARGET(names) _Pragma(TEXT(clang attribute push(__attribute__((target(names))), apply_to = function)))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define TARGET(names) _Pragma("GCC push_options") _Pragma(TEXT(GCC target(names)))
#define END_TARGET _Pragma("GCC pop_options")
#endif
#define TEXT(...) TEXT_(__VA_ARGS__)
#define TEXT_(...) #__VA_ARGS__

namespace {

constexpr long ceil_div(long n, long by) { return (n + by - 1) / by; }

INLINE void relax() {  // between two looks at what another thread writes
#if defined(X86)
  _mm_pause();
#elif defined(ARM64)
  __asm__ volatile("yield");
#endif
}

// Denormal numbers count as zero on this thread, as they always do for vdpbf16ps and tiles; else they would be slow.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool wanted) : before_(mode()) {
    if (wanted) set_mode(before_ | FLUSH);
  }
  ~FlushDenormals() { set_mode(before_); }

 private:
#if defined(X86)
  using Mode = unsigned;
  static constexpr Mode FLUSH = 0x8040;
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) { _mm_setcsr(mode); }
#elif defined(ARM64)
  using Mode = uint64_t;
  static constexpr Mode FLUSH = 1 << 24;
  static Mode mode() {
    Mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(Mode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = int;
  static constexpr Mode FLUSH = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif
  const Mode before_;
};

constexpr size_t HUGE_PAGE = 1 << 21;

// Memory of a thread; grows, and is given back when the thread ends.
class ThreadMemory {
 public:
  ~ThreadMemory() { std::free(at_); }
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(at_);
      size_ = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
      at_ = (char*)std::aligned_alloc(HUGE_PAGE, size_);
      if (!at_) std::abort();
#if defined(__linux__)
      // Fewer misses of the page table while rows stream by. A partly filled page would be waste.
      madvise(at_, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
    }
    return at_;
  }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace
