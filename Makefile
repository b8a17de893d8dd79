# moonflow.  `make demo`, `make test`; the others: all test-long test-dist fault bench bench-dist lint
# format size install uninstall cross deps clean. Settings, on the command line or here: V=1 shows the
# commands, WERROR=1 stops at warnings, ARGS go to demo and bench, ONLY=text runs the specs whose path has
# it; for tests, HARD=1 (what is rare happens all the time), FAULT=1 (requests can fail), SAN=address,undefined|thread.
PREFIX ?= /usr/local
DESTDIR ?=
OPT ?= -O2
PEER_PYTHON ?=
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
COMMA := ,
BUILD ?= build$(if $(HARD),/hard)$(if $(FAULT),/fault)$(if $(SAN),/$(subst $(COMMA),-,$(SAN)))

# -- No need to change anything below -----------------------------------------------------------

VERSION := $(shell sed -n 's/^.define MF_VERSION_[A-Z]* //p' src/api/moonflow.h | paste -sd.)
MAKEFLAGS += -r
Q := $(if $(V),,@)
SAY = $(if $(V),@:,@echo)
GEN := $(BUILD)/gen

# Debian packages, by what needs them.
PACKAGES_build := $(if $(findstring clang,$(CC)),clang libomp-dev,gcc) libc6-dev libdnnl-dev \
  libluajit-5.1-dev libzmq3-dev luajit pkg-config zlib1g-dev
PACKAGES_test := lua-busted
PACKAGES_demo := dataset-fashion-mnist bible-kjv-text
PACKAGES_lint := lua-check clang-format cppcheck
PACKAGES_cross := gcc-aarch64-linux-gnu

# Layers, lowest first: a folder's files may include headers of their own folder and of these;
# the compiler sees no others.
SEES_base     :=#                                          knows nothing of tensors
SEES_tensor   := base#                                     values without pointers
SEES_device   := base#                                     now there is memory
SEES_comm     := base tensor device#                       now ranks can talk
SEES_launch   := base comm#                                now ranks can start
SEES_op       := base tensor device#                       now you can compute
SEES_file     := base tensor device#                       now you can load and save
SEES_eager    := base tensor device comm op#               now you can differentiate
SEES_graph    := base tensor op#                           the logical program
SEES_plan     := base tensor op graph#                     the physical program
SEES_pass     := base tensor device op graph#              rewrites of the logical one
SEES_runtime  := base tensor device comm op plan#          runs the physical one
SEES_job      := base tensor device comm op eager graph pass plan runtime
SEES_api      := $(SEES_job) file launch job#              now other programs can call
SEES_bind     := $(SEES_api) api#                          now Lua can
SEES_main     := api bind launch
LAYERS := base tensor device comm launch op file eager graph plan pass runtime job api bind

TARGET := $(shell $(CC) -dumpmachine 2>/dev/null)
ISAS := $(if $(filter x86_64%,$(TARGET)),v2 v3 v4,base)
ISA_FLAGS_v2 := -march=x86-64-v2
ISA_FLAGS_v3 := -march=x86-64-v3
ISA_FLAGS_v4 := -march=x86-64-v4 -mprefer-vector-width=512
OPENMP := $(if $(filter thread,$(SAN)),,-fopenmp)
FLAGS := -std=gnu11 $(OPT) -g -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math \
  -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes $(if $(WERROR),-Werror) \
  $(if $(findstring clang,$(CC)),-Wno-pass-failed) \
  $(ISA_FLAGS_$(firstword $(ISAS))) $(OPENMP) $(if $(HARD),-DMF_HARD) $(if $(FAULT),-DMF_FAULT)
ifneq ($(SAN),)
FLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer
FLAGS += $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined)
FLAGS += $(if $(filter thread,$(SAN)),-fexceptions)# a Lua error must unwind the sanitizer's stack
endif
DNNL := -ldnnl
ZMQ := -lzmq
LIBS := -lluajit-5.1 $(DNNL) $(ZMQ) -lz -lm -ldl -lpthread $(OPENMP) $(if $(SAN),-fsanitize=$(SAN))

