"""Says which nox sessions are due, or notes a pass: arguments NAME COMMIT SECONDS COUNTS.

A session is due if a path that it covers has changed since its last pass. noxfile.py names the
paths, and notes a pass only if it ran the whole session on a commit, so nobody writes the file by
hand. `tests/run.sh` ends with the sessions that are due.
"""

import ast
import datetime
import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FILE = "tests/slow/last_passes.json"
MOST_COMMITS = 100  # that touch what a session covers, since its last pass


class UnknownError(Exception):
    """git does not tell, so nobody knows what has changed since a pass."""


def git(repo: Path, *command: str) -> str:
    """Return what git prints.

    Raises:
        UnknownError: it fails, or is not there.
    """
    try:
        done = subprocess.run(["git", *command], cwd=repo, capture_output=True, text=True)
    except FileNotFoundError:
        raise UnknownError("git is not installed") from None
    if done.returncode:
        raise UnknownError(done.stderr.strip())
    return done.stdout.strip()


def check_history(repo: Path) -> None:
    """Check that the repository has all its commits.

    Raises:
        UnknownError: it is a shallow clone, or an archive without git.
    """
    if Path(git(repo, "rev-parse", "--show-toplevel")).resolve() != repo.resolve():
        raise UnknownError(f"{repo} is no repository of git's")
    if git(repo, "rev-parse", "--is-shallow-repository") == "true":
        raise UnknownError(f"{repo} is a shallow clone: `git fetch --unshallow` gets its commits")


def covered(repo: Path) -> dict[str, list[str]]:
    """Return the paths that each session covers: the arguments of its `@recorded`."""
    functions = ast.parse((repo / "noxfile.py").read_text()).body
    return {
        function.name: [ast.literal_eval(path) for path in decorator.args]
        for function in functions
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "recorded"
    }


def is_under(file: str, paths: list[str]) -> bool:
    return any(file == path or (path.endswith("/") and file.startswith(path)) for path in paths)


def read(repo: Path) -> dict[str, dict]:
    return json.loads((repo / FILE).read_text())


def note(repo: Path, name: str, commit: str, seconds: int, counts: dict[str, int]) -> None:
    one = {"commit": commit, "date": str(datetime.date.today()), "seconds": seconds}
    one |= {key: counts.get(key, 0) for key in ("passed", "failed", "skipped")}
    sessions = covered(repo)
    passes = {key: last for key, last in read(repo).items() if key in sessions}
    passes[name] = {**one, "covers": sessions[name]}
    (repo / FILE).write_text(json.dumps(passes, indent=2, sort_keys=True) + "\n")


def changed(repo: Path, commit: str, paths: list[str]) -> list[str]:
    """Return the files below the paths that differ from the commit, or are new."""
    differ = git(repo, "diff", "--name-only", commit, "--", *paths)
    new = git(repo, "ls-files", "--others", "--exclude-standard", "--", *paths)
    return sorted({*differ.splitlines(), *new.splitlines()})


def state(repo: Path) -> tuple[list[str], list[str]]:
    """Return the sessions that are due, and those whose pass is missing or too old: lines with why.

    Raises:
        UnknownError: as `check_history`.
    """
    check_history(repo)
    passes, due, overdue = read(repo), [], []
    for name, paths in covered(repo).items():
        last, line = passes.get(name, {}), f"nox -s {name:<12}"
        try:
            files = changed(repo, last["commit"], paths)
            commits = git(repo, "rev-list", "--count", f"{last['commit']}..HEAD", "--", *paths)
        except KeyError:
            why = "no pass is noted"
        except UnknownError:
            why = f"commit {last['commit'][:10]} of its pass is not here"
        else:
            if files:
                more = f" and {len(files) - 1} more" if files[1:] else ""
                when = f"{last['date']} at {last['commit'][:10]}, {last.get('seconds', '?')} s"
                due.append(f"{line}{files[0]}{more} changed since its pass ({when})")
            if int(commits) > MOST_COMMITS:
                overdue.append(f"{line}{commits} commits have touched what it covers")
            continue
        due.append(f"{line}{why}")
        overdue.append(f"{line}{why}")
    return due, overdue


def main(arguments: list[str]) -> None:
    if arguments:
        name, commit, seconds, counts = arguments
        note(REPO, name, commit, int(seconds), json.loads(counts))
        return
    try:
        lines, _ = state(REPO)
    except UnknownError as error:
        print(f"Which nox sessions are due is not known: {error}")
        return
    print("Nox sessions that are due:" if lines else "No nox session is due.", *lines, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
