/* The launcher's options on the command line of `moonflow`.
 *
 * They stand before the script, among the others, and are taken out, so that each rank is started
 * with the rest. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"

/* X(name, how its value is kept) */
typedef enum OptionKind { KIND_COUNT, KIND_TEXT } OptionKind;
typedef struct Option {
  const char *name;
  OptionKind kind;
  int least;
  size_t offset; /* in LaunchJob */
} Option;

static const Option known[] = {
    {"-n", KIND_COUNT, 1, offsetof(LaunchJob, ranks)},
    {"--nnodes", KIND_COUNT, 1, offsetof(LaunchJob, nodes)},
    {"--node-rank", KIND_COUNT, 0, offsetof(LaunchJob, node)},
    {"--max-restarts", KIND_COUNT, 0, offsetof(LaunchJob, max_restarts)},
    {"--master", KIND_TEXT, 0, offsetof(LaunchJob, master)},
    {"--log-dir", KIND_TEXT, 0, offsetof(LaunchJob, log_dir)},
};

/* The option that an argument names, "--name" or "--name=value"; *value is then what follows. */
static const Option *find(const char *arg, const char **value) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    size_t n = strlen(known[i].name);
    if (strncmp(arg, known[i].name, n)) continue;
    if (arg[n] && (arg[n] != '=' || arg[1] != '-')) continue;
    *value = arg[n] ? arg + n + 1 : NULL;
    return &known[i];
  }
  return NULL;
}

static bool store(const Option *o, const char *value, LaunchJob *job) {
  void *to = (char *)job + o->offset;
  if (o->kind == KIND_TEXT) {
    memcpy(to, &value, sizeof value);
    return *value;
  }
  char *end;
  long n = strtol(value, &end, 10);
  if (end == value || *end || n < o->least || n > 4096) return false;
  *(int *)to = (int)n;
  return true;
}

/* What stdin is for: see main.c, which does the same with one process. */
static void find_input(LaunchJob *job, bool interactive, bool does_other, const char *script) {
  bool terminal = isatty(STDIN_FILENO);
  job->idle = !does_other && !script;
  job->prompts = interactive || (job->idle && terminal);
  job->input = script ? !strcmp(script, "-") : job->idle && !job->prompts;
}

bool launch_options(int *argc, char **argv, LaunchJob *job, const char **key_path,
                    const char **wrong) {
  int kept = 1, i = 1;
  bool any = false, interactive = false, does_other = false;
  *job = (LaunchJob){.ranks = 1, .nodes = 1};
  *key_path = *wrong = NULL;
  for (; i < *argc && argv[i][0] == '-' && argv[i][1] && strcmp(argv[i], "--"); i++) {
    const char *value = NULL;
    const Option *o = find(argv[i], &value);
    bool makes_key = !strcmp(argv[i], "--make-key");
    if (!o && !makes_key) {
      interactive |= argv[i][1] == 'i';
      does_other |= strchr("ev", argv[i][1]) != NULL;
      bool pair = argv[i][1] != '-' && strchr("elj", argv[i][1]) && !argv[i][2];
      argv[kept++] = argv[i];
      if (pair && i + 1 < *argc) argv[kept++] = argv[++i];
      continue;
    }
    any = true;
    const char *name = argv[i];
    if (!value) value = i + 1 < *argc ? argv[++i] : NULL;
    if (makes_key) *key_path = value;
    if (!value || (o && !store(o, value, job))) *wrong = name;
  }
  int script = i < *argc && !strcmp(argv[i], "--") ? i + 1 : i;
  find_input(job, interactive, does_other, script < *argc ? argv[script] : NULL);
  while (i < *argc) argv[kept++] = argv[i++];
  argv[kept] = NULL;
  *argc = kept;
  job->argv = argv;
  if (any && !*wrong && !*key_path) {
    if (job->node >= job->nodes) *wrong = "--node-rank";
    else if (job->nodes > 1 && !job->master) *wrong = "--master";
  }
  return any;
}
