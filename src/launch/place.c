/* Which rank of which job this process is, as its launcher says in the environment.
 *
 *   moonflow -n, torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
 *   mpirun (Open MPI)       OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK
 *   mpirun (MPICH)          PMI_RANK, PMI_SIZE, MPI_LOCALRANKID
 *   srun                    SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID
 *
 * mpirun and srun name no meeting place: on one host it is loopback, at a port made from the job's
 * id; else the first host of Slurm's list, or what MASTER_ADDR and MASTER_PORT say. torchrun's own
 * store listens at its MASTER_PORT, so the next port is taken there.
 *
 * The job's key comes from MOONFLOW_KEY_FILE, or MOONFLOW_KEY, never from the command line, which
 * everybody on the host can read. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "err.h"
#include "launch.h"
#include "place.h"

typedef struct Launcher {
  const char *rank, *size, *local_rank, *local_size;
  const char *job; /* an id that all ranks of a job share */
} Launcher;

static const Launcher launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_FD"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
     "SLURM_JOB_ID"},
};
enum { LAUNCHERS = sizeof launchers / sizeof *launchers };

static bool has(const char *name) {
  const char *v = getenv(name);
  return v && *v;
}

/* A whole number of the environment; `otherwise` when it is not there. */
static int read_number(const char *name, int least, int otherwise, int *out) {
  const char *v = getenv(name);
  *out = otherwise;
  if (!v || !*v) return 0;
  char *end;
  errno = 0;
  long n = strtol(v, &end, 10);
  if (*end || errno || n < least || n > 1 << 20)
    return err_set(MF_EINVAL, "launch: %s must be a whole number from %d, is '%.40s'", name, least,
                   v);
  *out = (int)n;
  return 0;
}

/* The first of "node[03-05,9],other". */
static void first_host(const char *list, char *host, size_t n) {
  size_t stem = strcspn(list, "[,");
  snprintf(host, n, "%.*s", (int)stem, list);
  if (list[stem] == '[') {
    const char *number = list + stem + 1;
    size_t at = strlen(host);
    snprintf(host + at, n - at, "%.*s", (int)strcspn(number, "-,]"), number);
  }
}

/* A port that all ranks of a job derive from its id. */
static int port_of(const Launcher *l) {
  const char *id = getenv(l->job), *step = getenv("SLURM_STEP_ID");
  unsigned h = 5381;
  for (const char *c = id ? id : ""; *c; c++) h = h * 33 + (unsigned char)*c;
  for (const char *c = step ? step : ""; *c; c++) h = h * 33 + (unsigned char)*c;
  return 20000 + (int)(h % 12000);
}

static int find_master(LaunchPlace *p, const Launcher *l) {
  char host[256] = "";
  const char *named = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
  if (named) snprintf(host, sizeof host, "%.255s", named);
  else if (p->local_size == p->join.size) strcpy(host, "127.0.0.1");
  else if (nodes) first_host(nodes, host, sizeof host);
  if (!*host)
    return err_set(
        MF_EINVAL,
        "launch: the ranks are on several hosts; set MASTER_ADDR to the host of rank 0 and "
        "MASTER_PORT to a free port there");
  int port, code = read_number("MASTER_PORT", 1, port_of(l), &port);
  if (code) return code;
  const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
  if (agent && !strcmp(agent, "True")) port++;
  snprintf(p->master, sizeof p->master, "%s:%d", host, port);
  p->join.master = p->master;
  return 0;
}

/* -- Keys -------------------------------------------------------------------------------------- */

static int read_key(LaunchPlace *p) {
  const char *path = getenv("MOONFLOW_KEY_FILE"), *key = getenv("MOONFLOW_KEY");
  char text[COMM_KEY_BYTES + 2] = "";
  if (path && *path) {
    struct stat s;
    int f = open(path, O_RDONLY | O_CLOEXEC);
    if (f < 0) return err_set(MF_EIO, "launch: the key file %s: %s", path, strerror(errno));
    bool open_to_others = !fstat(f, &s) && s.st_mode & 077;
    ssize_t n = read(f, text, sizeof text - 1);
    close(f);
    if (open_to_others)
      return err_set(MF_EIO, "launch: others can read the key file %s; chmod 600 it", path);
    text[n > 0 ? strcspn(text, "\n") : 0] = 0;
    key = text;
  }
  if (!key || !*key) return 0;
  if (strlen(key) != COMM_KEY_BYTES - 1)
    return err_set(MF_EINVAL, "launch: %s holds no key; `moonflow --make-key FILE` makes one",
                   key == text ? path : "MOONFLOW_KEY");
  memcpy(p->key, key, COMM_KEY_BYTES);
  p->join.key = p->key;
  return 0;
}

int launch_make_key(const char *path) {
  char key[COMM_KEY_BYTES + 1];
  int code = comm_make_key(key);
  if (code) return code;
  int f = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  key[COMM_KEY_BYTES - 1] = '\n';
  bool ok = f >= 0 && write(f, key, COMM_KEY_BYTES) == COMM_KEY_BYTES;
  if (!ok)
    code = err_set(MF_EIO, "launch: cannot write the new file %s: %s", path, strerror(errno));
  if (f >= 0) close(f);
  return code;
}

/* -- The place --------------------------------------------------------------------------------- */

static int check_place(const LaunchPlace *p) {
  if (p->join.rank < p->join.size) return 0;
  return err_set(MF_EINVAL, "launch: the environment says rank %d of %d", p->join.rank,
                 p->join.size);
}

int launch_place(LaunchPlace *p) {
  *p = (LaunchPlace){.join = {.size = 1, .listen_fd = -1}, .local_size = 1};
  const Launcher *l = launchers;
  while (l < launchers + LAUNCHERS && !(has(l->rank) && has(l->size))) l++;
  if (l == launchers + LAUNCHERS) return 0;
  int code = read_number(l->rank, 0, 0, &p->join.rank);
  if (!code) code = read_number(l->size, 1, 1, &p->join.size);
  if (!code) code = read_number(l->local_rank, 0, p->join.rank, &p->local_rank);
  if (!code) code = read_number(l->local_size, 1, p->join.size, &p->local_size);
  int nodes = 1;
  if (!code && strstr(l->rank, "SLURM")) code = read_number("SLURM_STEP_NUM_NODES", 1, 1, &nodes);
  if (nodes > 1 && p->local_size == p->join.size)
    p->local_size = (p->join.size + nodes - 1) / nodes;
  if (!code) code = check_place(p);
  if (code || p->join.size == 1) return code;
  code = find_master(p, l);
  if (!code) code = read_key(p);
  if (!code) code = read_number("MOONFLOW_LISTEN_FD", 0, -1, &p->join.listen_fd);
  if (p->join.rank) p->join.listen_fd = -1;
  p->join.host = has("MOONFLOW_HOST") ? getenv("MOONFLOW_HOST") : NULL;
  return code;
}
