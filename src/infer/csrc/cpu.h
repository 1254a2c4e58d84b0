// What the kernels share: compiling for one instruction set, torch's threads, memory, the tile registers.
//
// Included by each .cpp of the native library; everything is inline or internal to its file. Tests name a
// header in INFER_TILES that stands for AMX in software.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE inline ALWAYS_INLINE
#define NOINLINE __attribute__((noinline))
#define FENCE() __asm__ volatile("" ::: "memory")

#if defined(__clang__)
#define TARGET(names) _Pragma(TEXT(clang attribute push(__attribute__((target(names))), apply_to = function)))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define TARGET(names) _Pragma("GCC push_options") _Pragma(TEXT(GCC target(names)))
#define END_TARGET _Pragma("GCC pop_options")
#endif
#define TEXT(...) TEXT_(__VA_ARGS__)
#define TEXT_(...) #__VA_ARGS__

// The most that the kernels may use of what the machine has: INFER_ISA says so, or infer_set_isa since
// then. One for the whole library.
enum class Level { PORTABLE, AVX2, AVX512, AVX512_BF16, AMX };

inline Level level_of(const char* name) {  // a name that is none (Python refuses it) limits nothing
  constexpr const char* NAMES[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  for (int i = 0; name && i < 5; ++i)
    if (!std::strcmp(name, NAMES[i])) return (Level)i;
  return Level::AMX;
}

inline std::atomic<Level> isa_limit{level_of(std::getenv("INFER_ISA"))};

inline bool may_use(Level level) { return level <= isa_limit.load(std::memory_order_relaxed); }

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // libgomp's GOMP_parallel

[[maybe_unused]] void run_threads(Parallel parallel, void (*body)(void*), void* data, int threads) {
  if (threads <= 1) return body(data);
  if (parallel) return parallel(body, data, threads, 0);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}

inline long ceil_div(long n, long by) { return (n + by - 1) / by; }

constexpr size_t HUGE_PAGE = 1 << 21;

// Memory of a thread; grows, and is given back when the thread ends.
class Memory {
 public:
  ~Memory() { std::free(at_); }
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(at_);
      size_ = ceil_div(bytes, HUGE_PAGE) * HUGE_PAGE;
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

struct TileConfig {  // all zero: the tiles are not in use
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

#ifdef X86
[[maybe_unused]] inline bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool may_use_tiles() {  // Linux gives the tiles' memory to processes that ask
#if defined(INFER_TILES)
  return true;
#elif defined(__linux__)
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned NEEDED = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
  if ((d & NEEDED) != NEEDED) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return false;
#endif
}

#ifdef INFER_TILES
#include INFER_TILES
#endif

TARGET("amx-tile")
[[maybe_unused]] void save_tiles(TileConfig* config) {
  FENCE();
  _tile_storeconfig(config);
  FENCE();
}
[[maybe_unused]] void restore_tiles(const TileConfig* config) {
  FENCE();
  if (config->palette) _tile_loadconfig(config);
  else _tile_release();
  FENCE();
}
END_TARGET

TARGET("avx512f")
[[maybe_unused]] INLINE __m512i multiples_to_15(int of) {  // 0, of, 2 · of, …
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(of));
}

// To each sum of 32 bits 4 products of bytes, the first without a sign. In place, where the intrinsic leads
// compilers to copy and spill sums that begin anew within a loop.
[[maybe_unused]] INLINE void add_products(__m512i& sums, __m512i unsigned_bytes, __m512i bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(bytes));
}

constexpr uint32_t INFINITE = 0x7f800000;

[[maybe_unused]] INLINE __m512i magnitude(__m512 x) {  // as integers: NaN is larger than everything
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

struct Scale {  // of numbers that become whole ones
  float scale, inverse;
  INLINE explicit Scale(__m512i magnitudes, float top = 127.f) {  // `top`: what the largest becomes
    const uint32_t bits = _mm512_reduce_max_epu32(magnitudes);
    float largest;
    std::memcpy(&largest, &bits, 4);
    // What is not finite stays so: its numbers are lost, its scale makes NaN of them.
    scale = bits < INFINITE ? largest / top : std::nanf("");
    inverse = bits && bits < INFINITE ? top / largest : 0.f;
  }
};
END_TARGET
#endif

}  // namespace
