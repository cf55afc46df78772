"""``kvbench new-plugin NAME``: the beginnings of a plugin, a distribution of its own that works as it is."""

import argparse
import keyword
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from kvbench.api import API_VERSION
from kvbench.errors import ConfigurationError
from kvbench.registry import load_registry

PREFIX = "kvbench-"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
TAKEN_CLASSES = ("Affine", "Calibration", "Quantizer")  # names that the generated module uses
FILES = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "src/{module}/__init__.py": "init.py.template",
    "src/{module}/quantizer.py": "quantizer.py.template",
    "tests/test_quantizer.py": "test_quantizer.py.template",
}


def main(arguments: Sequence[str]) -> int:
    """Write the plugin and say what to do with it."""
    parser = argparse.ArgumentParser(prog="kvbench new-plugin", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="name of the quantizer: small letters, digits, dashes")
    parser.add_argument("--directory", type=Path, default=Path(), help="folder to put it in (default: this one)")
    options = parser.parse_args(list(arguments))
    folder = write_plugin(options.name, options.directory)
    name = options.name.removeprefix(PREFIX)
    print(f"Wrote {folder}. Next:\n")
    print(f"    pip install -e '{folder}[dev]'")
    print(f"    pytest {folder}")
    print(f"    kvbench quantizer={name}\n")
    print(f"The method is in {folder / 'src' / _module(name) / 'quantizer.py'}.")
    return 0


def write_plugin(name: str, directory: Path) -> Path:
    """Write the distribution ``kvbench-NAME`` under ``directory`` and return its folder.

    Raises ConfigurationError for a name that is not allowed or taken, or a folder that is there.
    """
    name = name.removeprefix(PREFIX)
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"'{name}' cannot name a plugin: use small letters, digits and single dashes, such as 'my-quant'."
        )
    taken = load_registry().quantizers.get(name)
    if taken:
        raise ConfigurationError(
            f"quantizer '{name}' is already provided by {taken.distribution} {taken.version}. Choose another name."
        )
    folder = directory / f"{PREFIX}{name}"
    if folder.exists():
        raise ConfigurationError(f"{folder} is already there. Choose another name or --directory.")
    values = {
        "name": name,
        "distribution": f"{PREFIX}{name}",
        "module": _module(name),
        "cls": _class(name),
        "api": API_VERSION.partition(".")[0],
    }
    templates = resources.files("kvbench") / "plugin_template"
    try:
        for place, template in FILES.items():
            path = folder / place.format(**values)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = Template((templates / template).read_text(encoding="utf-8")).substitute(values)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {error.filename}: {error.strerror}. Choose another --directory."
        ) from error
    return folder


def _module(name: str) -> str:
    return f"{PREFIX}{name}".replace("-", "_")


def _class(name: str) -> str:
    camel = "".join(word.capitalize() for word in name.split("-"))
    return f"{camel}Quantizer" if keyword.iskeyword(camel) or camel in TAKEN_CLASSES else camel
