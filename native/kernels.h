/* kernels.h: vectors, and distinct names for code that is compiled once for each instruction set.
 *
 * A file that includes this is compiled with ISA=portable and, on x86-64, with ISA=avx2 and AVX2 allowed.
 * Vectors are GCC's, so that one source fits any machine. Every element is added in one order, whatever
 * the width of the machine's vectors: results have equal bits.
 */
#ifndef KERNELS_H
#define KERNELS_H

#include <float.h>
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

_Static_assert(FLT_EVAL_METHOD == 0, "doubles must be evaluated as doubles");

#define JOIN_EXPANDED(a, b) a##_##b
#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define TEXT_EXPANDED(a) #a
#define TEXT(a) TEXT_EXPANDED(a)
#define OF_ISA(name) JOIN(ISA, name) /* as in avx2_kernels */
#define ISA_NAME TEXT(ISA)

typedef double v4 __attribute__((vector_size(32)));
typedef int64_t m4 __attribute__((vector_size(32)));
typedef double u4 __attribute__((vector_size(32), aligned(8))); /* at any double's address */
typedef int64_t um4 __attribute__((vector_size(32), aligned(8)));
typedef uint64_t w4 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t n4 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (m4){i, j, k, l})
#endif

#endif
