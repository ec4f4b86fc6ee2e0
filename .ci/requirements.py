"""Prints what pyproject.toml requires at run time and for development, one requirement a line, for `pip install -r`."""

from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
if __name__ == "__main__":
    print("\n".join(project["dependencies"] + project["optional-dependencies"]["dev"]))
