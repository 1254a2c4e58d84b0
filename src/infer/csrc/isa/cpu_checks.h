// Which instructions of x86 this CPU has. Not within TARGET: these functions run on every CPU.
#pragma once

namespace {

[[maybe_unused]] bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

[[maybe_unused]] bool has_avx_vnni() {  // CPUID.7.1.EAX bit 4, for which compilers have names only since late
  unsigned a = 7, b, c = 1, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return has_avx2() && (a >> 4 & 1);
}

[[maybe_unused]] bool has_avx512() {  // F, BW, DQ, VL
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

[[maybe_unused]] bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

}  // namespace
