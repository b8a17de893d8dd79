/* Gradients that are averaged over ranks while a backward pass goes on; see buckets.c. */
#ifndef MF_BUCKETS_H
#define MF_BUCKETS_H
#include "comm.h"
#include "eager.h"

typedef struct Buckets Buckets;

/* For n leaves, whose names errors tell; sparse[i]: i's gradients are row-sparse; find_unused:
 * leaves may get no gradient, on some ranks or on all. All ranks of the group do the same. NULL
 * with the error set. */
Buckets *buckets_create(Eager *E, CommGroup *g, int n, Tensor *const *leaves,
                        const char *const *names, const bool *sparse, bool find_unused);
/* Waits for the thread. NULL is ignored. */
void buckets_destroy(Buckets *b);

/* Which leaf's gradients travel together, in the order in which they are expected: sizes[i] entries
 * of `order`, which has each leaf once, for bucket i. Leaves of one bucket have one dtype; a sparse
 * one is alone. Not between a gradient and the last one of its pass. */
int buckets_arrange(Buckets *b, int n_buckets, const int *sizes, const int *order);

/* The next backward pass averages; it begins at some of `outputs`, which only matter to find
 * unused leaves. */
int buckets_begin(Buckets *b, int n_outputs, Tensor *const *outputs);
/* The next backward pass leaves the gradients of this rank as they are. */
void buckets_begin_local(Buckets *b);
/* The leaves in the order of their gradients in the last pass that averaged, or NULL. */
const int *buckets_order(const Buckets *b);
int buckets_count(const Buckets *b);

/* Of the tape: this leaf's gradient is whole. 0 or a code. */
int buckets_take(Tensor *leaf);
/* The pass ends with this code: waits for what it began. */
int buckets_end_pass(Eager *E, int code);

#endif
