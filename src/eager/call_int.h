/* What the files of the dispatcher share. */
#ifndef MF_CALL_INT_H
#define MF_CALL_INT_H
#include "eager.h"

enum { CALL_SMALL = 16 }; /* calls of more inputs need memory for lists of them */

/* -- Of write.c, in the order of a call that writes -------------------------------------------- */

/* Operands in the written memory are read from copies, but for those of an elementwise op at the
 * same place: c->in becomes `copies`, all counted. */
int call_separate(Eager *E, EagerCall *c, Tensor **copies);
/* Whether a result of this meta may be written into c->into. */
int call_check_into(EagerCall *c, const Meta *result);
int call_before_write(Eager *E, EagerCall *c, bool tracked);
int call_after_write(Eager *E, EagerCall *c);

/* The name of flattened input k, "xs[2]" in a list; into buf. */
const char *call_input_name(const EagerCall *c, int k, char *buf, size_t n);
/* The same of the input that is t. */
const char *call_name_of(const EagerCall *c, const Tensor *t, char *buf, size_t n);

#endif
