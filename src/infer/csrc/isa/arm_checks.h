// Which instructions of ARMv8 this CPU has, beyond NEON, which each has. Not within TARGET.
#pragma once

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__APPLE__)
inline bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
[[maybe_unused]] bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm_bf16() {
  return has_dot_products() && has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#elif defined(__linux__)  // the numbers of asm/hwcap.h, whose names are younger than some systems
[[maybe_unused]] bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }
[[maybe_unused]] bool has_i8mm_bf16() {
  const unsigned long more = getauxval(AT_HWCAP2);
  return has_dot_products() && (more >> 13 & 1) && (more >> 14 & 1);
}
#else
[[maybe_unused]] bool has_dot_products() { return false; }
[[maybe_unused]] bool has_i8mm_bf16() { return false; }
#endif

}  // namespace
