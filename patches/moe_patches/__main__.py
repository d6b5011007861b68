"""``python -m moe_patches``: apply the ledger in a fresh process and print what became of each patch."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from . import apply, patches, report


def table() -> str:
    """The ledger as a Markdown table, as README.md has it."""
    rows = ["| name | target | what goes wrong without it | upstream | seen in |", "|---|---|---|---|---|"]
    for p in patches():
        rows.append(f"| `{p.name}` | `{p.target}` | {p.fault} | {p.upstream} | {p.package} {p.versions} |")
    return "\n".join(rows)


def main() -> int:
    """Parse the arguments and print; 0, or 2 for a name that is no patch."""
    parser = argparse.ArgumentParser(prog="python -m moe_patches", description=__doc__)
    parser.add_argument("--disable", help="names divided by commas, or all; default: MOE_PATCHES_DISABLE")
    parser.add_argument("--json", action="store_true", help="print the states as JSON")
    parser.add_argument("--table", action="store_true", help="print the ledger as a Markdown table and apply nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return 0
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    try:
        states = apply(None if arguments.disable is None else [n for n in arguments.disable.split(",") if n])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([s.as_dict() for s in states], indent=1) if arguments.json else report(states))
    return 0


if __name__ == "__main__":
    sys.exit(main())
