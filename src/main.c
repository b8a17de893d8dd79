/* The program moonflow: its options are those of lua and luajit. Parses them, opens a state, runs
 * what they ask for in their order. Ctrl-C interrupts the running code; twice within a second, it
 * ends the program. */
#define _DEFAULT_SOURCE /* on_exit */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>
#include <unistd.h>

#include "launch.h"
#include "program.h"

static const char SPINS[] = "10000"; /* libgomp's own: 300,000 */
enum { EXIT_ERROR = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

typedef struct Options {
  int script; /* index in argv of the script's name; argc: none */
  bool interactive, version, no_environment, has_chunk;
  int channel; /* on which a rank asks for the lines of its prompt; -1 */
} Options;

/* What the signal handler must know. Written before the handler is installed. */
static mf_state *running;
static mf_context *joined; /* of which the end must know */
static pthread_t main_thread;

/* Lua's os.exit ends the process from within. */
static void on_end(int status, void *unused) {
  (void)unused;
  if (joined) program_leave(joined, status);
}

static void on_interrupt(int signal) {
  static volatile sig_atomic_t last;
  if (!pthread_equal(pthread_self(), main_thread)) {
    pthread_kill(main_thread, signal); /* only the state's own thread may set its hook */
    return;
  }
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (last && now.tv_sec * 10 + now.tv_nsec / 100000000 - last < 10) _exit(EXIT_INTERRUPTED);
  last = (sig_atomic_t)(now.tv_sec * 10 + now.tv_nsec / 100000000);
  mf_state_interrupt(running);
}

/* Without SA_RESTART, so that a read from the terminal returns. */
static void catch_interrupts(mf_state *state) {
  running = state;
  main_thread = pthread_self();
  struct sigaction action = {.sa_handler = on_interrupt};
  sigaction(SIGINT, &action, NULL);
  if (getenv("MOONFLOW_LAUNCHED")) sigaction(SIGTERM, &action, NULL); /* says what it waited for */
}

/* On stdout when asked for, and on stderr after an error. */
static int usage(const char *wrong) {
  bool asked = !strcmp(wrong, "--help") || !strcmp(wrong, "-h");
  if (!asked) fprintf(stderr, "moonflow: unknown option or missing argument: %s\n", wrong);
  fputs(
      "usage: moonflow [options] [script [arguments]]\n"
      "  -e chunk    run this text\n"
      "  -l name     require this module\n"
      "  -i          prompt after the script\n"
      "  -j command  control the JIT compiler: on, off, v, dump=...\n"
      "  -O flags    control its optimisations\n"
      "  -v          show the version\n"
      "  -h, --help  show this\n"
      "  -E          ignore environment variables\n"
      "  -n N        run as N ranks; --log-dir DIR, --max-restarts K; with -i or alone a\n"
      "              prompt whose lines run on all; on several hosts with\n"
      "              --nnodes M --node-rank I --master HOST:PORT, and MOONFLOW_KEY_FILE set to a\n"
      "              file that --make-key FILE made\n"
      "  --          end of options\n"
      "  -           run stdin as a script\n"
      "Without a script, chunks or -v: a prompt, or stdin as a script when it is no terminal.\n",
      asked ? stdout : stderr);
  return asked ? 0 : EXIT_USAGE;
}

/* Fills o; returns the wrong option, or NULL. */
static const char *parse(int argc, char **argv, Options *o) {
  int i = 1;
  for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
    const char *a = argv[i];
    char letter = a[1];
    if (!strcmp(a, "--")) {
      i++;
      break;
    }
    if (strchr("ivE", letter)) {
      if (a[2]) return a;
      o->interactive |= letter == 'i';
      o->version |= letter != 'E';
      o->no_environment |= letter == 'E';
    } else if (strchr("elj", letter)) {
      o->has_chunk |= letter == 'e';
      if (!a[2] && ++i >= argc) return a;
    } else if (letter != 'O') {
      return a;
    }
  }
  o->script = i;
  return NULL;
}