# Flags of one folder, $(call SEE,folder): where it looks for headers, and what only it needs.
SEE = $(patsubst %,-iquote src/%,$(filter-out main,$1) $(SEES_$1)) \
  $(if $(filter op,$1 $(SEES_$1)),-iquote $(GEN)/op) $(ONLY_$1)
ONLY_comm = $(OPT:-O2=-O3)# sums of contributions become vectors
ONLY_bind = -fexceptions -iquote $(GEN)/bind $(LUA_CFLAGS)
FOLDER = $(word 2,$(subst /, ,$(basename $1)))

# Files of src/op that declare ops are compiled once for each instruction set.
OP_SOURCES := $(wildcard src/op/*.c)
OP_MULTI := $(if $(OP_SOURCES),$(shell grep -lE '^(OP[^A-Za-z_]|POINTWISE)' $(OP_SOURCES)))
SOURCES := $(filter-out $(OP_MULTI),$(foreach d,$(LAYERS),$(wildcard src/$d/*.c)))
OBJECTS := $(SOURCES:src/%.c=$(BUILD)/obj/%.o) \
  $(foreach i,$(ISAS),$(OP_MULTI:src/%.c=$(BUILD)/obj/%.$i.o)) \
  $(BUILD)/obj/op/op_table.o $(BUILD)/obj/bind/embed.o
LUA_FILES := $(sort $(wildcard lua/*.lua))
# Those without a guard are templates, not for themselves.
HEADERS := $(shell grep -l '^.ifndef MF_' $(foreach d,$(LAYERS),$(wildcard src/$d/*.h)) /dev/null)
C_SPECS := $(patsubst spec/c/%.c,$(BUILD)/spec/%,$(wildcard spec/c/*_spec.c))

.PHONY: try objects headers fault all demo test test-long test-dist bench bench-dist lint format size install uninstall cross deps clean
.DELETE_ON_ERROR:
all: $(BUILD)/moonflow $(BUILD)/libmoonflow.so $(BUILD)/libmoonflow.a

# -- Packages, and lists that are rewritten only when they change ---------------------------------

# Included, so that make begins anew when the compiler has just been installed.
ifneq ($(filter-out clean uninstall deps,$(or $(MAKECMDGOALS),all)),)
include $(BUILD)/config.mk
endif
$(BUILD)/config.mk: spec/tools/packages.sh
	@mkdir -p $(@D)
	@sh $< $(PACKAGES_build)
	@echo "LUA_CFLAGS := $$(pkg-config --cflags luajit)" > $@

$(BUILD)/packages-%: spec/tools/packages.sh
	@mkdir -p $(@D)
	@sh $< $(PACKAGES_$*)
	@touch $@

deps:
	@sh spec/tools/packages.sh $(foreach k,build test demo lint cross,$(PACKAGES_$k))

# $(call REMEMBER,name,variable): a file that is newer than what was made with another value.
define REMEMBER
ifneq ($$(file <$(BUILD)/$1),$$($2))
$$(shell mkdir -p $(BUILD))$$(file >$(BUILD)/$1,$$($2))
endif
endef
ALL_FLAGS := $(strip $(CC) $(FLAGS) $(LUA_CFLAGS))
ALL_OBJECTS := $(strip $(OBJECTS) $(LIBS))
ifneq ($(filter-out clean uninstall deps,$(or $(MAKECMDGOALS),all)),)
$(eval $(call REMEMBER,flags.txt,ALL_FLAGS))
$(eval $(call REMEMBER,objects.txt,ALL_OBJECTS))
endif

# -- Generated files ------------------------------------------------------------------------------

EMPTY :=
$(GEN)/stamp: src/op/collect.lua $(OP_SOURCES) $(wildcard lua/grad*.lua) $(BUILD)/objects.txt
	@mkdir -p $(GEN)/op $(GEN)/bind
	$(Q)luajit src/op/collect.lua $(GEN) --isas $(subst $(EMPTY) ,$(COMMA),$(strip $(ISAS))) \
	  $(OP_SOURCES) $(wildcard lua/grad*.lua)
	@touch $@
$(GEN)/op/%: $(GEN)/stamp ;

$(GEN)/bind/embed.c: src/bind/embed.lua $(LUA_FILES) $(BUILD)/objects.txt
	@mkdir -p $(@D)
	$(Q)luajit src/bind/embed.lua $@ $(LUA_FILES)
$(BUILD)/objects.txt $(BUILD)/flags.txt: ;

# -- Compilation ----------------------------------------------------------------------------------

# $(call COMPILE,folder,more flags)
define COMPILE
$(SAY) "  CC $<$(if $(findstring MF_ISA,$2), $(lastword $(subst =, ,$2)))"
@mkdir -p $(@D)
$(Q)$(CC) $(FLAGS) -MMD -MP $2 $(call SEE,$1) -c $< -o $@
endef
NEEDS := $(BUILD)/flags.txt | $(GEN)/stamp

$(BUILD)/obj/op/op_table.o: $(GEN)/op/op_table.c $(NEEDS)
	$(call COMPILE,op)
$(BUILD)/obj/bind/embed.o: $(GEN)/bind/embed.c $(NEEDS)
	$(call COMPILE,bind)
$(BUILD)/obj/main.o: src/main.c $(NEEDS)
	$(call COMPILE,main)
define ISA_RULE
$(BUILD)/obj/op/%.$1.o: src/op/%.c $(NEEDS)
	$$(call COMPILE,op,-O3 $(ISA_FLAGS_$1) -DMF_ISA=$1)
endef
$(foreach i,$(ISAS),$(eval $(call ISA_RULE,$i)))
$(BUILD)/obj/%.o: src/%.c $(NEEDS)
	$(call COMPILE,$(call FOLDER,$<))

-include $(OBJECTS:.o=.d) $(BUILD)/obj/main.d $(C_SPECS:=.d)

# -- Outputs --------------------------------------------------------------------------------------

SONAME := libmoonflow.so.0
$(BUILD)/$(SONAME): $(OBJECTS) $(BUILD)/objects.txt
	$(SAY) "  LINK $@"
	@echo '{ global: mf_*; luaopen_moonflow*; local: *; };' > $(BUILD)/exports.map
	$(Q)$(CC) -shared $(if $(SAN),,-Wl,-z,defs) -Wl,-soname,$(SONAME) \
	  -Wl,--version-script=$(BUILD)/exports.map -o $@ $(OBJECTS) $(LIBS)
$(BUILD)/libmoonflow.so: $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $@
$(BUILD)/libmoonflow.a: $(OBJECTS) $(BUILD)/objects.txt
	$(SAY) "  AR $@"
	$(Q)rm -f $@ && $(AR) rcs $@ $(OBJECTS)
# The program holds the library; C modules find mf_* in it, and lua_* in the shared libluajit.
$(BUILD)/moonflow: $(BUILD)/obj/main.o $(OBJECTS) $(BUILD)/objects.txt
	$(SAY) "  LINK $@"
	$(Q)$(CC) -Wl,-E -o $@ $(BUILD)/obj/main.o $(OBJECTS) $(LIBS)
objects: $(OBJECTS) $(BUILD)/obj/main.o

AT := $(DESTDIR)$(PREFIX)
install: all
	$(Q)install -d $(AT)/bin $(AT)/lib/pkgconfig $(AT)/lib/lua/5.1 $(AT)/include $(AT)/share/moonflow
	$(Q)install $(BUILD)/moonflow $(AT)/bin/
	$(Q)install -m 644 $(BUILD)/$(SONAME) $(BUILD)/libmoonflow.a $(AT)/lib/
	$(Q)ln -sf $(SONAME) $(AT)/lib/libmoonflow.so
	$(Q)ln -sf ../../$(SONAME) $(AT)/lib/lua/5.1/moonflow.so
	$(Q)install -m 644 src/api/moonflow.h $(AT)/include/
	$(Q)install -m 644 $(GEN)/moonflow.lua $(AT)/share/moonflow/
	$(Q)printf '%s\n' 'Name: moonflow' 'Description: deep learning in C and Lua' \
	  'Version: $(VERSION)' 'Cflags: -I$(PREFIX)/include' 'Libs: -L$(PREFIX)/lib -lmoonflow' \
	  'Libs.private: $(LIBS)' > $(AT)/lib/pkgconfig/moonflow.pc
	@$(if $(DESTDIR),,PATH="$$PATH:/usr/sbin:/sbin"; \
	if ldconfig -vNX 2>/dev/null | grep -q '^$(PREFIX)/lib:'; then ldconfig 2>/dev/null || true; \
	else echo "the loader does not search $(PREFIX)/lib: set LD_LIBRARY_PATH, or link with" \
	  "-Wl,-rpath,$(PREFIX)/lib"; fi)
uninstall:
	rm -f $(AT)/bin/moonflow $(AT)/lib/libmoonflow.* $(AT)/lib/lua/5.1/moonflow.so \
	  $(AT)/lib/pkgconfig/moonflow.pc
	rm -rf $(AT)/include/moonflow.h $(AT)/share/moonflow
clean:
	rm -rf build

include kernels/build.mk

# -- Runs -----------------------------------------------------------------------------------------

demo: all $(BUILD)/packages-demo
	$(Q)$(BUILD)/moonflow examples/fashion_mnist.lua --save $(BUILD)/fashion_mnist.safetensors $(ARGS)
bench bench-dist: all $(BUILD)/bench_conv
	$(Q)PEER_PYTHON='$(PEER_PYTHON)' BENCH_CONV=$(BUILD)/bench_conv \
	  $(BUILD)/moonflow examples/$(if $(filter bench,$@),bench_all,bench_dist).lua $(ARGS)
$(BUILD)/bench_conv: examples/bench_conv.c
	$(SAY) '  LINK $@'
	$(Q)$(CC) -O2 -std=gnu11 -Wall -Wextra $(OPENMP) -o $@ $< $(DNNL)
$(BUILD)/spec/%: spec/c/%.c $(BUILD)/libmoonflow.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -MMD -MP $(LUA_CFLAGS) $(patsubst %,-iquote src/%,$(LAYERS)) \
	  -iquote $(GEN)/op -o $@ $< $(BUILD)/libmoonflow.a $(LIBS)
test test-long test-dist: all $(BUILD)/packages-test $(C_SPECS)
	@luajit spec/run --build $(BUILD) $(if $(ONLY),--only $(ONLY)) $(patsubst test-%,--%,$(filter test-%,$@)) \
	  $(C_SPECS)
fault: $(if $(FAULT),all $(BUILD)/packages-test $(BUILD)/spec/fault_spec)
	@+$(if $(FAULT),luajit spec/fault/run.lua $(BUILD) $(ONLY),$(MAKE) --no-print-directory FAULT=1 fault)
# Compiles the file TRY as one of the folder AS: what may it include?
try: $(GEN)/stamp
	$(Q)$(CC) $(FLAGS) $(call SEE,$(AS)) -fsyntax-only $(TRY)
$(BUILD)/lint/%.ok: src/% $(NEEDS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) -MMD -MP -MF $(@:.ok=.d) -MT $@ $(call SEE,$(call FOLDER,$<)) \
	  -DMF_ISA=$(firstword $(ISAS)) -Wno-unused -x c -fsyntax-only $<
	@touch $@
-include $(HEADERS:src/%=$(BUILD)/lint/%.d)
headers: $(HEADERS:src/%=$(BUILD)/lint/%.ok)
lint: objects headers $(BUILD)/packages-lint
	@luajit spec/tools/lint.lua $(BUILD) $(LAYERS)
format: $(BUILD)/packages-lint ; @luajit spec/tools/format.lua
size: ; @luajit spec/tools/size.lua

# Compiles everything for arm64, and links where Debian's arm64 libraries are installed. libdnnl-dev
# cannot be installed for two architectures at once, so that library is named by its file, as ZeroMQ's.
ARM := CC=aarch64-linux-gnu-gcc BUILD=build/aarch64 DNNL=-l:libdnnl.so.2 ZMQ=-l:libzmq.so.5
cross: $(BUILD)/packages-cross
	@+$(MAKE) --no-print-directory $(ARM) objects
	@+if aarch64-linux-gnu-gcc -print-file-name=libdnnl.so.2 | grep -q /; then \
	  $(MAKE) --no-print-directory $(ARM) all; \
	else echo "not linked; that needs:  dpkg --add-architecture arm64 && apt-get update &&" \
	  "apt-get install -y libdnnl2:arm64 libluajit-5.1-dev:arm64 libzmq5:arm64 zlib1g-dev:arm64"; fi
