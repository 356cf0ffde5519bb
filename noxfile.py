"""Tests that need an environment of their own: `nox -s trl`.

pip's settings hold. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares the gigabytes
of CUDA that come with PyPI's torch.
"""

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


@nox.session
def trl(session: nox.Session) -> None:
    """The dialect `trl` against TRL's own method, which pytest does not collect by itself."""
    session.install("torch==2.13.0")
    session.install("trl==1.16.0", "pytest>=8,<10")
    # TRL's imports warn, and this project's tests take warnings for errors
    command = ("pytest", "-W", "ignore", "tests/trl_dialect.py", *session.posargs)
    session.run(*command, env={"PYTHONPATH": "."})
