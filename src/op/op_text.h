/* What graphs and plans print alike: arguments of ops and metas of tensors. */
#ifndef MF_OP_TEXT_H
#define MF_OP_TEXT_H
#include "op.h"
#include "scan.h"
#include "str.h"

/* The arguments that differ from the op's defaults: "dim=[1, 2], keepdim=true"; nothing when none
 * do. Of a list of tensors the length is printed, of a generator seed and stream: "generator=0:3".
 */
void op_print_args(const Op *op, const void *args, Str *out);
/* Reads that into `args`; stops before what is no "name=". */
void op_scan_args(Scan *s, const Op *op, void *args);

/* "float32(2, 3)", then what is unusual: "/(1, 2)" strides, "+4" the offset, "@meta" the device,
 * "!" a plain number. */
void op_print_meta(const Meta *m, Str *out);
void op_scan_meta(Scan *s, Meta *m);

/* The op of that name; an error names similar ones. */
const Op *op_scan_name(Scan *s);

#endif
