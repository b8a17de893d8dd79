# The libraries of CUDA devices: `make cuda` (nvcc), `make emulate` (a host compiler).
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_ARCHS ?= 75 80 90 100
KERNELS := $(wildcard kernels/*.cu)
KERNEL_HEADERS := $(wildcard kernels/*.cuh kernels/*.h kernels/emulate/*.h) $(patsubst %,$(GEN)/kernels/%_lines.h,pointwise loss)
KERNEL_SEES := $(patsubst %,-Isrc/%,base tensor device comm op) -Ikernels -I$(GEN)/op -I$(GEN)/kernels
EMULATE_CXX ?= $(if $(findstring clang,$(CC)),clang++,g++)
EMULATE_FLAGS := -std=gnu++20 -O1 -g1 -fPIC -fvisibility=hidden -pthread -Wall -Wextra \
  -Wno-deprecated-enum-enum-conversion   -Wno-unused-function -Wno-unknown-pragmas -Ikernels/emulate $(KERNEL_SEES) \
  $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
NVCC_FLAGS := -std=c++20 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden --expt-relaxed-constexpr \
  --threads 2 $(foreach a,$(or $(CUDA_ARCH),$(CUDA_ARCHS)),-gencode arch=compute_$a,code=sm_$a) $(KERNEL_SEES)
.PHONY: cuda emulate test-cuda
.SECONDARY: $(patsubst %,$(GEN)/kernels/%_lines.h,pointwise loss)

$(GEN)/kernels/%_lines.h: kernels/pointwise.lua src/op/%.c
	@mkdir -p $(@D)
	$(Q)luajit $< $@ src/op/$*.c
KERNEL_NEEDS := $(KERNEL_HEADERS) $(wildcard src/op/pointwise_*.h src/op/plugin.h src/device/device.h) | $(GEN)/stamp

$(BUILD)/emulate/%.o: kernels/%.cu $(KERNEL_NEEDS)
	$(SAY) "  EMULATE $<"
	@mkdir -p $(@D)
	$(Q)$(CCACHE) $(EMULATE_CXX) $(EMULATE_FLAGS) -x c++ -c $< -o $@
$(BUILD)/emulate/%.o: kernels/emulate/%.cc $(KERNEL_NEEDS)
	$(SAY) "  EMULATE $<"
	@mkdir -p $(@D)
	$(Q)$(CCACHE) $(EMULATE_CXX) $(EMULATE_FLAGS) -c $< -o $@
$(BUILD)/libmoonflow_emulate.so: $(KERNELS:kernels/%.cu=$(BUILD)/emulate/%.o) \
  $(patsubst kernels/emulate/%.cc,$(BUILD)/emulate/%.o,$(wildcard kernels/emulate/*.cc))
	$(SAY) "  LINK $@"
	$(Q)$(EMULATE_CXX) $(EMULATE_FLAGS) -shared $(if $(SAN),,-Wl,-z,defs) -o $@ $^
emulate: $(BUILD)/libmoonflow_emulate.so

$(BUILD)/cuda/%.o: kernels/%.cu $(KERNEL_NEEDS)
	$(SAY) "  NVCC $<"
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVCC_FLAGS) -c $< -o $@
$(BUILD)/libmoonflow_cuda.so: $(KERNELS:kernels/%.cu=$(BUILD)/cuda/%.o) \
  $(patsubst kernels/%.cu,$(BUILD)/cuda/%.o,$(wildcard kernels/vendor/*.cu))
	$(SAY) "  LINK $@"
	$(Q)$(NVCC) -shared -cudart static -Xlinker -z,defs -o $@ $^ -lcublasLt
cuda: $(if $(NVCC),$(BUILD)/libmoonflow_cuda.so)
	@$(if $(NVCC),:,echo "there is no nvcc: the library of CUDA kernels is not built")

# The specs of spec/cuda, on emulated devices.
test-cuda: all $(BUILD)/packages-test $(BUILD)/libmoonflow_emulate.so
	@MF_CUDA=emulate luajit spec/run --build $(BUILD) --cuda $(if $(ONLY),--only $(ONLY))
