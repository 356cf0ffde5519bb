"""What needs another Python or other packages than `setup_env.sh cpu dev` installs: `nox -s NAME`.

Long tests in the project's own environment are files of pytest in tests/slow/. MAINTAINING.md lists
both, and .github/workflows/weekly.yml runs both.
"""

import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CPU_PINS = "requirements/cpu.txt"
VLLM_PINS = "requirements/cpu_vllm.txt"
BFCL_PINS = "verl_gdpo/tools/evaluate/bfcl/requirements.txt"
# torch for the CPU is the one package with two indexes, and only PyPI's brings the others
WITHOUT_HASH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")

nox.options.default_venv_backend = "none"
nox.options.reuse_venv = "yes"

HIDDEN = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "data", "dist", "runs", "outputs", "*.egg-info"
)
OWN = "virtualenv"  # of a session that has an environment of its own


def shared_python() -> str:
    """Return the Python of the environment of `setup_env.sh cpu dev`, made where it is missing."""
    command = ["./setup_env.sh", "cpu", "dev"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return f"{made.stdout.strip()}/bin/python"


def environment(python: str, path: str = "") -> dict[str, str]:
    """Return the variables for this Python; the packages of the folder `path` come first."""
    env = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    return {**env, "PYTHONPATH": path} if path else env


def tested(session: nox.Session, *arguments: str, python: str = "", path: str = "") -> None:
    """Run pytest, with the shared Python or another one."""
    python = python or shared_python()
    command = (python, "-m", "pytest", *arguments)
    session.run(*command, env=environment(python, path), external=True)


def installed_beside(session: nox.Session, *packages: str) -> str:
    """Return a new folder of packages, for PYTHONPATH."""
    folder = ROOT / ".nox" / f"{session.name}-packages"
    shutil.rmtree(folder, ignore_errors=True)
    pip = (shared_python(), "-m", "pip", "install", "--quiet", "--target", str(folder))
    session.run(*pip, *packages, external=True)
    return str(folder)


@nox.session(default=False, venv_backend=OWN)
def pins(session: nox.Session) -> None:
    """Renews requirements/. Versions that fit stay; `nox -s pins -- --upgrade` takes new ones."""
    session.install("uv==0.13.9")
    installer = ("--group", "installer")
    cpu = compiled(session, "cpu", CPU_PINS, *installer)
    cpu = [(name, text) for name, text in cpu if not WITHOUT_HASH.match(name)]
    write_pins(CPU_PINS, cpu)
    # vLLM's build for CPUs names torch's, and asks for packages of pictures and sound
    overrides = Path(session.create_tmp()) / "overrides.txt"
    unused = ("torchvision", "torchaudio", "torchcodec")
    overrides.write_text(
        "torch==2.13.0\n" + "".join(f"{name}; sys_platform == 'never'\n" for name in unused)
    )
    options = ("--group", "cpu-vllm", "--override", str(overrides))
    vllm = compiled(session, "cpu", VLLM_PINS, *installer, *options)
    write_pins(VLLM_PINS, [(name, text) for name, text in vllm if not WITHOUT_HASH.match(name)])
    write_pins("requirements/gpu.txt", compiled(session, "gpu", "requirements/gpu.txt", *installer))
    # beside one of the others, whose versions it takes
    dev = compiled(session, "dev", "requirements/dev.txt", "--constraint", CPU_PINS)
    others = {name for name, _ in cpu}
    dev = [(name, text) for name, text in dev if not (name in others or WITHOUT_HASH.match(name))]
    write_pins("requirements/dev.txt", dev)
    write_pins(BFCL_PINS, compiled(session, "", BFCL_PINS, "--group", "bfcl"))  # apart from ours


def compiled(session: nox.Session, extra: str, old: str, *options: str) -> list[tuple[str, str]]:
    """Return (name, lines) of each package of an extra, for Linux and Python 3.10 to 3.12."""
    made = Path(session.create_tmp()) / f"{extra}.txt"
    project = ("pyproject.toml", "--extra", extra) if extra else ()
    if (ROOT / old).exists():
        shutil.copy(ROOT / old, made)  # uv keeps its versions
    command = ("uv", "pip", "compile", *project, *options)
    session.run(
        *(*command, "--universal", "--python-version", "3.10", "--generate-hashes"),
        *("--no-annotate", "--no-header", "--output-file", str(made), *session.posargs),
        env={"UV_PYTHON_DOWNLOADS": "never"},
        silent=True,
    )
    entries = re.findall(r"^(\S+?)==(.*\n(?:    .*\n)*)", made.read_text(), re.M)
    return [(name, f"{name}=={rest}") for name, rest in entries]


def write_pins(file: str, pins: list[tuple[str, str]]) -> None:
    header = "# Exact versions for Python 3.10-3.12, with hashes. Made by `nox -s pins`.\n"
    (ROOT / file).write_text(header + "".join(text for _, text in pins))


@nox.session
def verl(session: nox.Session) -> None:
    """Runs our tests of verl's inside on another verl, and prints which of its names remain.

    It is verl 0.9.0, or the first argument, such as the folder of a checkout: what pip takes. The
    other arguments go to pytest.
    """
    verl, *arguments = session.posargs or ["verl==0.9.0"]
    path = installed_beside(session, "--no-deps", verl)  # it runs with the dependencies of 0.9.1
    symbols = (shared_python(), "-W", "ignore", "tests/slow/verl_symbols.py")
    session.run(*symbols, env=environment(symbols[0], path), external=True)
    # a verl without V1 fails the files that import it, and runs the others
    tests = ("--continue-on-collection-errors", "tests/core/hooks", "tests/test_plugin.py")
    tested(session, "-m", "", *tests, *arguments, path=path)
    # what `check` asks of verl has other places in another version, which must not refuse a run
    healthy = ("tests/tools/test_check_mistakes.py", "-k", "healthy")
    tested(session, *healthy, path=path)


@nox.session(venv_backend=OWN, python=["3.11", "3.13"])
def trl(session: nox.Session) -> None:
    """Compares us with TRL's own code, without verl, and trains in a loop of one's own.

    Of verl's extras, none takes Python 3.13.
    """
    session.install("torch==2.13.0")
    session.install("-e", ".[trl]", "trl==1.16.0", "pytest>=8,<10")
    # TRL's imports emit warnings, which are errors in this project's tests; and the fixtures of
    # the other slow tests need more packages
    options = ("-W", "ignore", "--noconftest")
    files = (
        "tests/slow/trl_dialect.py",
        "tests/slow/trl_example.py",
        "tests/slow/trl_templates.py",
        "tests/repository/test_own_loop.py",
    )
    python = f"{session.bin}/python"
    tested(session, *options, *files, *session.posargs, python=python, path=".")


@nox.session(default=False, venv_backend=OWN)
def wheel(session: nox.Session) -> None:
    """Installs the wheel in an empty environment and trains there: docs/without_a_gpu.md."""
    # not `session.create_tmp()`: Ray's temporary files must not lie in a virtual environment
    made = Path(tempfile.mkdtemp(prefix="wheel-"))
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(made), ".", silent=True)
    (built,) = made.glob("*.whl")
    session.install("torch==2.13.0")
    session.install("verl==0.9.1")
    # pip would keep the package of an earlier session, which has the same version
    session.run("python", "-m", "pip", "uninstall", "--yes", "verl-gdpo", silent=True)
    page = (ROOT / "docs" / "without_a_gpu.md").read_text()
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.S):
        (made / name).write_text(code)
    executed = r"<!-- executed by noxfile.py -->\n```bash\n(.*?)```"
    (commands,) = re.findall(executed, page, re.S)
    commands = commands.replace("./verl-gdpo", str(built)).replace("=MODEL", "=model")
    env = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with session.chdir(made):
        session.run("bash", "-exc", commands.splitlines()[0], external=True)
        model = "import pathlib, tiny_chat_model as m; m.make_chat_model(pathlib.Path('model'))"
        session.run("python", "-c", model, env={"PYTHONPATH": str(ROOT / "tests" / "help")})
        session.run("bash", "-exc", commands, env=env, external=True)
    shutil.rmtree(made)


