"""Faults by seed against real pods: `.venv/bin/python tests/chaos --help`; see CONTRIBUTING.md."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from tandem_chaos.command import main

main()
