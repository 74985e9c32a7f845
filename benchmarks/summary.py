# SPDX-License-Identifier: Apache-2.0
"""Write benchmarks/results/summary.json: the newest figure of each id, from the receipts beside it.

    python benchmarks/summary.py [RESULTS]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1


def summarise(results: Path, root: Path = ROOT) -> dict:
    """The newest figure of each id, sorted by id.

    Args:
        results: folder of receipts; a file without "figures" is none.
        root: folder that the receipts' paths are told from.

    Returns:
        {"schema", "figures": [{"id", "value", "unit", "machine", "scope", "receipt"}]}; `machine` is the card,
        `scope` which code ran on it.

    Raises:
        ValueError: a receipt of another schema, by name.
    """
    receipts = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if path.name == "summary.json" or "figures" not in content:
            continue
        if content["schema"] != SCHEMA:
            raise ValueError(f"{path.name} has schema {content['schema']}, this reads {SCHEMA}")
        receipts.append((content["date"], path, content))
    newest = {}
    for _, path, content in sorted(receipts, key=lambda entry: entry[0]):
        for figure in content["figures"]:
            newest[figure["id"]] = {
                "id": figure["id"], "value": figure["value"], "unit": figure["unit"],
                "machine": content["machine"]["gpu"], "scope": content["scope"],
                "receipt": path.relative_to(root).as_posix(),
            }  # fmt: skip
    return {"schema": SCHEMA, "figures": [newest[name] for name in sorted(newest)]}


def main() -> None:
    results = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    content = summarise(results, ROOT if results.is_relative_to(ROOT) else results)
    (results / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(content['figures'])} figures in {results / 'summary.json'}")


if __name__ == "__main__":
    main()
