# The libraries of CUDA devices: `make cuda` (nvcc), `make emulate` (a host compiler).
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUOBJDUMP ?= $(or $(wildcard $(dir $(NVCC))cuobjdump),cuobjdump)
CUDA_ARCHS ?= 75 80 90 100
KERNELS := $(wildcard kernels/*.cu)
# What takes long is compiled in parts: FILE.1 ... of kernels/parts/FILE.cu.
PARTS_pointwise := 1 2 3 4 5 6
PARTS_reduce := 1 2 3 4 5
KERNEL_PARTS := $(foreach f,pointwise reduce,$(patsubst %,$f.%,$(PARTS_$f)))
KERNEL_HEADERS := $(wildcard kernels/*.cuh kernels/*.h kernels/emulate/*.h) $(patsubst %,$(GEN)/kernels/%_lines.h,pointwise loss)
KERNEL_SEES := $(patsubst %,-Isrc/%,base tensor device comm op) -Ikernels -I$(GEN)/op -I$(GEN)/kernels
EMULATE_CXX ?= $(if $(findstring clang,$(CC)),clang++,g++)
EMULATE_FLAGS := -std=gnu++20 -O1 -g1 -fPIC -fvisibility=hidden -pthread -Wall -Wextra \
  -Wno-deprecated-enum-enum-conversion   -Wno-unused-function -Wno-unknown-pragmas -Ikernels/emulate $(KERNEL_SEES) \
  $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
NVCC_FLAGS := -std=c++20 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden --expt-relaxed-constexpr \
  -Xptxas -v --threads 2 $(foreach a,$(or $(CUDA_ARCH),$(CUDA_ARCHS)),-gencode arch=compute_$a,code=sm_$a) $(KERNEL_SEES)
.PHONY: cuda emulate test-cuda kernels-report gpu-pack gpu-check
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
# The part's number is the file's suffix.
part_flags = -DPART=$(patsubst .%,%,$(suffix $(basename $@))) -DPARTS=$(words $(PARTS_$(basename $(basename $(@F)))))
define part_rules
$(BUILD)/emulate/$1.o: kernels/parts/$(basename $1).cu $(KERNEL_NEEDS)
	$$(SAY) "  EMULATE $$< ($$(subst .,,$$(suffix $1)))"
	@mkdir -p $$(@D)
	$$(Q)$$(CCACHE) $$(EMULATE_CXX) $$(EMULATE_FLAGS) $$(part_flags) -x c++ -c $$< -o $$@
$(BUILD)/cuda/$1.o: kernels/parts/$(basename $1).cu $(KERNEL_NEEDS)
	$$(SAY) "  NVCC $$< ($$(subst .,,$$(suffix $1)))"
	@mkdir -p $$(@D)
	$$(Q)$$(NVCC) $$(NVCC_FLAGS) $$(part_flags) -c $$< -o $$@ 2>$$(@:.o=.ptxas) || { cat $$(@:.o=.ptxas); exit 1; }
endef
$(foreach p,$(KERNEL_PARTS),$(eval $(call part_rules,$p)))
$(BUILD)/libmoonflow_emulate.so: $(KERNELS:kernels/%.cu=$(BUILD)/emulate/%.o) $(KERNEL_PARTS:%=$(BUILD)/emulate/%.o) \
  $(patsubst kernels/emulate/%.cc,$(BUILD)/emulate/%.o,$(wildcard kernels/emulate/*.cc))
	$(SAY) "  LINK $@"
	$(Q)$(EMULATE_CXX) $(EMULATE_FLAGS) -shared $(if $(SAN),,-Wl,-z,defs) -o $@ $^
emulate: $(BUILD)/libmoonflow_emulate.so

$(BUILD)/cuda/%.o: kernels/%.cu $(KERNEL_NEEDS)
	$(SAY) "  NVCC $<"
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVCC_FLAGS) -c $< -o $@ 2>$(@:.o=.ptxas) || { cat $(@:.o=.ptxas); exit 1; }
$(BUILD)/libmoonflow_cuda.so: $(KERNELS:kernels/%.cu=$(BUILD)/cuda/%.o) $(KERNEL_PARTS:%=$(BUILD)/cuda/%.o) \
  $(patsubst kernels/%.cu,$(BUILD)/cuda/%.o,$(wildcard kernels/vendor/*.cu))
	$(SAY) "  LINK $@"
	$(Q)$(NVCC) -shared -cudart static -Xlinker -z,defs -o $@ $^ -lcublasLt -ldl
cuda: $(if $(NVCC),$(BUILD)/libmoonflow_cuda.so)
	@$(if $(NVCC),:,echo "there is no nvcc: the library of CUDA kernels is not built")

# Registers, spills, shared memory, occupancy and widest load of each kernel; fails where one spills.
kernels-report: cuda
	@luajit kernels/report.lua $(BUILD) $(CUOBJDUMP)

# One folder for a machine with a GPU; its `check` runs there, or here on emulated devices (EMULATE=1, or no nvcc).
PACK_LIBRARY = $(BUILD)/libmoonflow_$(if $(or $(EMULATE),$(if $(NVCC),,1)),emulate,cuda).so
gpu-pack: all $(PACK_LIBRARY)
	$(Q)kernels/pack.sh $(BUILD) $(PACK_LIBRARY) $(BUILD)/gpu-pack
gpu-check: gpu-pack
	$(Q)$(if $(findstring emulate,$(PACK_LIBRARY)),MF_CUDA=emulate) $(BUILD)/gpu-pack/check

# The specs of spec/cuda, on emulated devices.
test-cuda: all $(BUILD)/packages-test $(BUILD)/libmoonflow_emulate.so
	@MF_CUDA=emulate luajit spec/run --build $(BUILD) --cuda $(if $(ONLY),--only $(ONLY))
