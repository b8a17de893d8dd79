/* See cpuid.h. */
#include <stdlib.h>

#include "cpuid.h"

#if defined(__x86_64__)
static int detected(void) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return 3;
  return 4;
}

int cpuid_isa(void) {
  int isa = detected();
  const char *wish = getenv("MF_ISA");
  if (wish && wish[0] == 'v' && wish[1] >= '2' && wish[1] <= '4' && !wish[2] && wish[1] - '0' < isa)
    isa = wish[1] - '0';
  return isa;
}

int cpuid_has_bf16(void) {
  unsigned a = 7, b = 0, c = 1, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return cpuid_isa() == 4 && (a >> 5 & 1);
}
#else
int cpuid_isa(void) {
  return 0;
}

int cpuid_has_bf16(void) {
  return 0;
}
#endif