/* Runs -e, -l, -j and -O in their order. */
static ProgramResult run_options(mf_state *s, char **argv, int n) {
  ProgramResult result = PROGRAM_OK;
  for (int i = 1; i < n && result == PROGRAM_OK; i++) {
    char letter = argv[i][1];
    if (!letter || !strchr("eljO", letter)) continue;
    const char *value = argv[i][2] || letter == 'O' ? argv[i] + 2 : argv[++i];
    result = letter == 'e'   ? program_chunk(s, value)
             : letter == 'l' ? program_require(s, value)
             : letter == 'j' ? program_jit(s, value)
                             : program_optimise(s, value);
  }
  return result;
}

static void print_version(bool prompt) {
  printf("moonflow %s%s\n", mf_version(),
         prompt ? "   help() tells more, quit() or Ctrl-D leaves" : "");
}

static ProgramResult run(mf_state *s, const Options *o, int argc, char **argv) {
  bool has_script = o->script < argc;
  program_set_arg(s, argc, argv, has_script ? o->script : 0);
  program_offer_module(s);
  if (o->version && o->channel < 0) print_version(false);
  ProgramResult result = o->no_environment ? PROGRAM_OK : program_init(s);
  if (result == PROGRAM_OK) result = run_options(s, argv, o->script);
  if (result != PROGRAM_OK) return result;
  bool idle = !has_script && !o->has_chunk && !o->version;
  bool terminal = o->channel >= 0 || isatty(STDIN_FILENO);
  const char *path = has_script && strcmp(argv[o->script], "-") ? argv[o->script] : NULL;
  if (has_script || (idle && !terminal)) result = program_script(s, path);
  if (o->interactive || (idle && terminal)) {
    if (idle && o->channel < 0) print_version(true);
    program_offer_module(s);
    return program_prompt(s, o->channel);
  }
  return result;
}

/* The launcher's options: the exit status, or -1 when there are none. */
static int launch(int *argc, char **argv) {
  LaunchJob job;
  const char *key_path, *wrong;
  if (!launch_options(argc, argv, &job, &key_path, &wrong)) return -1;
  if (wrong) return usage(wrong);
  if (!key_path) {
    if (job.prompts) print_version(true);
    fflush(stdout);
    return launch_run(&job);
  }
  if (!launch_make_key(key_path)) return 0;
  fprintf(stderr, "moonflow: %s\n", mf_last_error());
  return EXIT_ERROR;
}

/* libgomp's threads spin for long before they sleep, and where other programs want the processors
 * too, they spend their turns on it while the threads they wait for have none. It reads how long
 * before main begins, so the program starts once more, unless the user has said, or has started it
 * through the loader, which would be started instead. */
static void spin_briefly(char **argv) {
  char path[4096];
  if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || !getauxval(AT_BASE)) return;
  ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  if (n <= 0 || setenv("GOMP_SPINCOUNT", SPINS, 1)) return;
  path[n] = 0;
  execv(path, argv);
  unsetenv("GOMP_SPINCOUNT"); /* the file may be gone: it is left as it is */
}

int main(int argc, char **argv) {
  spin_briefly(argv);
  Options o = {.channel = launch_channel()};
  int status = launch(&argc, argv);
  if (status >= 0) return status;
  const char *wrong = parse(argc, argv, &o);
  if (wrong) return usage(wrong);
  if (getenv("MOONFLOW_LAUNCHED")) setvbuf(stdout, NULL, _IOLBF, 0); /* lines, as they come */
  mf_context *context;
  mf_state *state;
  mf_state_config config = {.struct_size = sizeof config, .ignore_environment = o.no_environment};
  if (mf_context_create(NULL, &context) || mf_state_create(context, &config, &state)) {
    fprintf(stderr, "moonflow: %s\n", mf_last_error());
    return EXIT_ERROR;
  }
  catch_interrupts(state);
  joined = context;
  on_exit(on_end, NULL);
  ProgramResult result = run(state, &o, argc, argv);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  mf_state_destroy(state);
  joined = NULL;
  mf_context_destroy(context);
  return result == PROGRAM_OK ? 0 : result == PROGRAM_INTERRUPTED ? EXIT_INTERRUPTED : EXIT_ERROR;
}