STATED = r'^(?:__version__|ADDRESS) = "(.*?)"'
GITHUB_SCHEMAS = {
    "workflows": "workflows/*.yml",
    "issue-forms": "ISSUE_TEMPLATE/[!c]*.yml",
    "issue-config": "ISSUE_TEMPLATE/config.yml",
}
# what an installation has without any extra
INSTALLED = """
import verl_gdpo
from verl_gdpo.tools import RECIPES
policy = RECIPES.parent / "cpu" / "tool_rl_policy" / "model.safetensors"
assert policy.exists() and (RECIPES / "train.yaml").exists(), RECIPES
assert "site-packages" in str(RECIPES), RECIPES
"""


@nox.session(default=False, venv_backend=OWN)
def package(session: nox.Session) -> None:
    """Builds in dist/ what an index gets, and runs it in empty Pythons of 3.10 to 3.13.

    A Python that uv cannot find is left out, with a line. The workflows that publish are checked
    too.
    """
    session.install("twine==7.0.0", "uv==0.13.9", "zizmor==1.32.0", "check-jsonschema==0.39.0")
    session.run("zizmor", "--offline", ".github")
    check = ("check-jsonschema", "--builtin-schema")
    session.run(*check, "vendor.dependabot", ".github/dependabot.yml")
    for schema, pattern in GITHUB_SCHEMAS.items():
        session.run(*check, f"vendor.github-{schema}", *map(str, Path(".github").glob(pattern)))
    source, dist = Path(session.create_tmp()) / "source", ROOT / "dist"
    for folder in (source, dist):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=HIDDEN)
    readme, package = source / "README.md", source / "verl_gdpo"
    init, terminal = ((package / f"{name}.py").read_text() for name in ("__init__", "terminal"))
    (version,), (address,) = re.findall(STATED, init, re.M), re.findall(STATED, terminal, re.M)
    readme.write_text(with_absolute_links(readme.read_text(), address, version))
    project = source / "pyproject.toml"
    project.write_text(with_addresses(project.read_text(), address, version))
    session.run("uv", "build", "--quiet", "--out-dir", str(dist), str(source))
    files = sorted(map(str, dist.glob("verl_gdpo-*")))
    session.run("twine", "check", "--strict", *files)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if not any("/tests/core/" in name for name in archive.getnames()):
            session.error(f"{sdist} lacks the tests")
    for python in ("3.10", "3.11", "3.12", "3.13"):
        find = ("uv", "python", "find", python)
        found = session.run(*find, success_codes=(0, 2), silent=True) or ""
        if not Path(found.strip()).is_file():
            session.log(f"Python {python} is not here, so it was not tried: {found}")
            continue
        empty = ("uv", "run", "--isolated", "--no-project", "--directory", str(dist))
        for file in files:
            run = (*empty, "--python", python, "--with", file)
            session.run(*run, "verl-gdpo", "--version")
            session.run(*run, "python", "-c", INSTALLED)


