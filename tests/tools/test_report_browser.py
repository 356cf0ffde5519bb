"""The report in a real browser, at two widths, light and dark; skipped where there is none."""

import functools
import json
import re
import subprocess
from queue import Queue

import pytest
from local_server import Files, serving
from of_machine import browser
from run_folder_writer import make_run, write_metrics

from verl_gdpo.tools.report.page import build_page, write

WIDTHS = (1280, 1280, 380, 380)  # light and dark
HEIGHT = 900  # of a laptop, in which all of the first screen is seen, with the advice on two arms
HOSTILE = (
    "</pre><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
)
# the page runs no script but its own: it is looked at from around it
AROUND = """<!doctype html><body><script>
const found = [], wait = () => new Promise(done => setTimeout(done, 200));
// a busy machine draws later than the clock of the test says
const until = async seen => { for (let i = 0; i < 700 && !seen(); i++) await wait(); };
// what scrolls along covers the shadow at an edge that is reached
const shadowed = style => style.backgroundAttachment === 'local, local, scroll, scroll'
  && style.backgroundImage.split('linear-gradient').length === 5;
async function look(frame) {
  frame.scrollIntoView();  // the browser draws no frame that is out of sight
  const page = frame.contentDocument, root = page.documentElement;
  const all = what => [...page.querySelectorAll(what)], one = what => page.querySelector(what);
  const style = what => frame.contentWindow.getComputedStyle(what);
  const box = e => e.getBoundingClientRect(), Key = frame.contentWindow.KeyboardEvent;
  const press = key => plot.dispatchEvent(new Key('keydown', { key }));
  const first = all('header, .screen figure, .screen .card').map(e => box(e).bottom);
  const overflows = e => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1;
  const numbers = all('figure')[0].querySelectorAll('.u-series:not(.points) .u-value');
  const link = one('a[data-first]'), figure = one(link.hash), plot = figure.querySelector('.plot');
  const live = figure.querySelector('.live'), scrolls = all('.scroll');
  const seen = {
    asked: frame.width, width: root.clientWidth, scroll: root.scrollWidth, title: page.title,
    dark: frame.style.colorScheme === 'dark',
    lowest: Math.max(...first), figures: all('figure').length,
    canvases: all('figure canvas').length,
    narrowest: Math.min(...all('canvas').map(e => box(e).width)),
    loaded: frame.contentWindow.performance.getEntriesByType('resource')
      .map(e => e.name).filter(name => !name.startsWith('data:')),
    shadows: scrolls.filter(e => shadowed(style(e))).length, tables: scrolls.length,
    background: style(page.body).backgroundColor,
    cut: all('#findings, #advice, .card, .u-legend, #results .scroll').filter(overflows).length,
    begins: Object.fromEntries(all('figure').map(e => [e.querySelector('.strong').textContent,
      e.querySelector('.u-over').offsetLeft])),
    legend: [...numbers].map(e => e.textContent), results: one('#results table').textContent,
  };
  link.click();
  await until(() => live.textContent && page.activeElement === plot);
  seen.linked = live.textContent;
  seen.focused = page.activeElement === plot;
  seen.others = all('.u-legend').map(e => e.textContent).filter(text => text.includes('22')).length;
  press('ArrowRight');
  seen.right = live.textContent;
  press('Escape');
  await wait();
  press('Home');
  seen.home = live.textContent;
  figure.querySelector('details').open = true;
  await until(() => figure.querySelector('details tr'));
  seen.rows = figure.querySelectorAll('details tr').length;
  const log = figure.querySelector('button');
  log.click();
  await wait();
  seen.log = [log.getAttribute('aria-pressed'), figure.querySelectorAll('canvas').length];
  found.push(seen);
  if (found.length === WIDTHS.length)
    await fetch('/', { method: 'POST', body: JSON.stringify(found) });
}
const WIDTHS = %s;
let queue = Promise.resolve();
for (const [number, width] of WIDTHS.entries()) {
  const frame = document.createElement('iframe');
  frame.style.colorScheme = number %% 2 ? 'dark' : 'light';
  frame.width = width; frame.height = 800; frame.src = 'index.html';
  frame.onload = () => { queue = queue.then(() => look(frame)); };  // one has the focus
  document.body.append(frame);
}
</script></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [
        make_run(folder / arm, arm, steps=30, output=HOSTILE)
        for arm in ("gdpo", "a_long_name_of_an_arm")
    ]
    lines = [json.loads(line) for line in (runs[0] / "metrics/1.jsonl").read_text().splitlines()]
    for line in lines:
        step, norm = line["step"], 900.0 if line["step"] > 21 else 0.25
        line["data"] |= {"actor/grad_norm": norm if step != 7 else None, "actor/entropy": 0.5}
        line["data"] |= {"actor/ppo_kl": -2.5e-6 * step, "actor/kl_loss": 25e6 * step}
    write_metrics(runs[0], lines)
    write(build_page(runs), folder / "out")
    (folder / "out" / "around.html").write_text(AROUND % json.dumps(WIDTHS))
    return folder / "out"


class Handler(Files):
    """Serves the page, and keeps what the script around it sends."""

    answers: Queue[bytes] = Queue()

    def do_POST(self):
        self.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()


def test_the_page_in_a_browser(report, tmp_path):
    handler = functools.partial(Handler, directory=report)
    log = tmp_path / "log"
    with serving(handler) as server, log.open("w") as stderr:
        command = [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--enable-logging=stderr", "--no-proxy-server", f"--user-data-dir={tmp_path}"),
            *("--remote-debugging-port=0", f"{server.url}/around.html"),
        ]
        started = subprocess.Popen(command, stderr=stderr)
        try:
            frames = json.loads(Handler.answers.get(timeout=180))
        finally:
            started.terminate()
            started.wait(timeout=60)
    assert "CONSOLE" not in log.read_text(), log.read_text()
    assert sorted(int(frame["asked"]) for frame in frames) == sorted(WIDTHS)
    for frame in frames:
        assert frame["scroll"] <= frame["width"] == int(frame["asked"])
        assert frame["title"] == "gdpo, a_long_name_of_an_arm"
        assert frame["loaded"] == []
        assert frame["figures"] == frame["canvases"] > 10 and frame["narrowest"] > 250
        assert frame["tables"] == frame["shadows"] == 1
        if int(frame["asked"]) > 1000:
            assert frame["lowest"] < HEIGHT
        # nothing is cut, and a legend has the numbers of the table
        assert frame["cut"] == 0
        # the numbers of an axis have all their digits, and their sign
        assert frame["begins"]["Entropy"] == 56
        assert frame["begins"]["KL of one update"] > 56
        assert frame["begins"]["KL to the reference policy"] > 75
        step, *ends = frame["legend"]
        assert step == "30" and len(ends) == 2
        assert all(end in frame["results"] for end in ends)
        brightness = sum(map(int, re.findall(r"\d+", frame["background"])))
        assert brightness < 150 if frame["dark"] else brightness > 600
        # the finding leads to its step, in the chart that shows it; and the keyboard goes on
        assert frame["linked"] == "step 22: gdpo 900" and frame["focused"]
        assert frame["others"] > 5
        assert (frame["right"], frame["home"]) == (
            "step 23: gdpo 900",
            "step 0: gdpo 0.25",
        )
        assert frame["rows"] == 32 and frame["log"] == ["true", 1]
