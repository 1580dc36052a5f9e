# The commands of this repository. `make` alone lists them.
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/sbin:/sbin
CARGO := cargo
LAB := target/release/lab

.PHONY: help demo test quick bench crash-matrix chaos fuzz install build format checks clippy tests unit model lanes e2e

help: ## list these commands
	@echo "Longhaul: moves running virtual machines between hosts. Commands:"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "demo, test and bench need root (network namespaces, TAP devices): sudo make demo"

demo: INSTALL := demo
demo: install build ## move a running guest between two emulated sites behind NATs, and back (2 minutes once built)
	$(LAB) demo

test: install format checks lanes ## all tests: formatting, lints, checks, units, model, real moves (20 to 40 minutes, by what is built already)

quick: format checks ## what to run all day: formatting, lints, checks, unit tests, model, attempts and paths by seed (5 minutes once built)
	@echo "== building libraries and programs, with lints"
	$(CARGO) build --profile tests --workspace --locked --bins
	@echo "== unit tests"
	$(CARGO) test --profile tests --workspace --locked --lib --bins
	@echo "== model of the handover"
	target/tests/model
	@echo "== attempts and paths by seed"
	$(CARGO) test --profile tests --workspace --locked --test pair --test sites

BENCH_OPTIONS :=

bench: install build ## all benches, and the page docs/benchmarks (hours; quickly: BENCH_OPTIONS=--quick; one: target/release/lab bench NAME)
	@mkdir -p docs/benchmarks/documents target/bench
	@status=0; run() { \
	    echo "== lab bench $${*:2} $(BENCH_OPTIONS)"; \
	    $(LAB) bench "$${@:2}" --json $(BENCH_OPTIONS) > target/bench/$$1.json || status=$$?; \
	    [ ! -s target/bench/$$1.json ] || cp target/bench/$$1.json docs/benchmarks/documents/; \
	}; \
	for bench in $$($(LAB) bench --list --names); do run $$bench $$bench; done; \
	run memory-debian memory --guest debian; \
	echo "== docs/benchmarks/README.md"; $(LAB) results docs/benchmarks || status=$$?; exit $$status

PART := 1/1

crash-matrix: install build ## every failure at every step of a move, with every pair of QEMUs (hours; the second quarter of it: PART=2/4)
	$(LAB) crash-matrix --all --part $(PART) --jobs $$(nproc)

CHAOS_SECONDS := 3600

chaos: build ## kill what stands below a guest's disks while it writes, again and again (an hour: CHAOS_SECONDS=3600)
	LONGHAUL_CHAOS_S=$(CHAOS_SECONDS) $(CARGO) test --release -p longhaul-lab --locked --test front -- --nocapture

FUZZ_SECONDS := 60

fuzz: ## fuzz every parser, a minute each (FUZZ_SECONDS=60); needs a nightly compiler and cargo-fuzz
	@command -v cargo-fuzz >/dev/null && $(CARGO) +nightly --version >/dev/null 2>&1 || { \
	    echo "Fuzzing needs: rustup toolchain install nightly; cargo install cargo-fuzz" >&2; exit 1; }
	@for target in $$(ls fuzz/src | sed 's/\.rs$$//'); do \
	    echo "== fuzzing $$target for $(FUZZ_SECONDS) s"; mkdir -p fuzz/corpus/$$target; \
	    $(CARGO) +nightly fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
	        -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

INSTALL := all

install: ## install what is missing (Debian 12 or 13), saying what and why; nothing when all is there
	@scripts/install $(INSTALL) || { status=$$?; \
	    [ $$status = 3 ] && [ "$${LONGHAUL_LAB_REQUIRE_ALL:-0}" = 0 ] || exit $$status; \
	    echo "== going on without it: the tests that need it say so and skip"; }

build: ## build the release binaries: target/release/longhaul and target/release/lab
	@echo "== building Longhaul and its laboratory (the first time: some minutes)"
	$(CARGO) build --release --workspace --locked

