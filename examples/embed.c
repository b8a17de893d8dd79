/* A C program that trains a small network in Lua and asks it from C. With an installed moonflow:
 *
 *   cc embed.c $(pkg-config --cflags --libs moonflow) -o embed && ./embed
 */
#include <moonflow.h>
#include <stdio.h>

static const char script[] =
    "local mf = require 'moonflow'\n"
    "local nn, optim = mf.nn, mf.optim\n"
    "mf.manual_seed(1)\n"
    "local model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))\n"
    "local opt = optim.Adam(model:parameters(), { lr = 0.05 })\n"
    "function train(x, y, steps)\n"
    "  local loss\n"
    "  for _ = 1, steps do\n"
    "    opt:zero_grad()\n"
    "    loss = mf.mse_loss(model(x), y)\n"
    "    loss:backward()\n"
    "    opt:step()\n"
    "  end\n"
    "  return loss:item()\n"
    "end\n"
    "function ask(x) return mf.no_grad(function() return model(x) end) end\n";

static int failed(void) {
  fprintf(stderr, "%s\n", mf_last_error());
  return 1;
}

/* Exclusive or. */
static int run(mf_state *state) {
  const float x[4][2] = {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, y[4] = {0, 1, 1, 0};
  const int64_t x_shape[2] = {4, 2}, y_shape[2] = {4, 1};
  mf_value in[3] = {
      {.kind = MF_TENSOR}, {.kind = MF_TENSOR}, {.kind = MF_NUMBER, .as.number = 300}};
  mf_value loss, answer;
  if (mf_tensor_create(state, MF_FLOAT32, 2, x_shape, x, &in[0].as.tensor)) return failed();
  if (mf_tensor_create(state, MF_FLOAT32, 2, y_shape, y, &in[1].as.tensor)) return failed();
  if (mf_dostring(state, script, "embed")) return failed();
  if (mf_call(state, "train", 3, in, 1, &loss)) return failed();
  if (mf_call(state, "ask", 1, in, 1, &answer)) return failed();
  const float *p = mf_tensor_data(answer.as.tensor);
  printf("loss %.5f\n", loss.as.number);
  for (int i = 0; i < 4; i++) printf("%g xor %g = %.2f\n", x[i][0], x[i][1], p[i]);
  mf_tensor_release(answer.as.tensor);
  mf_tensor_release(in[0].as.tensor);
  mf_tensor_release(in[1].as.tensor);
  return 0;
}

int main(void) {
  mf_context *context;
  mf_state *state;
  if (mf_context_create(NULL, &context)) return failed();
  if (mf_state_create(context, NULL, &state)) return failed();
  int code = run(state);
  mf_state_destroy(state);
  mf_context_destroy(context);
  return code;
}