# a narrow screen breaks the lines of code, and does not cut them
NARROW = """@media screen and (max-width: 600px) {
  .md-typeset pre > code { white-space: pre-wrap; overflow-wrap: anywhere; }
  .md-typeset :not(pre) > code { overflow-wrap: anywhere; }
}
"""
# in the form of mkdocs, which zensical reads; the navigation is the README's list of pages
SITE = {
    "site_name": "verl-gdpo",
    "docs_dir": "pages",
    "extra_css": ["narrow.css"],
    "theme": {
        "name": "material",
        "font": False,  # nothing is fetched from elsewhere
        "features": ["content.code.copy", "navigation.footer", "navigation.sections"],
    },
    "markdown_extensions": [
        *("attr_list", "md_in_html", "tables", "pymdownx.highlight", "pymdownx.superfences"),
        {"toc": {"slugify": {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}}}},
    ],
}


@nox.session(default=False, venv_backend=OWN)
def site(session: nox.Session) -> None:
    """Makes a site of the README and of all pages to which its links lead, with a search."""
    session.install("zensical==0.0.73")  # newer ones ask for a package that PyPI lacks
    folder = Path(session.create_tmp()) / "site"
    shutil.rmtree(folder, ignore_errors=True)
    copied, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        copied.add(page)
        copy = folder / "pages" / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
        if page.suffix == ".md":
            links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
            todo += {(page.parent / link).resolve() for link in links} - copied - {*todo}
    listed = (ROOT / "README.md").read_text().split("\n## Where to read on\n")[1].split("\n## ")[0]
    sections = re.findall(r"^- \*\*(.+?)\*\*(.*)$", listed, re.M)
    nav = [
        {name: [{title: page} for title, page in re.findall(r"\[(.+?)\]\((.+?)\)", links)]}
        for name, links in sections
    ]
    (folder / "pages" / "narrow.css").write_text(NARROW)
    settings = {**SITE, "nav": [{"Start": "README.md"}, *nav]}
    terminal = (ROOT / "verl_gdpo" / "terminal.py").read_text()
    (address,) = re.findall(STATED, terminal, re.M)
    if address:
        settings |= {"repo_url": address, "repo_name": "verl-gdpo"}
    config = folder / "mkdocs.yml"
    config.write_text(json.dumps(settings))
    session.run("zensical", "build", "--strict", "--config-file", str(config))
    pages = sum(page.suffix == ".md" for page in copied)
    built = len([*(folder / "site").rglob("index.html")])
    if built != pages:
        session.error(f"{pages} pages became {built}")
    session.log(f"open {folder / 'site' / 'index.html'}")


