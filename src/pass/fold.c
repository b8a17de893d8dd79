#include "pass.h"

void pass_fold(Graph *g, const PassSettings *s) {
  (void)g, (void)s;
}
