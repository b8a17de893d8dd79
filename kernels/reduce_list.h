/* All folds with the types that they are computed in, FOLD_OF(F, T), in PARTS of about one size;
 * those of FOLD_PART alone where it is defined. */
#ifndef FOLD_PART
#define FOLD_WANTED(part) 1
#else
#define FOLD_WANTED(part) (FOLD_PART == (part))
#endif
#define FOLD_FLOATS_OF(F) FOLD_OF(F, float) FOLD_OF(F, double)
#define FOLD_ALL_OF(F) FOLD_FLOATS_OF(F) FOLD_OF(F, int64_t)
#if FOLD_WANTED(1)
FOLD_ALL_OF(FoldSum)
FOLD_FLOATS_OF(FoldMean)
FOLD_ALL_OF(FoldProd)
#endif
#if FOLD_WANTED(2)
FOLD_ALL_OF(FoldMax)
FOLD_ALL_OF(FoldMin)
FOLD_ALL_OF(FoldCount)
#endif
#if FOLD_WANTED(3)
FOLD_ALL_OF(FoldAny)
FOLD_ALL_OF(FoldAll)
FOLD_FLOATS_OF(FoldLogsumexp)
#endif
#if FOLD_WANTED(4)
FOLD_FLOATS_OF(FoldVar)
FOLD_FLOATS_OF(FoldStd)
FOLD_FLOATS_OF(FoldTrue)
#endif
#if FOLD_WANTED(5)
FOLD_FLOATS_OF(FoldAbs)
FOLD_FLOATS_OF(FoldSquare)
FOLD_FLOATS_OF(FoldPower)
FOLD_FLOATS_OF(FoldMaxAbs)
FOLD_FLOATS_OF(FoldMinAbs)
#endif
#undef FOLD_ALL_OF
#undef FOLD_FLOATS_OF
#undef FOLD_WANTED
