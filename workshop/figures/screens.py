"""What a person sees of `verl-gdpo report` and `verl-gdpo replay`, as pictures of docs/."""

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from verl_gdpo.tools import advice
from verl_gdpo.tools.report.page import Page, build_page, write

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREEN = (1280, 680)  # pixels: to the end of the advice
COLUMNS = 102  # of the terminal
NOTE = "first screen"  # under which report.png keeps its words
REPLAY = ("replay", "--arm", "grpo", "--top", "2")
MONOSPACE = "ui-monospace, Menlo, Consolas, monospace"  # a picture cannot load a font


def report(runs: Sequence[Path], out: Path) -> None:
    """The first screen of the report on `runs`, as a PNG that also keeps its words.

    Raises:
        ValueError: there is no browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(f"no browser for {out.name}: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        page = build_page(runs)
        index = write(page, Path(folder) / "report")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/browser", "--blink-settings=preferredColorScheme=1"]
        command += ["--virtual-time-budget=5000"]
        command += [f"--window-size={SCREEN[0]},{SCREEN[1]}", f"--screenshot={out}", index.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
    make_smaller(out, json.dumps(first_screen(page)))


def make_smaller(picture: Path, note: str = "") -> None:
    """With a palette of 128 colours, which is as good for lines and text.

    Args:
        note: what the file keeps under `NOTE`, beside what is seen.
    """
    kept = PngInfo()
    if note:
        kept.add_text(NOTE, note)
    small = Image.open(picture).convert("RGB").quantize(128)
    small.save(picture, optimize=True, pnginfo=kept)


def first_screen(page: Page) -> dict[str, list[str]]:
    """Return what the first screen says, whatever the numbers are, and the metrics of its run.

    A test compares it with today's report on such metrics, so that an old picture is noticed.
    """
    charts = page.sections[0].charts
    return {
        "metrics": list(page.arms[0].runs[0].curves),
        "charts": [f"{chart.title} ({chart.unit})" for chart in charts],
        "advice": [advice.TITLE, advice.CAPTION, *advice.HEADER],
        "results": list(page.tables[0].header),
    }


def replay(run: Path, out: Path) -> None:
    """The terminal after a replay of `run`, as an SVG; `run` is named as it is given."""
    shown = " ".join(["verl-gdpo", REPLAY[0], str(run), *REPLAY[1:]])
    command = [sys.executable, "-m", "verl_gdpo", REPLAY[0], str(run), *REPLAY[1:]]
    done = subprocess.run(
        ["env", f"COLUMNS={COLUMNS}", *command], check=True, capture_output=True, text=True
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(done.stdout.rstrip()), soft_wrap=False, overflow="fold")
    svg = console.export_svg(title=f"$ {shown}", theme=MONOKAI, unique_id="replay")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    out.write_text(re.sub(r"font-family: [^;]*;", f"font-family: {MONOSPACE};", svg))
