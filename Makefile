# moonflow. `make demo`, `make test`; also: all test-long bench lint size install uninstall clean.
# Settings; `make V=1` shows the commands.
CC ?= gcc
PREFIX ?= /usr/local
BUILD ?= build
SAN ?=
OPT ?= -O2
VERSION := 0.1.0

# -- No need to change anything below --------------------------------------------------------------------------------------------

ifeq ($(origin CC),default)
CC := gcc
endif
ifneq ($(SAN),)
BUILD := build/$(SAN)
endif
ifneq ($(ARCH),)
BUILD := build/$(ARCH)
endif
Q := $(if $(V),,@)
GEN := $(BUILD)/gen
TARGET := $(shell $(CC) -dumpmachine 2>/dev/null)

# Debian packages, by what needs them.
PACKAGES_BUILD := gcc libc6-dev libluajit-5.1-dev luajit libdnnl-dev zlib1g-dev pkg-config
PACKAGES_TEST := lua-busted
PACKAGES_DEMO := dataset-fashion-mnist
PACKAGES_LINT := lua-check clang-format cppcheck

# Layers, lowest first: what each folder may include besides itself. The compiler sees nothing else.
SEES_base     :=                                                   # knows nothing of tensors
SEES_tensor   := base                                              # values without pointers
SEES_device   := base                                              # memory, streams, events
SEES_op       := base tensor device                                # what an op is, and all of them
SEES_comm     := base tensor device                                # bytes between ranks
SEES_launch   := base comm                                         # processes of a job
SEES_file     := base tensor device                                # formats on disk
SEES_eager    := base tensor device comm op                        # now you can compute and differentiate
SEES_graph    := base tensor op                                    # the logical program
SEES_pass     := base tensor device op graph                       # its rewrites
SEES_plan     := base tensor op graph                              # the physical program
SEES_runtime  := base tensor device comm op plan                   # runs it
SEES_job      := base tensor device comm op eager graph pass plan runtime
SEES_api      := base tensor device comm op launch file eager graph pass plan runtime job
SEES_bind     := base tensor device comm op launch file eager graph pass plan runtime job api
FOLDERS := base tensor device op comm launch file eager graph pass plan runtime job api bind

FLAGS := -std=gnu11 $(OPT) -g -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -MMD -MP \
  -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes $(if $(WERROR),-Werror) -DMF_VERSION='"$(VERSION)"'
ifneq ($(filter x86_64%,$(TARGET)),)
FLAGS += -march=x86-64-v2
ISAS := v2 v3 v4
else
ISAS := base
endif
MARCH_v2 := -march=x86-64-v2
MARCH_v3 := -march=x86-64-v3
MARCH_v4 := -march=x86-64-v4 -mprefer-vector-width=512
OPENMP := $(if $(filter thread,$(SAN)),,-fopenmp)
FLAGS += $(OPENMP)
ifneq ($(SAN),)
FLAGS += -fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(filter undefined,$(SAN)),-fno-sanitize-recover=undefined) -fexceptions
LINK_SAN := -fsanitize=$(SAN)
endif
LUA_CFLAGS := $(shell pkg-config --cflags luajit 2>/dev/null)
LIBS := -lluajit-5.1 -ldnnl -lz -lm -ldl -lpthread $(OPENMP) $(LINK_SAN)
EXTRA_bind := -fexceptions $(LUA_CFLAGS) -iquote $(GEN)/bind
SEES = $(foreach d,$(1) $(SEES_$(1)),-iquote src/$(d)) $(if $(filter op,$(1) $(SEES_$(1))),-iquote $(GEN)/op) $(EXTRA_$(1))

