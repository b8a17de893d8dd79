/* What the files of this folder share. */
#ifndef MF_PLAN_INT_H
#define MF_PLAN_INT_H
#include "op_text.h"
#include "plan.h"

#endif