def with_absolute_links(text: str, address: str, version: str) -> str:
    """Return the README for an index, which has none of our files; as it is without an address."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({address}/{kind}/v{version}/{link[2]})"

    return re.sub(r"(!?\[[^]]*\])\((?!https?:|#)([^)]+)\)", absolute, text) if address else text


# of [project.urls], behind the address
ADDRESSES = {
    "Homepage": "",
    "Documentation": "/tree/v{version}/docs",
    "Changelog": "/blob/v{version}/CHANGELOG.md",
    "Issues": "/issues",
    "Repository": "",
}


def with_addresses(project: str, address: str, version: str) -> str:
    """Return pyproject.toml for an index, with links to the repository; without an address, none.

    Args:
        project: the text of the file.
        address: that of `verl_gdpo.terminal`.
    """
    if not address:
        return project
    lines = [
        f'{name} = "{address}{path.format(version=version)}"' for name, path in ADDRESSES.items()
    ]
    return project.replace("[project.urls]\n", "[project.urls]\n" + "\n".join(lines) + "\n")


# a plugin of pytest: an example that fails is enough, none is made smaller or kept
WITHOUT_SHRINKING = """
from hypothesis import Phase, settings
def pytest_configure():
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutmut", settings.get_profile("usual"), phases=phases)
    settings.load_profile("mutmut")
"""


@nox.session(default=False)
def mutmut(session: nox.Session) -> None:
    """Finds changes of the code between rewards and advantages that no test notices (90 minutes).

    At most one change in twenty may be missed: most of these have no effect, others need a GPU or
    only change the text of a message.
    """
    copy = ROOT / ".nox" / "mutmut-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=HIDDEN)
    with_decorators_below(copy / "verl_gdpo" / "algorithm" / "equation.py")
    python = shared_python()
    # what it needs too comes in the versions of the environment
    frozen = session.run(python, "-m", "pip", "freeze", silent=True, external=True) or ""
    pins = copy.with_name("mutmut-constraints.txt")
    pins.write_text("".join(re.findall(r"^[\w.-]+==.*\n", frozen, re.M)))
    path = installed_beside(session, "--constraint", str(pins), "mutmut==3.8.1")
    Path(path, "without_shrinking.py").write_text(WITHOUT_SHRINKING)
    env = {**environment(python, path), "PYTEST_PLUGINS": "without_shrinking"}
    session.chdir(copy)
    for command in (("run", *session.posargs), ("results",), ("export-cicd-stats",)):
        session.run(python, "-m", "mutmut", *command, env=env, external=True)
    found = json.loads((copy / "mutants" / "mutmut-cicd-stats.json").read_text())
    missed = found["survived"] + found["no_tests"]
    session.log(f"{missed} of {found['total']} mutants were not found")
    if missed > found["total"] / 20:
        session.error(f"more than one in twenty: see `mutmut browse` in {copy}")


def with_decorators_below(file: Path) -> None:
    """Write decorators as `f = decorator(f)` at the end: mutmut skips decorated functions."""
    text, decorated = file.read_text(), re.compile(r"^@(torch\.no_grad\(\))\n(?=def (\w+))", re.M)
    calls = [f"{name} = {decorator}({name})\n" for decorator, name in decorated.findall(text)]
    file.write_text(decorated.sub("", text) + "\n" + "".join(calls))
