/* Finding out which rank of which job this process is; see place.c. */
#ifndef MF_PLACE_H
#define MF_PLACE_H
#include "comm.h"

/* As the environment says; join.master, key and host point into it. */
typedef struct LaunchPlace {
  CommJoin join;
  int local_rank, local_size;
  char master[300], key[COMM_KEY_BYTES];
} LaunchPlace;

/* Reads the environment of moonflow -n, torchrun, mpirun or srun; a job of one rank when there is
 * none of them. 0 or a code. */
int launch_place(LaunchPlace *p);

#endif
