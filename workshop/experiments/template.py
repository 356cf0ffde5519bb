"""The template of an experiment's page."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


def template_beside(module: str, name: str = "page.md.jinja") -> Template:
    """Return a template in the folder of a module, given by its `__file__`."""
    environment = Environment(
        loader=FileSystemLoader(Path(module).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
