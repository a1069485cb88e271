#!/usr/bin/env python3
"""Compares the fixtures of the tests of exchange with transformers' own classes, GPT-2's and Llama's.

A fixture in crates/train/src/import/tests/hf is a config.json, the names and shapes of the class's tensors, and some
logits of the model whose weights a formula gives. The tests compute the same logits with the imported model.

    python3 scripts/hf_fixtures.py          # fails if a class gives other tensors or logits
    python3 scripts/hf_fixtures.py --write  # writes what the classes give

A new fixture is a file {"config": {...}}: --write adds the rest. Needs torch and transformers 5, but no GPU. Without
the packages, nothing is checked.
"""

import argparse
import sys

try:
    import fixtures
except ImportError as error:
    print(f"skipped: {error}\n  hint: pip install torch transformers")
    sys.exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write what the classes give")
    arguments = parser.parse_args()
    sys.exit(not fixtures.check_all(fixtures.folder("hf"), arguments.write))


if __name__ == "__main__":
    main()
