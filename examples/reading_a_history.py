"""What a run did, from its history: numbers, a verdict on every knob, a figure and a page.

    python examples/reading_a_history.py runs/quickstart/history.jsonl --out report

`hdet report runs/quickstart` makes the page too.
"""

import argparse
from pathlib import Path

import hdet
from hdet.report import overview, page, verdicts


def read(path: Path, out: Path) -> None:
    history = hdet.History(path)
    out.mkdir(parents=True, exist_ok=True)

    for record in history:  # one record a window
        moved = {name: f"{move:+.2f}" for name, move in record.moves.items() if move}
        print(f"steps {record.start} to {record.stop}: loss {record.loss:.3f}, moves {moved}")

    for verdict in verdicts(history.windows):
        print(f"{verdict.knob}: {verdict.start} -> {verdict.end}, {verdict.trust}")
        print(f"  moved {verdict.moved}")
        print(f"  {verdict.outlook}")

    overview(history, title=path.parent.name).savefig(out / "overview.pdf")
    (out / "report.html").write_bytes(page(history).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("history", type=Path)
    parser.add_argument("--out", type=Path, default=Path("report"))
    options = parser.parse_args()
    read(options.history, options.out)
