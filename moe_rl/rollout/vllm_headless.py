"""A node of a replica that another one leads, as `vllm serve --headless` runs it: python -m moe_rl.rollout.vllm_headless MODEL ARGUMENTS

vLLM's own program asks for a distribution of the name `vllm`, which its CPU build has not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_rl.lifetime import end_children_with_this


def main(arguments: list[str]) -> None:
    """Run vLLM's ranks of this node until they end. `arguments` are those of `vllm serve`, the model's directory first."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    end_children_with_this(Path(arguments[0]).parent)
    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    serve.cmd(parser.parse_args([serve.name, *arguments]))


if __name__ == "__main__":
    main(sys.argv[1:])
