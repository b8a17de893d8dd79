/* What every file of kernels/ includes. */
#ifndef MF_KERNEL_CUH
#define MF_KERNEL_CUH
#include "element.cuh"
#include "share.cuh"
#include "walk.cuh"

#endif
