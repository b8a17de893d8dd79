/* Starting and watching the processes of a job's ranks. */
#ifndef MF_LAUNCH_H
#define MF_LAUNCH_H
#include <stdbool.h>

typedef struct LaunchJob {
  int ranks; /* of this node */
  int nodes, node;
  const char *master;  /* "host:port"; NULL: loopback and a free port, for one node */
  const char *log_dir; /* NULL: output goes on, with "[rank 1] " before each line */
  int max_restarts;
  bool prompts; /* a prompt for all ranks, on stdin and stdout */
  bool idle;    /* that is all they do */
  bool input;   /* each rank reads all that comes on stdin */
  char **argv;  /* what each rank runs; NULL at the end */
} LaunchJob;

/* Runs the job to its end; the program's exit status. Reports on stderr. */
int launch_run(const LaunchJob *job);

/* Writes a fresh key into a new file that only its owner can read. 0 or a code. */
int launch_make_key(const char *path);

/* Reads the launcher's options among those before the script. False when there are none. Else *argv
 * lacks them, and *wrong is the one that is not understood, or NULL. --make-key is in *key_path. */
bool launch_options(int *argc, char **argv, LaunchJob *job, const char **key_path,
                    const char **wrong);

/* -- For a rank: the prompt of all; see terminal.c --------------------------------------------- */

typedef enum LaunchAnswer {
  ANSWER_LINE = 'L',  /* with its text */
  ANSWER_DROP = 'D',  /* the user wants to drop the input so far */
  ANSWER_END = 'E',   /* there is no more */
  ANSWER_RENEW = 'R', /* comm_renew, then ask again */
} LaunchAnswer;

/* The channel on which this process asks for its lines; -1: it is no such rank. Once. */
int launch_channel(void);
/* Waits for the next line; failed: this rank's communication has. interrupted(arg): a signal came
 * meanwhile. The text is the caller's to free; NULL: no memory. */
char *launch_ask(int channel, const char *prompt, bool failed, void (*interrupted)(void *),
                 void *arg, LaunchAnswer *kind);

#endif
