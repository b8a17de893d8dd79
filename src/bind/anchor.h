/* What function.c needs of anchor.c: the context of an mf.Function in the anchors of its outputs.
 */
#ifndef MF_BIND_ANCHOR_H
#define MF_BIND_ANCHOR_H
#include "state.h"

/* Pushes a list of anchors for outputs of function node `seq`: one that holds the context at stack
 * index `ctx`, and those of the tensors in the table at `inputs`. */
void bind_anchor_context(State *S, lua_State *L, uint64_t seq, int ctx, int inputs);
/* The tensor at an index gets the anchors in the list at `list` besides its own. */
void bind_set_anchors(State *S, lua_State *L, int index, int list);
/* During a pass: pushes the context of function node `seq`; false (and a nil) when there is none.
 */
bool bind_push_context(State *S, lua_State *L, uint64_t seq);

#endif