# The steps of `make test`, the quick ones first. All that is built is built once, in the profile
# `tests` (Cargo.toml), for the same packages with the same features.
format: ## is the code formatted?
	@echo "== formatting"
	@$(CARGO) fmt --all --check || { echo "To fix it: cargo fmt --all" >&2; exit 1; }

checks: ## the workspace's own checks: cores without I/O, dependencies, documents
	@echo "== workspace checks"
	@checks/run --profile tests

clippy: ## lints alone, warnings denied
	@echo "== lints"
	$(CARGO) clippy --profile tests --workspace --all-targets --locked -- -D warnings

# Lints are looked for while the tests are compiled: to do that by itself takes half as long again.
checks quick tests unit e2e: export RUSTC_WORKSPACE_WRAPPER := $(CURDIR)/checks/rustc

tests: ## build all tests and what they run, and look for lints, warnings denied: target/tests
	@echo "== building the tests, and what they run, with lints (the first time: ten minutes)"
	$(CARGO) build --profile tests --workspace --locked --all-targets

unit: tests ## unit and documentation tests
	@echo "== unit tests"
	$(CARGO) test --profile tests --workspace --locked --lib --bins
	$(CARGO) test --profile tests --workspace --locked --doc

model: tests ## explore the handover in every order of events (a minute; deeper: target/tests/model --deep)
	@echo "== model of the handover"
	target/tests/model

# Guests wait for much of their time, so four lanes of tests run at once: these three, and all
# others. What the first three say is shown when all have ended. Before that, what follows a guest's
# memory as it is written runs alone. `doubt` waits for time limits and hardly computes. A part of
# `disks` runs in the last lane.
ALONE := memory
LANE_1 := disks
NOT_IN_LANE_1 := changed::
LANE_2 := attach crash guests
LANE_3 := clients doubt history members moves networks one_file phases reach realm trouble
TESTS := $(wildcard $(addsuffix /tests/*.rs,crates/* crates/lab/* checks model))
TESTS += $(patsubst %/main.rs,%.rs,$(wildcard $(addsuffix /tests/*/main.rs,crates/*)))
TESTS := $(filter-out $(ALONE) $(LANE_1) $(LANE_2) $(LANE_3),$(sort $(basename $(notdir $(TESTS)))))
# What the last lane runs before its tests.
FIRST :=

lanes: FIRST := unit model
lanes: e2e

e2e: tests ## integration tests, and moves of real guests between emulated hosts (needs root)
	@echo "== integration and end-to-end tests, in four lanes"
	@[ "$$(id -u)" = 0 ] || { echo "The end-to-end tests make network namespaces: sudo make e2e" >&2; exit 1; }
	@run() { $(CARGO) test --profile tests --workspace --locked --no-fail-fast "$$@" 2>&1; }; \
	log() { echo target/tests/lane-$$1.log; }; \
	set -o pipefail; status=0; run $(ALONE:%=--test %) | tee $$(log 0) || status=$$?; \
	run $(LANE_1:%=--test %) -- $(NOT_IN_LANE_1:%=--skip %) > $$(log 1) & one=$$!; \
	run $(LANE_2:%=--test %) > $$(log 2) & two=$$!; \
	RUST_TEST_THREADS=8 run $(LANE_3:%=--test %) > $$(log 3) & three=$$!; \
	[ -z "$(FIRST)" ] || $(MAKE) --no-print-directory $(FIRST) || status=$$?; \
	{ run $(LANE_1:%=--test %) -- $(NOT_IN_LANE_1); part=$$?; \
	    run $(TESTS:%=--test %) && (exit $$part); } | tee $$(log 4) || status=$$?; \
	wait $$one || status=$$?; echo "== the first lane: $(LANE_1)"; cat $$(log 1); \
	wait $$two || status=$$?; echo "== the second lane: $(LANE_2)"; cat $$(log 2); \
	wait $$three || status=$$?; echo "== the third lane: $(LANE_3)"; cat $$(log 3); \
	[ $$status = 0 ] || { echo "== what failed (in full: target/tests/lane-*.log)"; \
	    sed -n '/^failures:/,/^test result/p' $$(log '[0-4]') | tail -n 200; }; \
	exit $$status
