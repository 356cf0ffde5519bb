"""Tests on versions of verl without V1 trainers, each in an environment of its own: `nox`.

pip's settings hold. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares the gigabytes
of CUDA that come with PyPI's torch.
"""

import nox

VERSIONS = ("0.7.1", "0.8.0")
TEST_FILES = ("tests/test_legacy_trainer.py", "tests/test_other_trainers.py")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


def make_session(version: str) -> None:
    @nox.session(name=f"verl-{version}")
    def test(session: nox.Session) -> None:
        session.install("torch==2.13.0")
        # these versions set no bound, and import names that transformers 5 lacks
        session.install(f"verl=={version}", "transformers>=4.57,<5", "pytest>=8,<10", "-e", ".")
        session.run(
            "pytest",
            *TEST_FILES,
            *session.posargs,
            env={"VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin", "EXPECTED_VERL": version},
        )


for version in VERSIONS:
    make_session(version)
