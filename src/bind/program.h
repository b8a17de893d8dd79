/* What the program `moonflow` needs of Lua, so that main.c needs no Lua header. Every function that
 * runs Lua code reports an error on stderr, with a traceback, before it returns. */
#ifndef MF_PROGRAM_H
#define MF_PROGRAM_H
#include <stdbool.h>

#include "moonflow.h"

typedef enum ProgramResult { PROGRAM_OK, PROGRAM_FAILED, PROGRAM_INTERRUPTED } ProgramResult;

/* The global `arg`: argv[script] is arg[0], what comes before has negative indices. */
void program_set_arg(mf_state *s, int argc, char **argv, int script);

/* LUA_INIT: a chunk, or a file after '@'. */
ProgramResult program_init(mf_state *s);
ProgramResult program_chunk(mf_state *s, const char *text);
ProgramResult program_require(mf_state *s, const char *module);
/* -j: on, off, flush, or a module of jit.* with its options, "v=file". -O: the optimiser's flags.
 */
ProgramResult program_jit(mf_state *s, const char *command);
ProgramResult program_optimise(mf_state *s, const char *flags);

/* Runs a file, or stdin when `path` is NULL, with arg[1], arg[2], ... as its arguments. */
ProgramResult program_script(mf_state *s, const char *path);

/* Reads, evaluates and prints until the end of stdin; of a rank, on whose channel the lines come
 * (launch.h), else -1. */
ProgramResult program_prompt(mf_state *s, int channel);

/* Lets chunks use `mf` without requiring it. The module is loaded when one does. Ended by
 * program_script. */
void program_offer_module(mf_state *s);

/* Before the process ends with this status, for a script may end it at any place: leaves the job,
 * or fails it when the status is not 0. */
void program_leave(mf_context *context, int status);

#endif
