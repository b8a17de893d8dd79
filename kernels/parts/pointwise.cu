/* A part of the kernels of pointwise ops, PART: those of every PARTS-th line. Together they would
 * take long to compile. */
#define PW_LINKAGE
#include "line.cuh"

#define PW_WANTED(line) ((line) % PARTS == PART - 1)
#define PW_RECORD_CHOOSE(name, sig, flag, rule, lin, text, choice, ...)
#define PW_SINGLE(name, when, expr)

#include "pointwise_lines.h"
