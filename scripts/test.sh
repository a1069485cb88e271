#!/usr/bin/env bash
# Installs cargo-nextest if it is missing and runs every check: formatting, lints, tests, documentation.
# Needs Rust (rust-toolchain.toml names the version) and a C compiler. Takes 30 to 50 minutes on 2 cores
# from a fresh clone, about 10 if built before. Checks the benchmark tables if Python 3 is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

NEXTEST_VERSION=0.9.143
export PATH="$PWD/target/tools/bin:$PATH"
if ! cargo nextest --version >/dev/null 2>&1; then
  echo "== installing cargo-nextest $NEXTEST_VERSION into target/tools"
  cargo install cargo-nextest --version "$NEXTEST_VERSION" --locked --root target/tools
fi

step() { echo "== $1 (after $SECONDS s)"; }

step "formatting"
cargo fmt --all -- --check
step "build and tests"
cargo nextest run --workspace --release --locked
step "documentation examples"
cargo test --workspace --release --locked --doc --quiet
if command -v python3 > /dev/null; then
  step "tables of benchmarks"
  python3 -B benchmarks/tables.py tests/bench_results | diff tests/bench_results/expected.md -
else
  step "no python3: the benchmark tables are not checked"
fi
step "lints"
cargo clippy --workspace --release --locked --all-targets -- -D warnings
step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --release --locked --no-deps --quiet
step "all checks passed"