OP_SOURCES := $(wildcard src/op/*.c)
OP_MULTI := $(if $(OP_SOURCES),$(shell grep -l '^OP[^A-Z_a-z]\|^POINTWISE' $(OP_SOURCES)))
SOURCES := $(filter-out $(OP_MULTI),$(foreach d,$(FOLDERS),$(wildcard src/$(d)/*.c)))
OBJECTS := $(SOURCES:src/%.c=$(BUILD)/obj/%.o) $(foreach i,$(ISAS),$(OP_MULTI:src/%.c=$(BUILD)/obj/%.$(i).o)) \
  $(BUILD)/obj/op/op_table.o $(BUILD)/obj/bind/embed.o
LUA_FILES := $(sort $(wildcard lua/*.lua))
COMMA := ,
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

.PHONY: all demo test test-long bench lint size install uninstall clean deps-build deps-test deps-demo deps-lint cross
.SUFFIXES:
all: deps-build $(BUILD)/moonflow $(BUILD)/libmoonflow.a

# -- Packages ---------------------------------------------------------------------------------------------------------------------

deps-%:
	$(Q)sh spec/tools/packages.sh $(PACKAGES_$(shell echo $* | tr a-z A-Z))

# -- Generated files --------------------------------------------------------------------------------------------------------------

$(GEN)/stamp: src/op/collect.lua $(OP_SOURCES) $(wildcard lua/grad*.lua) | deps-build
	@mkdir -p $(GEN)/op $(GEN)/bind
	$(Q)luajit src/op/collect.lua $(GEN) --isas $(subst $(SPACE),$(COMMA),$(ISAS)) $(OP_SOURCES) $(wildcard lua/grad*.lua)
	@touch $@
$(GEN)/op/op_table.c: $(GEN)/stamp ;

$(GEN)/bind/embed.c: src/bind/embed.lua $(LUA_FILES) $(wildcard lua) | deps-build
	@mkdir -p $(GEN)/bind
	$(Q)luajit src/bind/embed.lua $@ $(LUA_FILES)

# -- Compilation ------------------------------------------------------------------------------------------------------------------

FOLDER = $(word 2,$(subst /, ,$(1)))
COMPILE = @mkdir -p $(@D)$(if $(V),,; echo "  CC $<"); $(if $(V),set -x;) $(CC) $(FLAGS)

$(BUILD)/obj/op/op_table.o: $(GEN)/op/op_table.c
	$(COMPILE) $(call SEES,op) -c $< -o $@
$(BUILD)/obj/bind/embed.o: $(GEN)/bind/embed.c
	$(COMPILE) $(call SEES,bind) -c $< -o $@

define ISA_RULE
$(BUILD)/obj/op/%.$(1).o: src/op/%.c $(GEN)/stamp
	$$(COMPILE) -O3 $(MARCH_$(1)) -DMF_ISA=$(1) $$(call SEES,op) -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call ISA_RULE,$(i))))
$(BUILD)/obj/%.o: src/%.c $(GEN)/stamp
	$(COMPILE) $(call SEES,$(call FOLDER,$<)) -c $< -o $@

-include $(OBJECTS:.o=.d) $(BUILD)/obj/main.d

# -- Outputs ----------------------------------------------------------------------------------------------------------------------

$(BUILD)/libmoonflow.so.0: $(OBJECTS)
	@echo "  LINK $@"
	$(Q)echo '{ global: mf_*; luaopen_moonflow*; local: *; };' > $(BUILD)/exports.map
	$(Q)$(CC) -shared -Wl,-soname,libmoonflow.so.0 -Wl,--version-script=$(BUILD)/exports.map -o $@ $(OBJECTS) $(LIBS)
	$(Q)ln -sf libmoonflow.so.0 $(BUILD)/libmoonflow.so
$(BUILD)/libmoonflow.a: $(OBJECTS)
	$(Q)rm -f $@; $(AR) rcs $@ $(OBJECTS)
$(BUILD)/obj/main.o: src/main.c $(GEN)/stamp
	$(COMPILE) -iquote src/api -iquote src/bind -iquote src/launch -c $< -o $@
$(BUILD)/moonflow: $(BUILD)/obj/main.o $(BUILD)/libmoonflow.a
	$(Q)$(CC) -Wl,-E -o $@ $(BUILD)/obj/main.o $(BUILD)/libmoonflow.a $(LIBS)

clean:
	rm -rf build

# -- Checks -----------------------------------------------------------------------------------------------------------------------

C_SPECS := $(patsubst spec/c/%.c,$(BUILD)/spec/%,$(wildcard spec/c/*_spec.c))
$(BUILD)/spec/%: spec/c/%.c $(BUILD)/libmoonflow.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(FLAGS) $(foreach d,$(FOLDERS),-iquote src/$(d)) -iquote $(GEN)/op -o $@ $< $(BUILD)/libmoonflow.a $(LIBS)

test: deps-build deps-test $(BUILD)/moonflow $(C_SPECS)
	$(Q)BUILD=$(BUILD) sh spec/tools/run.sh $(C_SPECS)
