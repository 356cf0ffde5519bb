"""The report in a real browser, at two widths, light and dark; skipped where there is none."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from run_folder_writer import make_run

from verl_gdpo.tools.report.page import build_page, write

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = (1280, 390)
SCREEN = 900  # pixels
HOSTILE = (
    "</pre><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
)
# the page allows no script, not even ours: it is looked at from around it
AROUND = """<!doctype html><body><script>
const found = [];
// what scrolls along covers the shadow at an edge that is reached
const shadowed = style => style.backgroundAttachment === 'local, local, scroll, scroll'
  && style.backgroundImage.split('linear-gradient').length === 5;
function look(event) {
  const frame = event.target, page = frame.contentDocument, root = page.documentElement;
  const images = [...page.images];
  const scrolls = [...page.querySelectorAll('.scroll')];
  const answers = [...page.querySelectorAll('.answers a')];
  found.push({
    asked: frame.width, width: root.clientWidth, scroll: root.scrollWidth, title: page.title,
    images: images.length,
    broken: images.filter(i => !i.complete || !i.naturalWidth).length,
    dark: images.filter(i => i.currentSrc === i.parentNode.querySelector('source').srcset).length,
    narrowest: Math.min(...images.map(i => i.getBoundingClientRect().width)),
    loaded: frame.contentWindow.performance.getEntriesByType('resource')
      .map(e => e.name).filter(name => !name.startsWith('data:')),
    scripts: page.scripts.length,
    hidden: scrolls.filter(s => s.scrollWidth > s.clientWidth).length,
    shadows: scrolls.filter(s => shadowed(frame.contentWindow.getComputedStyle(s))).length,
    tables: scrolls.length,
    answers: answers.length,
    lowest: Math.max(...answers.map(a => a.getBoundingClientRect().bottom)),
    lost: [...page.querySelectorAll('nav a')].filter(a => !page.querySelector(a.hash)).length,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  });
  if (found.length === WIDTHS.length) document.body.dataset.found = JSON.stringify(found);
}
const WIDTHS = %s;
for (const width of WIDTHS) {
  const frame = document.createElement('iframe');
  frame.width = width; frame.height = 900; frame.onload = look; frame.src = 'index.html';
  document.body.append(frame);
}
</script></body>"""

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: apt-get install chromium, or put google-chrome on PATH"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [
        make_run(folder / f"{arm}{seed}", arm, seed, steps=12, output=HOSTILE)
        for arm in ("gdpo", "a_rather_long_name_of_an_arm")
        for seed in range(2)
    ]
    write(build_page(runs), folder / "out")
    (folder / "out" / "around.html").write_text(AROUND % json.dumps(WIDTHS))
    return folder / "out"


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(report, tmp_path, dark):
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=20000"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            (report / "around.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    frames = json.loads(unescape(match[1]))
    assert sorted(int(frame["asked"]) for frame in frames) == sorted(WIDTHS)
    for frame in frames:
        assert frame["scroll"] <= frame["width"] == int(frame["asked"])
        assert frame["title"] == "Comparison: gdpo, a_rather_long_name_of_an_arm"
        assert (frame["broken"], frame["scripts"], frame["loaded"], frame["lost"]) == (0, 0, [], 0)
        assert frame["images"] > 10 and frame["narrowest"] > 250
        assert frame["tables"] == frame["shadows"] > 4
        assert frame["answers"] == 3
        if int(frame["asked"]) > 1000:
            assert frame["lowest"] < SCREEN
        else:
            assert frame["hidden"] > 0
        assert frame["dark"] == (frame["images"] if dark else 0)
        brightness = sum(map(int, re.findall(r"\d+", frame["background"])))
        assert brightness < 150 if dark else brightness > 600
