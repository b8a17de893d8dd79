/* What the files of the tape share. */
#ifndef MF_TAPE_INT_H
#define MF_TAPE_INT_H
#include "tape.h"

/* -- tape.c ------------------------------------------------------------------------------------ */

/* A node with room for n_dims sizes in its metas and for n_saved kept tensors (all or none); next
 * and saved are empty. */
Node *tape_node_new(Eager *E, NodeKind kind, const Op *op, int n_in, int n_out, int n_saved,
                    int n_dims, const void *args);
/* Fills in a meta of n, with the node's room for the shape. */
void tape_meta(Node *n, GradMeta *g, const Tensor *t);
static inline Node *tape_node_retain(Node *n) {
  if (n) n->refs++;
  return n;
}

/* -- view.c ------------------------------------------------------------------------------------ */

/* Brings t's node up to date after in-place writes to its base. */
int tape_refresh(Eager *E, Tensor *t);
/* `written` was changed in place by node n, as its output `output`. */
int tape_rebase(Eager *E, Tensor *written, Node *n, int output);
int tape_run_view(Eager *E, Node *n, Tensor *const *gout, Tensor **gin);
int tape_run_copy_slices(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin);

/* -- global.c ---------------------------------------------------------------------------------- */

int tape_run_box(Eager *E, Node *n, Tensor *const *gout, Tensor **gin);

/* -- gradient.c: the gradients of one node ----------------------------------------------------- */

int tape_run_node(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin);
/* Runs the gradient lines of an op. */
int tape_run_op(Eager *E, Node *n, Tensor *const *gout, const bool *need, Tensor **gin);
/* Brings a gradient to the shape of input k (sums over what was broadcast) and its dtype. */
int tape_fit(Eager *E, const Node *n, int k, Tensor **g);
/* Gives back what the node kept. */
void tape_give_back(Node *n);

#endif
