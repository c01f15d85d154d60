"""Draw docs/pictures/*.mmd as SVG, so that no page of the site asks another server for a drawing program.

    make diagrams

Needs npm, which fetches mermaid, and a Chromium. Each drawing carries the hash of its source, which a test compares.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
MERMAID = "mermaid@11.17.2"
DRAW = """async ([name, source]) => {
  mermaid.initialize({ startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: { htmlLabels: false } });
  return (await mermaid.render(name, source)).svg;
}"""


def digest(source: str) -> str:
    """What ties a drawing to its source."""
    return hashlib.sha256(source.encode()).hexdigest()


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        packed = subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()
        with tarfile.open(Path(folder) / packed) as archive:
            archive.extract("package/dist/mermaid.min.js", folder, filter="data")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in sorted(HERE.glob("*.mmd")):
            source = path.read_text(encoding="utf-8")
            view = browser.new_page()
            view.add_script_tag(path=Path(folder) / "package" / "dist" / "mermaid.min.js")
            drawn = view.evaluate(DRAW, [path.stem, source])
            width = drawn.partition('viewBox="')[2].partition('"')[0].split()[2]
            sized = drawn.replace('width="100%"', f'width="{float(width):.0f}"', 1)
            light = sized.replace('style="', 'style="background: #ffffff; ', 1)
            path.with_suffix(".svg").write_text(f"<!-- {digest(source)} -->\n{light}\n", encoding="utf-8")
            print(f"{path.with_suffix('.svg').name}: {len(light)} characters")


if __name__ == "__main__":
    main()
