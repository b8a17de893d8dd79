/* A vendor's library that is opened when it is needed first, so that a machine without it runs what
 * needs none of it. */
#ifndef MF_VENDOR_LIBRARY_H
#define MF_VENDOR_LIBRARY_H
#include <dlfcn.h>

/* The first of these names that can be opened; NULL: none. */
static inline void *library_open(const char *const *names) {
  void *l = NULL;
  for (; *names && !l; names++) l = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
  return l;
}

/* f of type F from the library; false where it has none of that name. */
template <class F>
static inline bool library_find(void *library, const char *name, F **f) {
  *f = library ? (F *)dlsym(library, name) : NULL;
  return *f != NULL;
}

#endif
