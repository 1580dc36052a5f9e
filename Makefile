# The commands of this repository. `make` alone lists them.
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/sbin:/sbin
CARGO := cargo
LAB := target/release/lab

.PHONY: help demo demo-parcel test quick bench crash-matrix chaos fuzz install build format checks clippy programs tests unit model e2e

help: ## list these commands
	@echo "Longhaul: moves running virtual machines between hosts. Commands:"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "demo, demo-parcel, test and bench need root (network namespaces, TAP devices): sudo make demo"

demo: INSTALL := demo
demo: export LONGHAUL_LINTS := W
demo: install programs ## move a running guest between two emulated sites behind NATs, and back (2 minutes once built)
	target/tests/lab demo

demo-parcel: INSTALL := demo
demo-parcel: export LONGHAUL_LINTS := W
demo-parcel: install programs ## ship the disks of three running guests on four devices, lose one, and move the guests (4 minutes once built)
	target/tests/lab demo-parcel

test: install format checks tests ## all tests: formatting, lints, checks, units, model, real moves (20 to 30 minutes, by what is built already)
	@scripts/end-to-end unit model

quick: format checks programs ## what to run all day: formatting, lints, checks, unit tests, model, attempts and paths by seed (5 minutes once built)
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
checks demo quick programs test tests unit e2e: export RUSTC_WORKSPACE_WRAPPER := $(CURDIR)/checks/rustc

# `--examples` gives the packages the features that they have for tests, so that none is built twice.
programs: ## build the programs that the demo and the tests run, and look for lints: target/tests
	@echo "== building Longhaul and its laboratory, with lints (the first time: some minutes)"
	$(CARGO) build --profile tests --workspace --locked --bins --examples

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

e2e: tests ## integration tests, and moves of real guests between emulated hosts (needs root)
	@scripts/end-to-end
