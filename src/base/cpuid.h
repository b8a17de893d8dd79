/* Which instruction sets this CPU has. */
#ifndef MF_CPUID_H
#define MF_CPUID_H

/* The highest level in use: 2, 3, 4 for x86-64-v2, v3 (AVX2, FMA), v4 (AVX-512 F, BW, CD, DQ, VL);
 * 0 on other machines. The environment variable MF_ISA (v2, v3, v4) lowers it, never raises it. */
int cpuid_isa(void);

/* Whether the CPU multiplies bfloat16 natively (AVX512-BF16 or AMX). */
int cpuid_has_bf16(void);

#endif
