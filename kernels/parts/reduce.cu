/* A part of the folds, PART: together they would take long to compile. */
#include "reduce.cuh"

#define FOLD_PART PART
#define FOLD_OF(F, T) template int fold_launch<F<T>>(const OpCall *, FoldParams *);
#include "reduce_list.h"
