#include "profile.h"

#include <pthread.h>
#include <time.h>

#include "vec.h"

struct Profile {
  pthread_mutex_t lock;
  VEC(ProfileEvent) events;
  size_t lost;
};

Profile *profile_create(void) {
  Profile *p = mem_zalloc(sizeof *p);
  if (p) pthread_mutex_init(&p->lock, NULL);
  return p;
}

void profile_add(Profile *p, const ProfileEvent *event) {
  pthread_mutex_lock(&p->lock);
  if (!vec_push(&p->events, *event)) p->lost++;
  pthread_mutex_unlock(&p->lock);
}

const ProfileEvent *profile_events(const Profile *p, size_t *n, size_t *lost) {
  *n = p->events.n;
  *lost = p->lost;
  return p->events.at;
}

void profile_destroy(Profile *p) {
  if (!p) return;
  pthread_mutex_destroy(&p->lock);
  vec_free(&p->events);
  mem_free(p);
}

int64_t profile_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
