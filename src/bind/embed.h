/* The files of lua/ as text, made by embed.lua; a last entry with name NULL. */
#ifndef MF_EMBED_H
#define MF_EMBED_H
#include <stddef.h>

typedef struct EmbedModule {
  const char *name, *text;
  size_t size;
} EmbedModule;

extern const EmbedModule embed_modules[];

#endif
