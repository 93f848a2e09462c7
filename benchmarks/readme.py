"""Writes the measured figures of benchmarks/results/quickstart.json into README.md, between two markers.

python benchmarks/readme.py [--check]      with --check: exit 1 when README.md differs from the JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START, END = "<!-- figures: start -->", "<!-- figures: end -->"


def table(result: dict[str, Any]) -> str:
    """The figures as a Markdown table, one row a seed."""
    rows = [
        "| seed | SFT | after SAO | rewards shuffled | seconds |",
        "|---|---|---|---|---|",
    ]
    columns = zip(result["seeds"], result["sft"], result["sao"], result["shuffled"], result["seconds"], strict=True)
    for seed, sft, sao, shuffled, seconds in columns:
        rows.append(f"| {seed} | {sft:.1%} | **{sao:.1%}** | {shuffled:.1%} | {seconds:.0f} |")
    staleness = sum(result["mean_staleness"]) / len(result["mean_staleness"])
    spanning = sum(result["spanning_fraction"]) / len(result["spanning_fraction"])
    rows += [
        "",
        f"{result['problems'][0]} held-out problems, 4 samples each at temperature 1; two cores, no GPU; "
        f"`{result['command']}` at commit "
        f"`{result['commit'][:10]}`. Mean staleness {staleness:.2f} versions; {spanning:.2%} of the trained rollouts "
        "hold tokens of more than one version.",
    ]
    return "\n".join(rows)


def main() -> None:
    """Rewrite README.md, or compare."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/quickstart.json").read_text())
    before, rest = text.split(START)
    after = rest.split(END)[1]
    new = f"{before}{START}\n{table(result)}\n{END}{after}"
    if "--check" in sys.argv:
        sys.exit(0 if new == text else "README.md differs from results/quickstart.json; run this without --check")
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
