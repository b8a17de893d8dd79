/* A compiled step: a function's trace, made into a plan that runs. One per function and form of
 * arguments; which one a call needs, its caller decides.
 *
 *   Job *j = job_begin(E, "step");              the state records from here on
 *   Tensor *x = job_input(j, like);             once per tensor argument, in order
 *   ... the function, on such tensors ...
 *   job_finish(j, n, results, settings)         compiles; the state executes again
 *   job_run(j, n_in, in, out)                   as often as wanted
 */
#ifndef MF_JOB_H
#define MF_JOB_H
#include "eager.h"

typedef struct Job Job;
typedef struct Str Str;
typedef struct PassSettings PassSettings;
typedef struct PlanOptions PlanOptions;

/* `times`: of how many micro-batches the step consists. NULL with the error set. */
Job *job_begin(Eager *E, const char *name, int times);
/* `repeated`: whole in each micro-batch, as single numbers are; otherwise its dim 0 is shared out.
 */
Tensor *job_input(Job *j, const Tensor *like, bool repeated);
/* What is traced from here on is computed anew in the backward, until job_segment with what this
 * returns; see trace.h. x is needed behind it. */
int job_segment(Job *j, int segment);
int job_keep(Job *j, Tensor *x);
/* `s` says which passes run and who looks; where kernels run is filled in. */
int job_finish(Job *j, int n, Tensor *const *results, PassSettings *s, const PlanOptions *o);
/* The function failed: the state executes again; what is left is job_destroy. */
void job_abandon(Job *j);
int job_n_results(const Job *j);
/* Whether tensors that it uses as leaves require a gradient as they did when it was compiled, and
 * those whose gradient it adds to have the same one; else the call needs another step. */
bool job_fits(const Job *j);
/* Runs the step; out[k] are new tensors, counted. */
int job_run(Job *j, int n_in, Tensor *const *in, Tensor **out);
/* The graph as it was planned, as text and for Graphviz. */
void job_print(Job *j, Str *out);
void job_dot(Job *j, Str *out);
/* The plan as text, and what its memory is taken by. */
void job_print_plan(Job *j, Str *out);
void job_print_memory(Job *j, Str *out);
/* Captured tensor k, the name of its port, and whether the step writes it; NULL behind the last. */
Tensor *job_capture(const Job *j, int k, const char **name, bool *written);
/* The value that cell k has now; false behind the last. */
bool job_cell(const Job *j, int k, double *value);
/* A step from a plan's text; captures[k] for its k-th port, cells[k] for its k-th cell. NULL with
 * the error set. */
Job *job_from_plan(Eager *E, const char *text, int n_captures, Tensor *const *captures, int n_cells,
                   const double *cells);
void job_destroy(Job *j);

/* -- Flows: a step over a source of batches ---------------------------------------------------- */

typedef struct JobTensor {
  Meta m;
  Storage *storage; /* the batch's */
} JobTensor;

/* Where batches come from. peek, take and the rest are called from one thread at a time, which is
 * one of the flow's while it is open; wake from any. */
typedef struct JobSource {
  void *ud;
  /* Waits for the next batch and shows its tensors; they live until it is dropped. 0; JOB_END:
   * there is no more; or a code, also when stopped(arg), which it asks again at each wake. */
  int (*peek)(void *ud, bool (*stopped)(void *arg), void *arg, int *n, const JobTensor **tensors);
  void *(*take)(void *ud);                 /* the batch that peek showed */
  void (*put_back)(void *ud, void *batch); /* it comes next again */
  void (*drop)(void *ud, void *batch);
  void (*wake)(void *ud);
  void (*release)(void *ud); /* the flow needs it no more */
} JobSource;

enum { JOB_END = -1 };

/* The step runs over the batches of `s`, which is the flow's from here on: threads take them, copy
 * them in and run the step, as far ahead of each other as there are `buffers`. Only a job that was
 * traced has flows, and one at a time. */
int job_open_flow(Job *j, const JobSource *s, int buffers);
/* One more step, as if it was called here. Waits until its batch is there, but not for the step:
 * out[k] are tensors, counted, for which whoever reads them waits, as for what the step captures.
 * JOB_END: no batch is left that is like the first; or a code, then and in later calls, that of the
 * source or of a step. */
int job_flow_next(Job *j, Tensor **out);
/* How many batches were taken, copied in, and how many steps' results are there. */
void job_flow_counts(const Job *j, uint64_t counts[3]);
/* Waits for the steps; batches of which no step was asked for go back. 0, or the code of a step
 * that nobody was told. */
int job_close_flow(Job *j);

#endif
